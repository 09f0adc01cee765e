#!lua
-- with: batches
-- KEYS: batch. ARGV: prefix, id, tenant, input file, window in seconds, key of idempotency or '', digest of what was
-- asked, life of that key in seconds, then field, value ... of the batch.
-- Returns ok and the batch (under a key that is known: the one that exists), conflict, or no_file.
local id, tenant, file, window_s = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local idem, digest, idem_s = ARGV[6], ARGV[7], ARGV[8]

if idem ~= '' then
  local known = redis.call('GET', idem)
  if known then
    local other, same = string.match(known, '^(%S+) (%S+)$')
    local key = P .. ':batch:' .. other
    if redis.call('EXISTS', key) == 1 then
      if same ~= digest then return {'conflict'} end
      return {'ok', redis.call('HGETALL', key), other}
    end
  end
end

local input = P .. ':file:' .. file
if redis.call('HGET', input, 'tenant') == false then return {'no_file'} end
redis.call('HINCRBY', input, 'num_readers', 1)
redis.call('HSET', KEYS[1], 'tenant', tenant, 'state', 'validating', 'input_file_id', file, 'fence', '0',
  'created_at', int(NOW), 'expires_at', int(NOW + window_s * 1000), unpack(ARGV, 9))
redis.call('ZADD', P .. ':batches:' .. tenant, int(NOW), id)
redis.call('ZADD', P .. ':active', int(NOW), id)
if idem ~= '' then redis.call('SET', idem, id .. ' ' .. digest, 'EX', idem_s) end
return {'ok', redis.call('HGETALL', KEYS[1]), id}
