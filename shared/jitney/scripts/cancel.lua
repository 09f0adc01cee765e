#!lua flags=allow-oom
-- with: base fair pace places outbox ending
-- KEYS: counts, job, log. Ends the job at once, whoever holds it: the owner learns it by its fence.
local id = ARGV[2]
local job = load_job(id)
if not job then return {'notfound'} end
if job.state == 'done' then return {'done', job.reason} end
local state, owner, fence = job.state, job.owner, job.fence
end_job(job, 'cancelled', 'cancel', {terminal_event('cancelled', job)}, ARGV[3] ~= '' and num(ARGV[3]) or nil)
if state == 'running' then
  redis.pcall('PUBLISH', P .. ':ctl:' .. owner, '{"type":"cancel","id":"' .. id .. '","fence":"' .. fence .. '"}')
end
return {'cancelled', state}
