-- Every script: KEYS[1] is the queue's counts (it routes the call), ARGV[1] the prefix of all its keys.
-- All keys of a queue carry one hash tag, so those computed here lie in the slot of KEYS[1].
local P = ARGV[1]
local BANDS = {'interactive', 'standard', 'bulk'}
local BELL_SIZE = 64

-- Leases and deadlines compare with this clock alone: the clocks of workers may differ.
local clock = redis.call('TIME')
local NOW = clock[1] * 1000 + math.floor(clock[2] / 1000)

local function num(text)
  local value = tonumber(text)
  if not value or value ~= value then return 0 end
  return value
end

-- '..' would write 1e+15.
local function int(value)
  return string.format('%.0f', value)
end

-- Bounded, so that a queue without workers does not grow a list.
local function ring(bell)
  if redis.call('LLEN', bell) < BELL_SIZE then redis.call('RPUSH', bell, '1') end
end

-- One worker with free seats hears the bell. Of a job that goes before bulk all hear whose seats hold bulk.
local function ring_for(band, bell)
  ring(bell)
  if band ~= BANDS[#BANDS] then redis.pcall('PUBLISH', P .. ':call', band) end
end

-- What a stranger put where something of ours belongs would stop every script that looks there.
local function clear_unless(kind, key)
  local has = redis.call('TYPE', key).ok
  if has ~= kind and has ~= 'none' then redis.call('DEL', key) end
end
