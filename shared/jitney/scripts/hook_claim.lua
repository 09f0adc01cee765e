#!lua flags=allow-oom
-- with: base outbox
-- KEYS: counts. ARGV: prefix, limit, lease. Takes announcements whose time has come. Until its lease ends nobody else
-- sees one of them; should its deliverer die, it is due again then.
local limit, lease_ms = num(ARGV[2]), num(ARGV[3])
local taken = {}
clear_unless('zset', HOOKS)
for _, id in ipairs(redis.call('ZRANGEBYSCORE', HOOKS, '-inf', NOW, 'LIMIT', 0, limit)) do
  local hook = P .. ':hook:' .. id
  local told = redis.pcall('HMGET', hook, 'object', 'ending', 'url', 'at', 'forgiven')
  if not (told[1] and told[2] and told[3]) then
    forget_hook(id)
  else
    local tries = num(redis.call('HGET', hook, 'tries')) + 1  -- what is no number must not hold up all the others
    redis.call('HSET', hook, 'tries', int(tries))
    redis.call('ZADD', HOOKS, NOW + lease_ms, id)
    taken[#taken + 1] = {id, told[1], told[2], told[3], int(num(told[4])), int(tries), int(num(told[5]))}
  end
end
return taken
