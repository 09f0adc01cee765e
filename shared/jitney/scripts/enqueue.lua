#!lua
-- with: base fair places
-- KEYS: counts, job, log [, idempotency key].
-- No allow-oom: a full server refuses new jobs, and goes on with those it has accepted.
local id, digest, body = ARGV[2], ARGV[3], ARGV[4]
local band, tenant = ARGV[5], ARGV[6]
local est, max_tokens = num(ARGV[7]), num(ARGV[8])
local not_before, deadline = num(ARGV[9]), num(ARGV[10])
local timeout_ms, queue_timeout_ms, ttl_ms = num(ARGV[11]), num(ARGV[12]), num(ARGV[13])
local max_jobs, max_waiting_tokens, max_tenant_jobs, max_later = num(ARGV[14]), num(ARGV[15]), num(ARGV[16]), num(ARGV[17])
local LONGEST_RUN_MS = 30 * 86400000

local known = redis.call('HGET', KEYS[2], 'digest')
if known then return {known == digest and 'dup' or 'conflict', id} end
if KEYS[4] then
  local other, other_digest = string.match(redis.call('GET', KEYS[4]) or '', '^(%S+) (.*)$')
  -- A key whose job is gone is free again.
  if other and redis.call('EXISTS', P .. ':job:' .. other) == 1 then
    return {other_digest == digest and 'dup' or 'conflict', other}
  end
end

local is_later = not_before > NOW
local counts = redis.call('HMGET', P .. ':counts', 'jobs', 'tok')
local jobs, tokens = num(counts[1]), num(counts[2])
local full = nil
if is_later then
  if max_later > 0 and redis.call('ZCARD', P .. ':later') >= max_later then full = 'delayed jobs' end
elseif max_tenant_jobs > 0 and redis.call('XLEN', P .. ':jobs:' .. band .. ':' .. tenant) >= max_tenant_jobs then
  full = 'jobs of this tenant'
elseif max_jobs > 0 and jobs >= max_jobs then
  full = 'waiting jobs'
elseif max_waiting_tokens > 0 and jobs > 0 and tokens + est > max_waiting_tokens then
  full = 'waiting tokens'
end
if full then
  local pace = redis.call('HMGET', P .. ':vt', 'avg', 'rate')
  return {'full', full, jobs, tokens, pace[1] or '', pace[2] or ''}
end

local start = is_later and not_before or NOW
if timeout_ms > 0 then deadline = deadline > 0 and math.min(deadline, start + timeout_ms) or start + timeout_ms end
local queue_deadline = queue_timeout_ms > 0 and start + queue_timeout_ms or 0
local job = {id = id, band = band, tenant = tenant, est = est, eid = ''}
if is_later then redis.call('ZADD', P .. ':later', not_before, id) else push(job) end
redis.call('SET', P .. ':body:' .. id, body)
local fields = {'state', is_later and 'later' or 'waiting', 'band', band, 'tenant', tenant, 'est', int(est),
  'pt', int(est), 'eid', job.eid, 'at', NOW, 'since', NOW, 'digest', digest, 'ttl', int(ttl_ms), 'seq', 0, 'n', 0}
local function add(field, value)
  fields[#fields + 1] = field
  fields[#fields + 1] = value
end
if max_tokens > 0 then add('max', int(max_tokens)) end
if deadline > 0 then add('deadline', int(deadline)) end
if queue_deadline > 0 then add('qdeadline', int(queue_deadline)) end
if KEYS[4] then add('idem', string.sub(KEYS[4], #P + 7)) end
redis.call('HSET', KEYS[2], unpack(fields))
if deadline > 0 or queue_deadline > 0 then
  local first = deadline > 0 and deadline or queue_deadline
  if queue_deadline > 0 then first = math.min(first, queue_deadline) end
  redis.call('ZADD', P .. ':deadlines', int(first), id)
end
if KEYS[4] then
  -- Ending the job shortens this to the life of its result.
  local life = ttl_ms + LONGEST_RUN_MS + (is_later and not_before - NOW or 0)
  redis.call('SET', KEYS[4], id .. ' ' .. digest, 'PX', int(life))
end
if not is_later then ring(P .. ':bell') end
return {'ok', id}
