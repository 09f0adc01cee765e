#!lua flags=allow-oom
-- with: base fair pace places outbox ending recount
-- Hand out jobs to `worker`, down to each band at most as many as it has credit. Band by band: what was handed back
-- or lost its lease, then new jobs, the least served tenant first. A fence is nonce.k, so `adopt` finds them again if the reply
-- is lost.
local worker, nonce, fp = ARGV[2], ARGV[3], ARGV[5]
local lease_ms, scan, keep_ms = num(ARGV[6]), ARGV[7] == '1', num(ARGV[8])
local max_strikes, max_tries = num(ARGV[9]), num(ARGV[10])
-- The most urgent band has the most: its jobs may take the seats of others. Who names one number means it for all.
local credits = {num(ARGV[4]), num(ARGV[11] or ARGV[4]), num(ARGV[12] or ARGV[4])}
local credit = credits[1]
local ROUNDS = 8
local SLICE = 64
local DEFAULT_OUTPUT = 128

-- Its sender has asked what it gave, and been told: nothing. See adopt.
local last = redis.pcall('GET', P .. ':last:' .. worker)
if type(last) == 'string' and string.match(last, '^%S+') == nonce then return {{}, {}, 0, 0, -1} end

local taken, ids, gone, moved = {}, {}, {}, 0
-- Bounds the script: entries that turn out to be nobody's cost time but no credit.
local looks = 2 * credit + 256
local miscounted = false
-- Set by a suspect, a job whose claimers died without progress on it: it goes alone, and comes with nobody else.
local closed = false
local paused_since = idle_since()
local average = num(redis.call('HGET', P .. ':vt', 'avg'))
if average <= 0 then average = DEFAULT_OUTPUT end

local function add_strike(job)
  if job.state == 'running' then job.strikes = job.seq == job.cseq and job.strikes + 1 or 0 end
end

-- The life of what ends here: as the job asked, else keep_ms.
local function keep(job)
  return job.ttl > 0 and job.ttl or keep_ms
end

local function is_full()
  return closed or #taken >= credit
end

