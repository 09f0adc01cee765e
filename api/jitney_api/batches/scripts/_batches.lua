-- KEYS[1] is the key of the batch or file that the call is about (it routes the call), ARGV[1] the prefix of all keys.
-- They carry one hash tag, so those computed here lie in the slot of KEYS[1].
local P = ARGV[1]
local ENDED = {failed = true, completed = true, expired = true, cancelled = true}
local DAY_MS = 86400000

-- Windows and lives of files compare with this clock alone: those of APIs and assemblers may differ.
local clock = redis.call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)

-- '..' would write 1e+15.
local function int(value)
  return string.format('%.0f', value)
end

local function whole(key)
  return {'ok', redis.call('HGETALL', key)}
end

-- Only the newest fence writes, and nobody writes to what has ended. Returns the state, or nil and the refusal.
local function guard(key, fence)
  local found = redis.call('HMGET', key, 'state', 'fence')
  if not found[1] then return nil, {'unknown'} end
  if found[2] ~= fence or ENDED[found[1]] then return nil, {'taken'} end
  return found[1]
end

local function enter(key, state)
  redis.call('HSET', key, 'state', state, state .. '_at', int(NOW))
end

-- A batch has ended: its input may go, its chunks are nobody's, and its record has begun its last days.
local function close(key, id, state)
  enter(key, state)
  redis.call('ZREM', P .. ':active', id)
  redis.call('ZADD', P .. ':ended', int(NOW), id)
  redis.call('DEL', P .. ':done:' .. id, P .. ':chunks:' .. id)
  redis.call('ZADD', P .. ':loose', int(NOW), id .. '/')
  local input = P .. ':file:' .. redis.call('HGET', key, 'input_file_id')
  if redis.call('EXISTS', input) == 1 then redis.call('HINCRBY', input, 'num_readers', -1) end
end

-- ARGV from `at` on: id, tenant, filename, purpose, num_bytes, life in seconds ('' = for ever).
local function keep_file(at)
  local id, tenant, life_s = ARGV[at], ARGV[at + 1], ARGV[at + 5]
  local key = P .. ':file:' .. id
  redis.call('HSET', key, 'tenant', tenant, 'filename', ARGV[at + 2], 'purpose', ARGV[at + 3],
    'num_bytes', ARGV[at + 4], 'created_at', int(NOW))
  redis.call('ZADD', P .. ':files:' .. tenant, int(NOW), id)
  redis.call('ZREM', P .. ':loose', id)
  if life_s ~= '' then
    local expires = int(NOW + life_s * 1000)
    redis.call('HSET', key, 'expires_at', expires)
    redis.call('ZADD', P .. ':expiring', expires, id)
  end
  return key
end
