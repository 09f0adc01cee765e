#!lua
-- with: base fair places entering
-- KEYS: counts, job, log [, idempotency key].
-- No allow-oom: a full server refuses new jobs, and goes on with those it has accepted.
local new = read_new()
local known = redis.call('HGET', KEYS[2], 'digest')
if known then return {known == new.digest and 'dup' or 'conflict', new.id} end
if KEYS[4] then
  local other, other_digest = string.match(redis.call('GET', KEYS[4]) or '', '^(%S+) (.*)$')
  -- A key whose job is gone is free again.
  if other and redis.call('EXISTS', P .. ':job:' .. other) == 1 then
    return {other_digest == new.digest and 'dup' or 'conflict', other}
  end
end
local full = refuse_if_full(new)
if full then return full end
enter(new, KEYS[4] and string.sub(KEYS[4], #P + 7) or '')
if KEYS[4] then answer_key(KEYS[4], new, new.digest) end
return {'ok', new.id}
