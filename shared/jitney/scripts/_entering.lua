local LONGEST_RUN_MS = 30 * 86400000

-- The job: ARGV[2] to ARGV[13], ARGV[18] to ARGV[20]. The bounds: ARGV[14] to ARGV[17]. 0 = none.
local function read_new()
  local new = {id = ARGV[2], digest = ARGV[3], body = ARGV[4], band = ARGV[5], tenant = ARGV[6]}
  new.est, new.max = num(ARGV[7]), num(ARGV[8])
  new.not_before, new.deadline = num(ARGV[9]), num(ARGV[10])
  new.timeout, new.queue_timeout, new.ttl = num(ARGV[11]), num(ARGV[12]), num(ARGV[13])
  new.max_attempts, new.keepb = num(ARGV[18]), num(ARGV[19])
  new.hook = ARGV[20]
  new.is_later = new.not_before > NOW
  return new
end

-- nil, or the refusal with what a client needs to know how long to stay away.
local function refuse_if_full(new)
  local max_jobs, max_tokens = num(ARGV[14]), num(ARGV[15])
  local max_tenant_jobs, max_later = num(ARGV[16]), num(ARGV[17])
  local counts = redis.call('HMGET', P .. ':counts', 'jobs', 'tok')
  local jobs, tokens = num(counts[1]), num(counts[2])
  local full = nil
  if new.is_later then
    if max_later > 0 and redis.call('ZCARD', P .. ':later') >= max_later then full = 'delayed jobs' end
  elseif max_tenant_jobs > 0 and redis.call('XLEN', P .. ':jobs:' .. new.band .. ':' .. new.tenant) >= max_tenant_jobs then
    full = 'jobs of this tenant'
  elseif max_jobs > 0 and jobs >= max_jobs then
    full = 'waiting jobs'
  elseif max_tokens > 0 and jobs > 0 and tokens + new.est > max_tokens then
    full = 'waiting tokens'
  end
  if not full then return nil end
  local pace = redis.call('HMGET', P .. ':vt', 'avg', 'rate')
  return {'full', full, jobs, tokens, pace[1] or '', pace[2] or ''}
end

-- An idempotency key answers for this job; ending the job shortens that to the life of its result.
local function answer_key(key, new, digest)
  local life = new.ttl + LONGEST_RUN_MS + (new.is_later and new.not_before - NOW or 0)
  redis.call('SET', key, new.id .. ' ' .. digest, 'PX', int(life))
end

-- `idem`: the hash of the job's idempotency key, or ''.
local function enter(new, idem)
  local start = new.is_later and new.not_before or NOW
  local deadline = new.deadline
  if new.timeout > 0 then deadline = deadline > 0 and math.min(deadline, start + new.timeout) or start + new.timeout end
  local queue_deadline = new.queue_timeout > 0 and start + new.queue_timeout or 0
  local job = {id = new.id, band = new.band, tenant = new.tenant, est = new.est, eid = ''}
  if new.is_later then redis.call('ZADD', P .. ':later', new.not_before, new.id) else push(job) end
  redis.call('SET', P .. ':body:' .. new.id, new.body)
  local fields = {'state', new.is_later and 'later' or 'waiting', 'band', new.band, 'tenant', new.tenant,
    'est', int(new.est), 'pt', int(new.est), 'eid', job.eid, 'at', NOW, 'since', NOW, 'digest', new.digest,
    'ttl', int(new.ttl), 'seq', 0, 'n', 0}
  local function add(field, value)
    fields[#fields + 1] = field
    fields[#fields + 1] = value
  end
  if new.is_later then add('due', int(new.not_before)) end
  if new.max > 0 then add('max', int(new.max)) end
  if new.max_attempts > 0 then add('rmax', int(new.max_attempts)) end
  if new.keepb > 0 then add('keepb', 1) end
  if new.hook ~= '' then add('hook', new.hook) end
  if deadline > 0 then add('deadline', int(deadline)) end
  if queue_deadline > 0 then add('qdeadline', int(queue_deadline)) end
  if idem ~= '' then add('idem', idem) end
  redis.call('HSET', P .. ':job:' .. new.id, unpack(fields))
  if deadline > 0 or queue_deadline > 0 then
    local first = deadline > 0 and deadline or queue_deadline
    if queue_deadline > 0 then first = math.min(first, queue_deadline) end
    redis.call('ZADD', P .. ':deadlines', int(first), new.id)
  end
  if not new.is_later then ring_for(new.band, P .. ':bell') end
end
