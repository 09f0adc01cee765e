#!lua
-- with: base fair places entering unbury
-- KEYS: counts, the new job, its log, dead. ARGV: as enqueue's, then entry id and id of the buried job.
-- A buried job is either still buried or queued anew, as another job: a log that has ended is never reopened.
local new, entry, old = read_new(), ARGV[21], ARGV[22]
local known = redis.call('HGET', KEYS[2], 'digest')
if known then return {known == new.digest and 'dup' or 'conflict', new.id} end
if #redis.call('XRANGE', KEYS[4], entry, entry) == 0 then return {'gone'} end
local full = refuse_if_full(new)
if full then return full end
-- Whoever sends the request again with its key is told of this job, not of the failure.
local key, digest = key_of(old)
enter(new, key and string.sub(key, #P + 7) or '')
if key then answer_key(key, new, digest) end
unbury(entry, old)
return {'ok', new.id}
