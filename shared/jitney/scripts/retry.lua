#!lua flags=allow-oom
-- with: base fair pace places outbox ending giving
-- KEYS: counts, job, log. The owner could not go on: this attempt counts, and the last one ends the job.
local id, fence, delay_ms, keep_ms = ARGV[2], ARGV[3], num(ARGV[4]), num(ARGV[5])
local MAX_ERROR_BYTES = 4096
local max_strikes, max_tries, error = num(ARGV[6]), num(ARGV[7]), ARGV[8]
local job, refusal = owned(id, fence)
if not job then return refusal end
job.strikes = job.seq == job.cseq and job.strikes + 1 or 0
if error ~= '' then job.err = error end
if is_worn_out(job, max_strikes, max_tries) then
  give_up(job, job.ttl > 0 and job.ttl or keep_ms, error)
  return {'dead'}
end
-- Should its next owner vanish, this is the last that is known of what is wrong with it.
if error ~= '' then save(job, 'err', string.sub(error, 1, MAX_ERROR_BYTES)) end
give_back(job, delay_ms)
return {'ok'}
