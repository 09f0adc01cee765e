-- What is still to be told to somebody's endpoint: :hooks, by the time of the next attempt, and :hook:<id> for each.
-- :hooks:dead, by the time they were given up, holds those that nobody tries any more.
local HOOK_ENTRIES = 100000
local DEAD_HOOK_ENTRIES = 1000
local HOOKS, DEAD_HOOKS = P .. ':hooks', P .. ':hooks:dead'

local function forget_hook(id)
  redis.call('ZREM', HOOKS, id)
  redis.call('ZREM', DEAD_HOOKS, id)
  redis.call('DEL', P .. ':hook:' .. id)
end

-- Where nobody delivers, and where nobody looks, the oldest make room.
local function bound_hooks(place, most)
  local too_many = redis.call('ZCARD', place) - most
  if too_many <= 0 then return end
  for _, id in ipairs(redis.call('ZRANGE', place, 0, too_many - 1)) do forget_hook(id) end
end

-- object: job, response or batch, as the one who asked calls it. ending: how it ended.
local function announce(id, object, ending, url)
  local hook = P .. ':hook:' .. id
  clear_unless('zset', HOOKS)
  redis.call('DEL', hook)
  redis.call('HSET', hook, 'object', object, 'ending', ending, 'url', url, 'at', NOW)
  redis.call('ZADD', HOOKS, NOW, id)
  bound_hooks(HOOKS, HOOK_ENTRIES)
end
