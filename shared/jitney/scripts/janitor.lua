#!lua flags=allow-oom
-- with: base fair places ending recount
-- What no claim comes across. ARGV: prefix, slice, resume wait, policy (fail | continue), keep, fingerprint of
-- the caller's build or ''.
local slice, wait_ms, policy, keep_ms, fp = num(ARGV[2]), num(ARGV[3]), ARGV[4], num(ARGV[5]), ARGV[6]
local GRACE_MS = 30000
local fps = P .. ':fps'
local expired, orphans, fixed = 0, 0, 0
local moved = make_due(slice)

local function keep(job)
  return job.ttl > 0 and job.ttl or keep_ms
end

-- Deadlines of jobs that nobody looks at. The owner of a running one ends it itself, with its text: it has GRACE_MS.
local function end_late()
  local key = P .. ':deadlines'
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', key, '-inf', NOW, 'LIMIT', 0, slice)) do
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

-- Jobs bound to a build of which no worker has been seen for wait_ms.
local function free_orphans()
  if fp ~= '' then redis.call('ZADD', fps, 'XX', NOW, fp) end
  for _, build in ipairs(redis.call('ZRANGE', fps, 0, -1)) do
    local left = 0
    for _, band in ipairs(BANDS) do
      local held = P .. ':held:' .. band .. ':' .. build
      if num(redis.call('ZSCORE', fps, build)) + wait_ms <= NOW then
        for _, id in ipairs(redis.call('ZRANGE', held, 0, slice - 1)) do
          local job = load_job(id)
          if not job or job.state ~= 'returned' then
            redis.call('ZREM', held, id)
          elseif job.since + wait_ms <= NOW then
            orphans = orphans + 1
            redis.call('ZREM', held, id)
            if policy == 'continue' then
              save(job, 'was', job.was ~= '' and job.was or job.fp, 'fp', '')
              job.fp = ''
              hand(job)
            else
              fail(job, 'no_worker', 'no worker of the build that began this answer came back in time', keep(job))
            end
          end
        end
      end
      left = left + redis.call('ZCARD', held)
    end
    if left == 0 then redis.call('ZREM', fps, build) end
  end
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
  end
end

end_late()
free_orphans()
tidy_tenants()
recount()
local counts = redis.call('HMGET', P .. ':counts', 'jobs', 'tok')
return {moved, expired, orphans, fixed, num(counts[1]), num(counts[2])}
