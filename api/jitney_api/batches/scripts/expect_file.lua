#!lua
-- with: batches
-- KEYS: loose. ARGV: prefix, id. Content is about to be put under this id: without a record in a day it is nobody's.
redis.call('ZADD', KEYS[1], int(NOW + DAY_MS), ARGV[2])
return {'ok'}
