#!lua
-- with: batches
-- KEYS: batch. ARGV: prefix. Takes the next fence, unless the batch has ended.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'unknown'} end
if not ENDED[state] then redis.call('HINCRBY', KEYS[1], 'fence', 1) end
return whole(KEYS[1])
