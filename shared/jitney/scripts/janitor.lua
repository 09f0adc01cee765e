#!lua flags=allow-oom
-- with: base fair pace places outbox ending recount
-- What no claim comes across. ARGV: prefix, slice, resume wait, policy (fail | continue), keep, fingerprint of
-- the caller's build or ''.
-- Returns what was done, what waits now, and 1 if there may be more to do.
local slice, wait_ms, policy, keep_ms, fp = num(ARGV[2]), num(ARGV[3]), ARGV[4], num(ARGV[5]), ARGV[6]
local GRACE_MS = 30000
-- Twice as long as a worker lets pass between two rounds.
local UNSEEN_MS = 30000
local fps = P .. ':fps'
local expired, orphans, fixed = 0, 0, 0
local moved = make_due(slice)
-- A slice was full: there may be more of its kind.
local is_cut = moved == slice

local function keep(job)
  return job.ttl > 0 and job.ttl or keep_ms
end

-- Deadlines of jobs that nobody looks at. The owner of a running one ends it itself, with its text: it has GRACE_MS.
local function end_late()
  local key = P .. ':deadlines'
  local ids = redis.call('ZRANGEBYSCORE', key, '-inf', NOW, 'LIMIT', 0, slice)
  is_cut = is_cut or #ids == slice
  for _, id in ipairs(ids) do
    local job = load_job(id)
    local limit = job and job.deadline > 0 and job.deadline + GRACE_MS
    if not job or job.state == 'done' then
      redis.call('ZREM', key, id)
    elseif job.state ~= 'running' and is_late(job) or limit and NOW >= limit then
      expire(job, keep(job))
      expired = expired + 1
    elseif limit then
      redis.call('ZADD', key, job.state == 'running' and limit or job.deadline, id)
    elseif job.seq > 0 then
      redis.call('ZREM', key, id)
    else
      redis.call('ZADD', key, NOW + GRACE_MS, id)
    end
  end
end

-- While nobody looked after them, because the server was away or its clock was set forward, none of them could be
-- seen: each gets its time anew.
local function excuse_unseen(builds)
  local looked = P .. ':looked'
  if redis.call('EXISTS', looked) == 0 then
    for _, build in ipairs(builds) do redis.call('ZADD', fps, NOW, build) end
  end
  redis.call('SET', looked, '1', 'PX', int(math.max(wait_ms / 2, UNSEEN_MS)))
end

-- Jobs bound to a build of which no worker has been seen for wait_ms.
local function free_orphans()
  if fp ~= '' then redis.call('ZADD', fps, 'XX', NOW, fp) end
  local builds = redis.call('ZRANGE', fps, 0, -1)
  if #builds > 0 then excuse_unseen(builds) end
  for _, build in ipairs(builds) do
    local left = 0
    for _, band in ipairs(BANDS) do
      local held = P .. ':held:' .. band .. ':' .. build
      if num(redis.call('ZSCORE', fps, build)) + wait_ms <= NOW then
        local before = orphans
        for _, id in ipairs(redis.call('ZRANGE', held, 0, slice - 1)) do
          local job = load_job(id)
          if not job or job.state ~= 'returned' then
            redis.call('ZREM', held, id)
          elseif job.since + wait_ms <= NOW then
            orphans = orphans + 1
            redis.call('ZREM', held, id)
            if policy == 'continue' then
              job.was, job.fp = written_by(job), ''
              save(job, 'was', job.was, 'fp', '')
              hand(job)
            else
              fail(job, 'no_worker', 'no worker of the build that began this answer came back in time', keep(job))
            end
          end
        end
        is_cut = is_cut or orphans - before == slice
      end
      left = left + redis.call('ZCARD', held)
    end
    if left == 0 then
      redis.call('ZREM', fps, build)
      redis.call('DEL', P .. ':bell:' .. build)
    end
  end
  if redis.call('EXISTS', fps) == 0 then redis.call('DEL', P .. ':looked') end
end

-- Where nobody waits and nobody works, debts have nobody to be paid to: everyone is as far as the one furthest ahead
-- (start-time fair queueing, Goyal et al. 1996: virtual time at the end of a busy period). Otherwise every tenant that
-- ever came once would be remembered.
local function forgive_debts(band)
  local idle = P .. ':idle:' .. band
  if redis.call('EXISTS', P .. ':fair:' .. band, P .. ':leases:' .. band) > 0 then return end
  local furthest = redis.call('ZRANGE', idle, -1, -1, 'WITHSCORES')[2]
  if not furthest then return end
  redis.call('HSET', P .. ':vt', band, math.max(num(furthest), served_until(band)))
  redis.call('DEL', idle)
end

local function tidy_tenants()
  for _, band in ipairs(BANDS) do
    redis.call('ZREMRANGEBYSCORE', P .. ':idle:' .. band, '-inf', served_until(band))
    for _, tenant in ipairs(redis.call('ZRANGE', P .. ':fair:' .. band, 0, -1)) do
      local length = redis.pcall('XLEN', P .. ':jobs:' .. band .. ':' .. tenant)
      if length == 0 then
        close_if_empty(band, tenant)
        fixed = fixed + 1
      elseif type(length) ~= 'number' then
        redis.call('ZREM', P .. ':fair:' .. band, tenant)
        fixed = fixed + 1
      end
    end
    forgive_debts(band)
  end
end

end_late()
free_orphans()
-- Both look at every tenant: once a round is enough.
if not is_cut then
  tidy_tenants()
  recount()
end
local counts = redis.call('HMGET', P .. ':counts', 'jobs', 'tok')
return {moved, expired, orphans, fixed, num(counts[1]), num(counts[2]), is_cut and 1 or 0}
