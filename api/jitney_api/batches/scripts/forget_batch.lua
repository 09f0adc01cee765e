#!lua flags=allow-oom
-- with: batches
-- KEYS: batch. ARGV: prefix, id. The record of an ended batch goes.
local tenant = redis.call('HGET', KEYS[1], 'tenant')
if tenant then redis.call('ZREM', P .. ':batches:' .. tenant, ARGV[2]) end
redis.call('ZREM', P .. ':ended', ARGV[2])
redis.call('DEL', KEYS[1])
return {'ok'}
