#!lua flags=allow-oom
-- with: base fair places ending
-- KEYS: counts, job, log. The owner could not go on: this attempt counts, and the last one ends the job.
local id, fence, delay_ms, keep_ms = ARGV[2], ARGV[3], num(ARGV[4]), num(ARGV[5])
local max_strikes, max_tries, error = num(ARGV[6]), num(ARGV[7]), ARGV[8]
local job, refusal = owned(id, fence)
if not job then return refusal end
job.strikes = job.seq == job.cseq and job.strikes + 1 or 0
if job.strikes >= max_strikes or job.tries >= max_tries then
  give_up(job, job.ttl > 0 and job.ttl or keep_ms, error)
  return {'dead'}
end
give_back(job, delay_ms)
return {'ok'}
