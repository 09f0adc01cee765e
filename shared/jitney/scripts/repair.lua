#!lua flags=allow-oom
-- with: base fair places
-- KEYS: counts, job. Put a job back into the place its state names. A second call changes nothing.
local id = ARGV[2]
local RUNNING_MS = 30000
local job = load_job(id)
if not job then return 'gone' end

local function score(key)
  return redis.call('ZSCORE', key, id)
end

local function missing()
  if job.state == 'waiting' then
    local stream = P .. ':jobs:' .. job.band .. ':' .. job.tenant
    if job.eid == '' or #redis.call('XRANGE', stream, job.eid, job.eid) == 0 then
      push(job)
      save(job, 'eid', job.eid)
      ring(P .. ':bell')
      return 'queued'
    end
    if not redis.call('ZSCORE', P .. ':fair:' .. job.band, job.tenant) then
      join(job.band, job.tenant)
      return 'joined'
    end
  elseif job.state == 'later' then
    if not score(P .. ':later') then
      redis.call('ZADD', P .. ':later', NOW, id)
      return 'due'
    end
  elseif job.state == 'running' then
    if not score(P .. ':leases:' .. job.band) then
      redis.call('ZADD', P .. ':leases:' .. job.band, NOW + RUNNING_MS, id)
      return 'leased'
    end
  elseif job.state == 'returned' then
    local place = is_bound(job) and P .. ':held:' .. job.band .. ':' .. job.fp or P .. ':leases:' .. job.band
    if not score(place) then
      hand(job)
      return 'handed'
    end
  end
  return 'ok'
end

local done = missing()
if job.state == 'done' then
  if redis.call('PTTL', KEYS[2]) == -1 then
    redis.call('PEXPIRE', KEYS[2], int(job.ttl > 0 and job.ttl or 3600000))
    done = 'expiring'
  end
elseif job.deadline > 0 or job.qdeadline > 0 then
  local first = job.deadline > 0 and job.deadline or job.qdeadline
  if job.qdeadline > 0 and job.seq == 0 then first = math.min(first, job.qdeadline) end
  if not score(P .. ':deadlines') and not (job.deadline == 0 and job.seq > 0) then
    redis.call('ZADD', P .. ':deadlines', int(first), id)
    done = done == 'ok' and 'deadline' or done
  end
end
return done
