#!lua flags=allow-oom
-- with: base fair pace places giving
-- KEYS: counts, job. The owner hands a job back of its own will: this attempt does not count.
local id, fence, delay_ms = ARGV[2], ARGV[3], num(ARGV[4])
local job, refusal = owned(id, fence)
if not job then return refusal end
job.tries = math.max(0, job.tries - 1)
if job.seq > job.cseq then job.strikes = 0 end
give_back(job, delay_ms)
return {'ok'}
