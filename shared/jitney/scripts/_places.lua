-- A job is in exactly one place, the one its state names:
--   waiting   one entry (id = eid) of :jobs:<band>:<tenant>, and the tenant in :fair:<band>
--   later     :later
--   running   :leases:<band>, and its fence is set
--   returned  :leases:<band> (score = enqueue time: ahead of all live leases), or :held:<band>:<fp>
--   done      none
local TEXTS = {'state', 'band', 'tenant', 'eid', 'fp', 'was', 'fence', 'owner', 'reason', 'by', 'idem', 'err', 'hook'}
local NUMBERS = {'est', 'pt', 'seq', 'n', 'at', 'tries', 'strikes', 'cseq', 'since', 'started',
                 'deadline', 'qdeadline', 'paid', 'max', 'ttl', 'vt', 'rmax', 'due', 'lease', 'keepb'}
local FIELDS = {}
for _, field in ipairs(TEXTS) do FIELDS[#FIELDS + 1] = field end
for _, field in ipairs(NUMBERS) do FIELDS[#FIELDS + 1] = field end

-- nil: no such job, or something else lies under its name.
local function load_job(id)
  local values = redis.pcall('HMGET', P .. ':job:' .. id, unpack(FIELDS))
  if values.err or not values[1] then return nil end
  local job = {id = id}
  for i, field in ipairs(FIELDS) do
    if i <= #TEXTS then job[field] = values[i] or '' else job[field] = num(values[i]) end
  end
  return job
end

local function save(job, ...)
  redis.call('HSET', P .. ':job:' .. job.id, ...)
end

-- The job, if `fence` owns it; otherwise nil and the refusal.
local function owned(id, fence)
  local job = load_job(id)
  if not job then return nil, {'gone'} end
  if job.state == 'done' then return nil, {'done', job.reason, job.by} end
  if fence == '' or job.fence ~= fence then return nil, {'fence'} end
  return job
end

local function add_counts(jobs, tokens)
  local counts = P .. ':counts'
  -- A stranger's entry was never counted in: never below zero.
  if redis.call('HINCRBY', counts, 'jobs', jobs) < 0 then redis.call('HSET', counts, 'jobs', 0) end
  if redis.call('HINCRBY', counts, 'tok', tokens) < 0 then redis.call('HSET', counts, 'tok', 0) end
end

-- id or nil, and tokens, of an entry that anybody may have written.
local function read_entry(fields)
  local id, est = nil, 0
  for i = 1, #fields, 2 do
    if fields[i] == 'j' then id = fields[i + 1] end
    if fields[i] == 'est' then est = math.floor(num(fields[i + 1])) end
  end
  return id, (est >= 0 and est < 1e9) and est or 0
end

local function push(job)
  local stream = P .. ':jobs:' .. job.band .. ':' .. job.tenant
  clear_unless('stream', stream)
  job.eid = redis.call('XADD', stream, '*', 'j', job.id, 'est', int(job.est))
  add_counts(1, job.est)
  join(job.band, job.tenant)
end

local function close_if_empty(band, tenant)
  local stream = P .. ':jobs:' .. band .. ':' .. tenant
  local length = redis.pcall('XLEN', stream)
  if type(length) == 'number' and length > 0 then return end
  -- An empty stream still costs 4 KB, and what is no stream names no job.
  redis.call('DEL', stream)
  leave(band, tenant)
end

-- The builds that wrote the log so far, in order, blanks between them. The last owner's is one of them if it said
-- anything.
local function written_by(job)
  if job.fp == '' or job.seq == job.cseq or string.match(job.was, '%S*$') == job.fp then return job.was end
  return job.was == '' and job.fp or job.was .. ' ' .. job.fp
end

local function is_bound(job)
  return job.fp ~= '' and job.seq > 0
end

-- Make a returned job claimable: by anyone, or by workers of its fingerprint once its log has begun.
local function hand(job)
  local leases = P .. ':leases:' .. job.band
  if not is_bound(job) then
    -- By a clock that was set back since, it was enqueued in the future: no claim would look at it till then.
    redis.call('ZADD', leases, math.min(job.at, NOW), job.id)
    ring_for(job.band, P .. ':bell')
    return
  end
  redis.call('ZREM', leases, job.id)
  redis.call('ZADD', P .. ':held:' .. job.band .. ':' .. job.fp, job.at, job.id)
  redis.call('ZADD', P .. ':fps', 'NX', NOW, job.fp)
  ring_for(job.band, P .. ':bell:' .. job.fp)
end

local function unplace(job)
  if job.state == 'waiting' then
    add_counts(-1, -job.est)
    redis.pcall('XDEL', P .. ':jobs:' .. job.band .. ':' .. job.tenant, job.eid)
    close_if_empty(job.band, job.tenant)
  elseif job.state == 'later' then
    redis.call('ZREM', P .. ':later', job.id)
  else
    redis.call('ZREM', P .. ':leases:' .. job.band, job.id)
    if job.fp ~= '' then redis.call('ZREM', P .. ':held:' .. job.band .. ':' .. job.fp, job.id) end
  end
end

-- Delayed jobs whose time has come. Those that have begun were paid for: they skip the tenants' queue.
local function make_due(limit)
  local ids = redis.call('ZRANGEBYSCORE', P .. ':later', '-inf', NOW, 'LIMIT', 0, limit)
  for _, id in ipairs(ids) do
    redis.call('ZREM', P .. ':later', id)
    local job = load_job(id)
    if job and job.state == 'later' then
      if job.seq > 0 then
        job.state = 'returned'
        save(job, 'state', 'returned', 'since', NOW)
        hand(job)
      else
        push(job)
        save(job, 'state', 'waiting', 'eid', job.eid, 'since', NOW)
        ring_for(job.band, P .. ':bell')
      end
    end
  end
  return #ids
end
