#!lua flags=allow-oom
-- with: base outbox
-- KEYS: counts. ARGV: prefix, id. One that was given up gets all its attempts anew. They are counted on: an attempt
-- that is still under way somewhere is not mistaken for one of the new ones.
local id = ARGV[2]
local hook = P .. ':hook:' .. id
if redis.call('ZREM', DEAD_HOOKS, id) == 0 then return 'gone' end
redis.call('HSET', hook, 'forgiven', int(num(redis.call('HGET', hook, 'tries'))))
redis.call('ZADD', HOOKS, NOW, id)
return 'ok'
