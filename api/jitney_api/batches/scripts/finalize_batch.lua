#!lua flags=allow-oom
-- with: batches
-- KEYS: batch. ARGV: prefix, fence. Every line is done: in_progress -> finalizing; a cancelled one stays cancelling.
local state, refusal = guard(KEYS[1], ARGV[2])
if not state then return refusal end
if state == 'in_progress' then enter(KEYS[1], 'finalizing') end
return whole(KEYS[1])
