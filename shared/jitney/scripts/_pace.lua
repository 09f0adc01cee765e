-- The pace of a queue: tokens of the jobs that end (prompt and answer, once somebody has worked on them) over the
-- time in which anybody held a live lease. Idle hours and outages stop its clock, or the next backlog would seem to
-- take days. In :vt: rate, the estimate; sum, from: of the window that runs; rest: since when the clock stands.
local RATE_WINDOW_MS = 5000

local function is_anyone_at_work()
  for _, band in ipairs(BANDS) do
    if redis.call('ZCOUNT', P .. ':leases:' .. band, '(' .. NOW, '+inf') > 0 then return true end
  end
  return false
end

-- A lease was given up or has ended.
local function rest_if_idle()
  if not is_anyone_at_work() then redis.call('HSETNX', P .. ':vt', 'rest', NOW) end
end

-- nil, or since when nobody has been at work: the last one said so, or its lease ran out.
local function idle_since()
  local since = num(redis.call('HGET', P .. ':vt', 'rest'))
  if since > 0 then return since end
  if is_anyone_at_work() then return nil end
  for _, band in ipairs(BANDS) do
    local last = redis.call('ZRANGE', P .. ':leases:' .. band, -1, -1, 'WITHSCORES')[2]
    since = math.max(since, num(last))
  end
  return since > 0 and since or NOW
end

-- Work begins again, after a pause since `idle_since()`.
local function wake(since)
  local from = num(redis.call('HGET', P .. ':vt', 'from'))
  -- A pause that began before the window did has stopped only its own part of it.
  redis.call('HSET', P .. ':vt', 'from', int(from > 0 and from + NOW - math.max(since, from) or NOW))
  redis.call('HDEL', P .. ':vt', 'rest')
end

-- Means of windows, each weighing as much as all before it.
local function measure(tokens)
  local has = redis.call('HMGET', P .. ':vt', 'rate', 'sum', 'from', 'rest')
  local rate, sum, from, rest = num(has[1]), num(has[2]) + tokens, num(has[3]), num(has[4])
  local worked = (rest > 0 and rest or NOW) - from
  if from == 0 or worked < RATE_WINDOW_MS then
    redis.call('HSET', P .. ':vt', 'sum', int(sum))
    if from == 0 then redis.call('HSET', P .. ':vt', 'from', NOW) end
    return
  end
  local mean = sum * 1000 / worked
  redis.call('HSET', P .. ':vt', 'rate', rate > 0 and (rate + mean) / 2 or mean, 'sum', 0,
    'from', int(rest > 0 and rest or NOW))
end
