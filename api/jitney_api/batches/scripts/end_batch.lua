#!lua flags=allow-oom
-- with: batches
-- KEYS: batch. ARGV: prefix, fence, id, state, then for each of its files: output_file_id or error_file_id, and what
-- keep_file takes. The files are there from now on, and the batch has ended.
local state, refusal = guard(KEYS[1], ARGV[2])
if not state then return refusal end
for at = 5, #ARGV, 7 do
  keep_file(at + 1)
  redis.call('HSET', KEYS[1], ARGV[at], ARGV[at + 1])
end
close(KEYS[1], ARGV[3], ARGV[4])
return whole(KEYS[1])
