#!lua flags=allow-oom
-- with: batches
-- KEYS: batch. ARGV: prefix, fence, id, errors. The input file is not valid: -> failed.
local state, refusal = guard(KEYS[1], ARGV[2])
if not state then return refusal end
redis.call('HSET', KEYS[1], 'errors', ARGV[4])
close(KEYS[1], ARGV[3], 'failed')
return whole(KEYS[1])
