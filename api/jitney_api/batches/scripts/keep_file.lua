#!lua
-- with: batches
-- KEYS: file. ARGV: prefix, and what keep_file takes.
return whole(keep_file(2))
