#!lua flags=allow-oom
-- with: base unbury
-- KEYS: counts, dead. ARGV: prefix, entry id, id of the buried job or ''.
local entry, id = ARGV[2], ARGV[3]
if #redis.call('XRANGE', KEYS[2], entry, entry) == 0 then return 'gone' end
unbury(entry, id)
return 'ok'
