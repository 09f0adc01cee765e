#!lua flags=allow-oom
-- with: base
-- KEYS: counts, job, log. ARGV: prefix, id, number of events packed, the packed log.
-- Replace an ended job's log (4 KB and more as a stream) by one compressed string with the same time to live.
local id, num_events, packed = ARGV[2], num(ARGV[3]), ARGV[4]
local ended = P .. ':ended'
local left = redis.call('PTTL', KEYS[2])
if left < 0 or redis.call('HGET', KEYS[2], 'state') ~= 'done' then
  redis.call('ZREM', ended, id)
  return 'gone'
end
if num_events == 0 or redis.call('XLEN', KEYS[3]) ~= num_events then
  if num_events == 0 then redis.call('ZREM', ended, id) end
  return 'changed'
end
redis.call('SET', P .. ':result:' .. id, packed, 'PX', left)
redis.call('DEL', KEYS[3])
redis.call('ZREM', ended, id)
return 'ok'
