local USAGE_ENTRIES = 1000000
local DEAD_ENTRIES = 1000
local DEAD_KEEP_MS = 7 * 86400000

-- Told when there are several; a name that only a stranger can have given is not.
local function fingerprints_json(job)
  local builds = written_by(job)
  if not string.find(builds, ' ', 1, true) or string.find(builds, '[^%w ._:-]') then return '' end
  return ',"fingerprints":["' .. string.gsub(builds, ' ', '","') .. '"]'
end

-- A terminal event as `Event.encode` writes it; `error` is JSON or nil.
local function terminal_event(kind, job, error)
  return '{"v":1,"type":"' .. kind .. '","seq":' .. int(job.seq + 1) ..
    ',"usage":{"prompt_tokens":' .. int(job.pt) .. ',"completion_tokens":' .. int(job.n) .. ',"cached_tokens":0}' ..
    (error and ',"error":' .. error or '') .. fingerprints_json(job) .. '}'
end

-- code and message: our own words, no quotes in them.
local function error_json(code, message)
  return '{"type":"server_error","code":"' .. code .. '","message":"' .. message .. '","param":null}'
end

-- At most DEAD_ENTRIES are kept, and each one's body with it: the oldest makes room.
local function bury(job, reason, event)
  local dead = P .. ':dead'
  redis.call('XADD', dead, '*', 'j', job.id, 'b', job.band, 't', job.tenant, 'r', reason, 'at', int(job.at),
    'tries', int(job.tries), 'seq', int(job.seq), 'n', int(job.n), 'e', event, 'le', job.err)
  for _ = 1, 4 do
    if redis.call('XLEN', dead) <= DEAD_ENTRIES then return end
    local oldest = redis.call('XRANGE', dead, '-', '+', 'COUNT', 1)[1]
    local old = oldest[2][1] == 'j' and oldest[2][2]
    -- A body that is kept for its own sake has its time to live.
    if old and redis.pcall('HGET', P .. ':job:' .. old, 'keepb') ~= '1' then redis.call('DEL', P .. ':body:' .. old) end
    redis.call('XDEL', dead, oldest[1])
  end
end

-- A job that asked for a webhook is announced by the script that ends it: nothing can come between the two.
-- job.hook: which endings (by type, commas between them), what the job is to its asker, the endpoint.
local function tell(job, event)
  local wanted, object, url = string.match(job.hook, '^(%S+) (%S+) (%S+)$')
  local ending = string.match(event, '^{"v":1,"type":"(%l+)"') or 'finished'
  if not url or not string.find(',' .. wanted .. ',', ',' .. ending .. ',', 1, true) then return end
  if ending == 'finished' and string.find(event, '"finish_reason":"length"', 1, true) then ending = 'incomplete' end
  announce(job.id, object, ending, url)
end