-- True: the caller of claim owns the job now. False: it is ended, or `closed`: it stays where it is, for another
-- claim. `owed`: tokens to charge for it.
local function take(job, owed)
  if is_late(job) then
    expire(job, keep(job))
    gone[#gone + 1] = job.id
    return false
  end
  add_strike(job)
  if is_worn_out(job, max_strikes, max_tries) then
    give_up(job, keep(job), '')
    gone[#gone + 1] = job.id
    return false
  end
  local body = redis.pcall('GET', P .. ':body:' .. job.id)
  if type(body) ~= 'string' then
    fail(job, 'job_lost', 'the body of the job is gone', keep(job))
    gone[#gone + 1] = job.id
    return false
  end
  if job.strikes > 0 then
    closed = true
    if #taken > 0 then return false end
  end
  local fence = nonce .. '.' .. (#taken + 1)
  local was_running = job.state == 'running' and 1 or 0
  job.was = written_by(job)
  job.tries = job.tries + 1
  if job.started == 0 then job.started = NOW end
  save(job, 'state', 'running', 'owner', worker, 'fence', fence, 'tries', job.tries, 'strikes', job.strikes,
    'cseq', job.seq, 'since', NOW, 'started', job.started, 'paid', job.paid + owed, 'fp', fp, 'was', job.was, 'vt', job.vt,
    'lease', int(lease_ms))
  redis.call('ZADD', P .. ':leases:' .. job.band, NOW + lease_ms, job.id)
  local left = job.deadline > 0 and job.deadline - NOW or -1
  local prompt_ids = redis.pcall('GET', P .. ':ids:' .. job.id)
  if type(prompt_ids) ~= 'string' then prompt_ids = false end
  taken[#taken + 1] = {job.id, job.band, job.tenant, fence, job.tries, job.strikes, job.seq, job.n, int(job.at),
    string.format('%.17g', job.vt), job.was, int(left), body, prompt_ids, was_running}
  ids[#ids + 1] = job.id
  return true
end

local function take_held(band)
  local held = P .. ':held:' .. band .. ':' .. fp
  for _ = 1, ROUNDS do
    if is_full() then return end
    local found = redis.call('ZRANGE', held, 0, math.min(SLICE, credit - #taken) - 1)
    if #found == 0 then return end
    for _, id in ipairs(found) do
      if is_full() then return end
      local job = load_job(id)
      if job and job.state == 'returned' and not take(job, 0) and closed then return end
      redis.call('ZREM', held, id)
    end
  end
end

local function take_expired(band)
  local leases = P .. ':leases:' .. band
  for _ = 1, ROUNDS do
    if is_full() then return end
    local found = redis.call('ZRANGEBYSCORE', leases, '-inf', NOW, 'LIMIT', 0, math.min(SLICE, credit - #taken))
    if #found == 0 then return end
    for _, id in ipairs(found) do
      if is_full() then return end
      local job = load_job(id)
      if not job or (job.state ~= 'running' and job.state ~= 'returned') then
        redis.call('ZREM', leases, id)
      elseif is_bound(job) and job.fp ~= fp and not is_late(job) then
        -- Moved once, so that it does not stand in front of every claim of another build.
        add_strike(job)
        job.state = 'returned'
        save(job, 'state', 'returned', 'owner', '', 'fence', '', 'strikes', job.strikes, 'since', NOW)
        hand(job)
        moved = moved + 1
      else
        take(job, 0)
      end
    end
  end
end

-- An entry that is no waiting job: written by a stranger, or its job was lost. Nothing vanishes silently:
-- readers of a lost job get an end, and what nobody can read is buried.
local function discard(stream, band, tenant, entry, id, job)
  redis.call('XDEL', stream, entry[1])
  miscounted = true
  if job then return end
  if id and redis.call('EXISTS', P .. ':job:' .. id) == 0 and lose(id, band, tenant, keep_ms) then
    gone[#gone + 1] = id
    return
  end
  local raw = string.sub(table.concat(entry[2], ' '), 1, 512)
  redis.call('XADD', P .. ':dead', 'MAXLEN', '~', DEAD_ENTRIES, '*', 'b', band, 't', tenant, 'r', 'undecodable',
    'raw', raw)
end

-- New jobs of one tenant, until another has been served less.
local function serve(band, tenant, score, limit)
  local stream = P .. ':jobs:' .. band .. ':' .. tenant
  local entries = redis.pcall('XRANGE', stream, '-', '+', 'COUNT', limit and 4 or 16)
  if entries.err then
    redis.call('ZREM', P .. ':fair:' .. band, tenant)
    return
  end
  local weight, served, tokens, spent = weight_of(tenant), {}, 0, 0
  for _, entry in ipairs(entries) do
    if is_full() or looks <= 0 or (limit and score + spent > limit) then break end
    looks = looks - 1
    local id, est = read_entry(entry[2])
    local job = id and load_job(id)
    if not job or job.state ~= 'waiting' or job.eid ~= entry[1] or job.band ~= band or job.tenant ~= tenant then
      discard(stream, band, tenant, entry, id, job)
    else
      -- What the answer will probably cost; the end settles it. A job that came back has paid.
      local owed = 0
      if job.paid == 0 then owed = job.pt + (job.max > 0 and math.min(job.max, average) or average) end
      job.vt = score + spent
      if take(job, owed) then
        served[#served + 1] = entry[1]
        tokens = tokens + est
        spent = spent + owed / weight
      end
    end
  end
  if #served > 0 then
    if score > served_until(band) then redis.call('HSET', P .. ':vt', band, score) end
    redis.call('ZINCRBY', P .. ':fair:' .. band, spent, tenant)
    -- After the leases: whatever stops the script between, no job is without a place.
    redis.call('XDEL', stream, unpack(served))
    add_counts(-#served, -tokens)
  end
  close_if_empty(band, tenant)
end

local function take_new(band)
  while not is_full() and looks > 0 do
    local least = redis.call('ZRANGE', P .. ':fair:' .. band, 0, 1, 'WITHSCORES')
    if not least[1] then return end
    looks = looks - 1
    serve(band, least[1], num(least[2]), least[4] and num(least[4]))
  end
end

if scan then make_due(SLICE) end
for i, band in ipairs(BANDS) do
  credit = credits[i]
  if scan then
    take_held(band)
    take_expired(band)
  end
  take_new(band)
end

if #taken > 0 and paused_since then wake(paused_since) end
if #ids > 0 then redis.call('SET', P .. ':last:' .. worker, nonce .. ' ' .. table.concat(ids, ' '), 'PX', lease_ms) end
if miscounted then recount() end
local waiting = num(redis.call('HGET', P .. ':counts', 'jobs'))

local function more_to_take()
  for _, band in ipairs(BANDS) do
    if redis.call('ZCOUNT', P .. ':leases:' .. band, '-inf', NOW) > 0 then return true end
  end
  return waiting > 0
end

if #taken == 0 and #gone == 0 and moved == 0 and not miscounted then
  -- Nothing was there: rings that are left would only cause empty claims. Who may not take all bands does not know.
  if scan and credits[#credits] > 0 then redis.call('DEL', P .. ':bell', P .. ':bell:' .. fp) end
elseif #taken > 0 or looks <= 0 then
  -- Pass it on: one ring may stand for many jobs. Only after progress, or a wrong count would ring for ever.
  if more_to_take() and redis.call('LLEN', P .. ':bell') == 0 then ring(P .. ':bell') end
  for _, band in ipairs(BANDS) do
    if redis.call('EXISTS', P .. ':held:' .. band .. ':' .. fp) == 1 and redis.call('LLEN', P .. ':bell:' .. fp) == 0 then
      ring(P .. ':bell:' .. fp)
    end
  end
end

local due = redis.call('ZRANGE', P .. ':later', 0, 0, 'WITHSCORES')[2]
return {taken, gone, moved, waiting, due and math.max(0, num(due) - NOW) or -1}
