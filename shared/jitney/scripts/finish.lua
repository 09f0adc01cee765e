#!lua flags=allow-oom
-- with: base fair pace places outbox ending
-- KEYS: counts, job, log. ARGV: prefix, id, fence, first seq, completion tokens, prompt tokens or '', reason,
-- keep or '', dead reason or '', events (the terminal one last).
local id, fence, first, n = ARGV[2], ARGV[3], num(ARGV[4]), num(ARGV[5])
local job, refusal = owned(id, fence)
if not job then return refusal end
if first ~= job.seq + 1 then return {'seq', int(job.seq)} end
job.n = n
if ARGV[6] ~= '' then job.pt = num(ARGV[6]) end
local events = {}
for i = 10, #ARGV do events[#events + 1] = ARGV[i] end
end_job(job, ARGV[7], fence, events, ARGV[8] ~= '' and num(ARGV[8]) or nil, ARGV[9] ~= '' and ARGV[9] or nil)
if n > 0 then
  local average = redis.call('HGET', P .. ':vt', 'avg')
  average = average and num(average) or n
  redis.call('HSET', P .. ':vt', 'avg', average + (n - average) / 32)
end
return {'ok'}