-- The one way a job ends: state, place, account, log, ledger, lifetimes and announcement in one script, the channel last.
-- `events` end with the terminal one and have the seqs after job.seq. keep_ms nil: as the job asked.
-- dead_reason: nil, or why the job is buried; its body then stays, so that it can be queued anew. It also stays where
-- the job asked for that (keepb), as long as its result.
local function end_job(job, reason, by, events, keep_ms, dead_reason)
  local hash, log, first = P .. ':job:' .. job.id, P .. ':tokens:' .. job.id, job.seq + 1
  job.seq = job.seq + #events
  save(job, 'state', 'done', 'reason', reason, 'by', by, 'owner', '', 'fence', '', 'seq', job.seq, 'n', job.n,
    'pt', job.pt, 'tries', job.tries, 'strikes', job.strikes, 'ended', NOW)
  unplace(job)
  if job.state == 'running' or job.state == 'gone' then rest_if_idle() end
  if job.n > 0 or job.seq > #events then measure(job.pt + job.n) end
  if job.paid > 0 then charge(job.band, job.tenant, job.pt + job.n - job.paid) end
  for i, event in ipairs(events) do
    redis.pcall('XADD', log, int(first + i - 1) .. '-0', 'e', event)
  end
  redis.call('XADD', P .. ':usage', 'MAXLEN', '~', USAGE_ENTRIES, '*', 'j', job.id, 't', job.tenant, 'b', job.band,
    'p', int(job.pt), 'c', int(job.n), 'r', reason)
  local keep = keep_ms or (job.ttl > 0 and job.ttl) or 3600000
  if dead_reason then
    keep = math.max(keep, DEAD_KEEP_MS)
    bury(job, dead_reason, events[#events])
  end
  if dead_reason or job.keepb > 0 then
    redis.call('PEXPIRE', P .. ':body:' .. job.id, keep)
  else
    redis.call('DEL', P .. ':body:' .. job.id)
  end
  redis.call('DEL', P .. ':ids:' .. job.id)
  redis.call('PEXPIRE', hash, keep)
  redis.call('PEXPIRE', log, keep)
  if job.idem ~= '' then redis.call('PEXPIRE', P .. ':idem:' .. job.idem, keep) end
  redis.call('ZADD', P .. ':ended', NOW, job.id)
  if job.deadline > 0 or job.qdeadline > 0 then redis.call('ZREM', P .. ':deadlines', job.id) end
  if job.hook ~= '' then tell(job, events[#events]) end
  -- Readers find in the log what a failed PUBLISH kept from them.
  for _, event in ipairs(events) do redis.pcall('PUBLISH', log, event) end
end

local function fail(job, code, message, keep_ms)
  end_job(job, 'failed', code, {terminal_event('failed', job, error_json(code, message))}, keep_ms)
end

-- Something of a job is left, but its record is not: its readers are told, after the last event they can have seen.
-- nil for what is no job's id.
local function lose(id, band, tenant, keep_ms)
  if not string.match(id, '^[a-z0-9][a-z0-9._-]*%.' .. string.rep('%w', 22) .. '$') then return nil end
  local log = P .. ':tokens:' .. id
  local last = redis.pcall('XREVRANGE', log, '+', '-', 'COUNT', 1)
  if last.err then redis.call('DEL', log) end
  local seq, event = 0, ''
  if last[1] then seq, event = num(string.match(last[1][1], '^%d+')), last[1][2][2] end
  local kind = string.match(event, '^{"v":1,"type":"(%l+)"')
  if kind == 'finished' or kind == 'failed' or kind == 'cancelled' or kind == 'expired' then
    redis.call('DEL', P .. ':body:' .. id, P .. ':ids:' .. id)
    redis.call('PEXPIRE', log, int(keep_ms))
    return 'expiring'
  end
  local lost = {id = id, band = band, tenant = tenant, state = 'gone', fp = '', was = '', idem = '', hook = ''}
  for _, field in ipairs(NUMBERS) do lost[field] = 0 end
  lost.seq = seq
  -- The record said where else it was named.
  for _, key in ipairs({P .. ':deadlines', P .. ':later'}) do redis.call('ZREM', key, id) end
  for _, any in ipairs(BANDS) do redis.call('ZREM', P .. ':leases:' .. any, id) end
  fail(lost, 'job_lost', 'the record of the job is gone', keep_ms)
  return 'lost'
end

-- Too often without progress, or too often at all. A job may ask for fewer attempts than that, never for more.
local function is_worn_out(job, max_strikes, max_tries)
  if job.rmax > 0 then max_strikes = math.min(max_strikes, job.rmax) end
  return job.strikes >= max_strikes or job.tries >= max_tries
end

-- Too many attempts. `error`: the last one's, as JSON, or ''.
local function give_up(job, keep_ms, error)
  if error == '' then
    error = error_json('max_attempts', 'gave up after ' .. int(job.tries) .. ' attempts, the last ' ..
      int(job.strikes) .. ' without progress')
  end
  end_job(job, 'failed', 'max_attempts', {terminal_event('failed', job, error)}, keep_ms, 'max_attempts')
end

-- Deadline of the whole job, or, while it has said nothing, of its wait.
local function is_late(job)
  return (job.deadline > 0 and NOW >= job.deadline) or (job.seq == 0 and job.qdeadline > 0 and NOW >= job.qdeadline)
end

local function expire(job, keep_ms)
  end_job(job, 'expired', 'deadline', {terminal_event('expired', job)}, keep_ms)
end
