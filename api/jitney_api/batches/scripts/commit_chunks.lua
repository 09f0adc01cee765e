#!lua flags=allow-oom
-- with: batches
-- KEYS: batch, done, chunks. ARGV: prefix, fence, completed, failed, input, cached and output tokens, number of
-- chunks, "kind name" of each, then the numbers of their lines. All of it counts from now on, or nothing:
-- repeated when one of the lines was done before.
local state, refusal = guard(KEYS[1], ARGV[2])
if not state then return refusal end
local num_chunks = tonumber(ARGV[8])
for i = 9 + num_chunks, #ARGV do
  if redis.call('GETBIT', KEYS[2], ARGV[i]) == 1 then return {'repeated', ARGV[i]} end
end
for i = 9, 8 + num_chunks do redis.call('RPUSH', KEYS[3], ARGV[i]) end
for i = 9 + num_chunks, #ARGV do redis.call('SETBIT', KEYS[2], ARGV[i], 1) end
for i, name in ipairs({'completed', 'failed', 'input_tokens', 'cached_tokens', 'output_tokens'}) do
  redis.call('HINCRBY', KEYS[1], name, ARGV[2 + i])
end
return whole(KEYS[1])
