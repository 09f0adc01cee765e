#!lua flags=allow-oom
-- with: base outbox
-- KEYS: counts. ARGV: prefix, id.
if redis.call('EXISTS', P .. ':hook:' .. ARGV[2]) == 0 then return 'gone' end
forget_hook(ARGV[2])
return 'ok'
