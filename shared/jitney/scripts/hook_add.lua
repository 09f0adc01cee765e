#!lua flags=allow-oom
-- with: base outbox
-- KEYS: counts. ARGV: prefix, id, object, ending, url. Of what is no job: a job is announced by the script that ends it.
local id = ARGV[2]
if redis.call('EXISTS', P .. ':hook:' .. id) == 1 then return 'dup' end
announce(id, ARGV[3], ARGV[4], ARGV[5])
return 'ok'
