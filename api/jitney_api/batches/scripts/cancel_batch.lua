#!lua flags=allow-oom
-- with: batches
-- KEYS: batch. ARGV: prefix. What has begun to be put together, or has ended, stays as it is.
local state = redis.call('HGET', KEYS[1], 'state')
if not state then return {'unknown'} end
if state == 'validating' or state == 'in_progress' then enter(KEYS[1], 'cancelling') end
return whole(KEYS[1])
