#!lua flags=allow-oom
-- with: batches
-- KEYS: file. ARGV: prefix, id. Its record goes at once, its content when somebody has time for it.
-- in_use: a batch that has not ended reads it.
local found = redis.call('HMGET', KEYS[1], 'tenant', 'num_readers')
if not found[1] then
  redis.call('ZREM', P .. ':expiring', ARGV[2])
  return {'unknown'}
end
if tonumber(found[2] or '0') > 0 then return {'in_use'} end
redis.call('ZREM', P .. ':files:' .. found[1], ARGV[2])
redis.call('ZREM', P .. ':expiring', ARGV[2])
redis.call('ZADD', P .. ':loose', int(NOW), ARGV[2])
redis.call('DEL', KEYS[1])
return {'ok'}
