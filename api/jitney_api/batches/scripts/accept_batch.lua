#!lua
-- with: batches
-- KEYS: batch. ARGV: prefix, fence, total, model or ''. The input file is valid: validating -> in_progress.
local state, refusal = guard(KEYS[1], ARGV[2])
if not state then return refusal end
redis.call('HSET', KEYS[1], 'total', ARGV[3])
if ARGV[4] ~= '' then redis.call('HSET', KEYS[1], 'model', ARGV[4]) end
if state == 'validating' then enter(KEYS[1], 'in_progress') end
return whole(KEYS[1])
