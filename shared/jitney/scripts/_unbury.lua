-- The idempotency key that still answers for a job, and the digest it stands for; or nil.
local function key_of(id)
  local has = redis.pcall('HMGET', P .. ':job:' .. id, 'idem')
  if has.err or not has[1] then return nil end
  local key = P .. ':idem:' .. has[1]
  local owner, digest = string.match(redis.call('GET', key) or '', '^(%S+) (.*)$')
  if owner == id then return key, digest end
end

-- What was kept longer only because the job was buried now lives no longer than any result.
local function unbury(entry, id)
  local dead = P .. ':dead'
  redis.call('XDEL', dead, entry)
  if redis.call('XLEN', dead) == 0 then redis.call('DEL', dead) end
  if id == '' then return end
  local has = redis.pcall('HMGET', P .. ':job:' .. id, 'ttl', 'keepb')
  if has.err or not has[2] then redis.call('DEL', P .. ':body:' .. id) end
  local ttl = not has.err and num(has[1]) or 0
  local keep = int(ttl > 0 and ttl or 3600000)
  for _, kind in ipairs({':job:', ':tokens:', ':result:', ':body:'}) do
    redis.call('PEXPIRE', P .. kind .. id, keep, 'LT')
  end
  local key = key_of(id)
  if key then redis.call('PEXPIRE', key, keep, 'LT') end
end
