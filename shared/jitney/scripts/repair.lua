#!lua flags=allow-oom
-- with: base fair pace places outbox ending recount
-- ARGV: prefix, keep, then names of this queue's keys without their prefix, as a SCAN found them. Puts what each of
-- them speaks of back into the place its state names, or ends it. Returns name and outcome where something was done.
-- A second call changes nothing.
local keep_ms = num(ARGV[2])
-- Where the record does not say how long a lease its owner asked for.
local LEASE_MS = 30000
local SLACK_MS = 1000
local done = {}

local function score(key, member)
  return redis.call('ZSCORE', key, member)
end

local function keep(job)
  return job.ttl > 0 and job.ttl or keep_ms
end

-- Tenants with work that no claim would look at.
local function mend_stream(band, tenant)
  local is_known = false
  for _, known in ipairs(BANDS) do is_known = is_known or known == band end
  local length = redis.pcall('XLEN', P .. ':jobs:' .. band .. ':' .. tenant)
  if not is_known or type(length) ~= 'number' or length == 0 then return nil end
  if score(P .. ':fair:' .. band, tenant) then return nil end
  join(band, tenant)
  ring(P .. ':bell')
  return 'joined'
end

-- By state. nil: the job is where it belongs.
local replace = {}

-- A stream that was deleted begins anew, and may give another job's entry the id that this one's had.
local function is_entry_of(job, stream)
  local entry = job.eid ~= '' and redis.call('XRANGE', stream, job.eid, job.eid)[1]
  return entry and read_entry(entry[2]) == job.id
end

function replace.waiting(job)
  local stream = P .. ':jobs:' .. job.band .. ':' .. job.tenant
  clear_unless('stream', stream)
  if not is_entry_of(job, stream) then
    push(job)
    save(job, 'eid', job.eid)
    ring(P .. ':bell')
    return 'queued'
  end
  return mend_stream(job.band, job.tenant)
end

function replace.later(job)
  if score(P .. ':later', job.id) then return nil end
  redis.call('ZADD', P .. ':later', math.max(job.due, NOW), job.id)
  return 'due'
end

function replace.running(job)
  local leases = P .. ':leases:' .. job.band
  local expiry, longest = score(leases, job.id), NOW + (job.lease > 0 and job.lease or LEASE_MS)
  -- A lease beyond was taken while the server's clock was ahead.
  if expiry and num(expiry) <= longest + SLACK_MS then return nil end
  redis.call('ZADD', leases, int(longest), job.id)
  return 'leased'
end

function replace.returned(job)
  local is_held = is_bound(job)
  local place = is_held and P .. ':held:' .. job.band .. ':' .. job.fp or P .. ':leases:' .. job.band
  local placed = score(place, job.id)
  -- What lies among the leases with a later time was given back while the server's clock was ahead.
  if placed and (is_held or num(placed) <= NOW) then return nil end
  hand(job)
  return 'handed'
end

local function watch_deadline(job)
  local first = job.deadline
  if job.qdeadline > 0 and job.seq == 0 then first = first > 0 and math.min(first, job.qdeadline) or job.qdeadline end
  if first == 0 or score(P .. ':deadlines', job.id) then return nil end
  redis.call('ZADD', P .. ':deadlines', int(first), job.id)
  return 'deadline'
end

-- An ended job: everything of it has an end, and its log is known to those who fold.
local function let_expire(job)
  local log, outcome = P .. ':tokens:' .. job.id, nil
  for _, key in ipairs({P .. ':job:' .. job.id, log, P .. ':result:' .. job.id, P .. ':body:' .. job.id}) do
    if redis.call('PTTL', key) == -1 then
      redis.call('PEXPIRE', key, int(keep(job)))
      outcome = 'expiring'
    end
  end
  if redis.call('EXISTS', log) == 1 and not score(P .. ':ended', job.id) then
    redis.call('ZADD', P .. ':ended', NOW, job.id)
    outcome = outcome or 'foldable'
  end
  return outcome
end

local function mend_job(id)
  local job = load_job(id)
  if not job then
    if redis.call('EXISTS', P .. ':body:' .. id, P .. ':ids:' .. id) == 0 and
      redis.call('PTTL', P .. ':tokens:' .. id) ~= -1 then return 'gone' end
    clear_unless('hash', P .. ':job:' .. id)
    return lose(id, 'interactive', '-', keep_ms)
  end
  if job.state == 'done' then return let_expire(job) end
  if not replace[job.state] then
    fail(job, 'job_lost', 'the state of the job is unreadable', keep(job))
    return 'lost'
  end
  -- Its owner has the body of a running job already; should it be handed on, the claim sees to that.
  if job.state ~= 'running' and redis.call('EXISTS', P .. ':body:' .. id) == 0 then
    fail(job, 'job_lost', 'the body of the job is gone', keep(job))
    return 'lost'
  end
  local outcome = replace[job.state](job)
  return watch_deadline(job) and (outcome or 'deadline') or outcome
end

local function mend(name)
  local kind, rest = string.match(name, '^(%l+):(.+)$')
  if kind == 'job' then return mend_job(rest) end
  if kind == 'body' or kind == 'ids' or kind == 'tokens' then
    if redis.call('EXISTS', P .. ':job:' .. rest) == 1 or redis.call('PTTL', P .. ':' .. name) ~= -1 then return nil end
    return mend_job(rest)
  end
  local first, second = string.match(rest or '', '^(%w+):(.+)$')
  if kind == 'jobs' and first then return mend_stream(first, second) end
  if kind == 'held' and first and redis.call('ZADD', P .. ':fps', 'NX', NOW, second) == 1 then return 'known' end
end

for i = 3, #ARGV do
  local outcome = mend(ARGV[i])
  if outcome then done[#done + 1] = {ARGV[i], outcome} end
end
if #done > 0 then recount() end
return done
