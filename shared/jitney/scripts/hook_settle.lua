#!lua flags=allow-oom
-- with: base outbox
-- KEYS: counts. ARGV: prefix, id, number of the attempt, outcome (told | later | dead), delay, what went wrong.
local id, tries, outcome, delay_ms, trouble = ARGV[2], num(ARGV[3]), ARGV[4], num(ARGV[5]), ARGV[6]
local hook = P .. ':hook:' .. id
if outcome == 'told' then
  -- Whoever tries once more since tells it for nothing, and finds nothing left to settle.
  forget_hook(id)
  return 'ok'
end
-- Another attempt has begun since, or it is gone.
if num(redis.call('HGET', hook, 'tries')) ~= tries or not redis.call('ZSCORE', HOOKS, id) then return 'lost' end
redis.call('HSET', hook, 'trouble', trouble)
if outcome == 'later' then
  redis.call('ZADD', HOOKS, NOW + delay_ms, id)
  return 'ok'
end
clear_unless('zset', DEAD_HOOKS)
redis.call('ZREM', HOOKS, id)
redis.call('ZADD', DEAD_HOOKS, NOW, id)
bound_hooks(DEAD_HOOKS, DEAD_HOOK_ENTRIES)
return 'ok'
