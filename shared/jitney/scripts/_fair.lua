-- Start-time fair queueing over tenants. Score in :fair = service the tenant has been charged; V = score
-- of the last one served. Idle time earns no credit, and debt is not forgotten by leaving.
local function weight_of(tenant)
  local weight = num(redis.call('HGET', P .. ':weights', tenant))
  return weight > 0 and weight or 1
end

local function served_until(band)
  return num(redis.call('HGET', P .. ':vt', band))
end

local function join(band, tenant)
  local fair, idle = P .. ':fair:' .. band, P .. ':idle:' .. band
  if redis.call('ZSCORE', fair, tenant) then return end
  local start = served_until(band)
  local lowest = redis.call('ZRANGE', fair, 0, 0, 'WITHSCORES')[2]
  if lowest then start = math.min(start, num(lowest)) end
  local own = redis.call('ZSCORE', idle, tenant)
  if own then start = math.max(start, num(own)) end
  redis.call('ZADD', fair, start, tenant)
  redis.call('ZREM', idle, tenant)
end

local function leave(band, tenant)
  local fair = P .. ':fair:' .. band
  local score = redis.call('ZSCORE', fair, tenant)
  if not score then return end
  redis.call('ZREM', fair, tenant)
  if num(score) > served_until(band) then redis.call('ZADD', P .. ':idle:' .. band, score, tenant) end
end

-- tokens < 0 pays back.
local function charge(band, tenant, tokens)
  if tokens == 0 then return end
  local fair, idle = P .. ':fair:' .. band, P .. ':idle:' .. band
  local delta = tokens / weight_of(tenant)
  if redis.call('ZSCORE', fair, tenant) then
    redis.call('ZINCRBY', fair, delta, tenant)
    return
  end
  local reached = served_until(band)
  local score = num(redis.call('ZSCORE', idle, tenant) or reached) + delta
  if score > reached then
    redis.call('ZADD', idle, score, tenant)
  else
    redis.call('ZREM', idle, tenant)
  end
end
