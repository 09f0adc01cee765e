local RECOUNT_ENTRIES = 2000

-- Counts from what is really there. Exact up to RECOUNT_ENTRIES entries; beyond, tokens stay an estimate.
local function recount()
  local jobs, tokens, streams = 0, 0, {}
  for _, band in ipairs(BANDS) do
    for _, tenant in ipairs(redis.call('ZRANGE', P .. ':fair:' .. band, 0, -1)) do
      local stream = P .. ':jobs:' .. band .. ':' .. tenant
      local length = redis.pcall('XLEN', stream)
      if type(length) == 'number' then
        jobs = jobs + length
        streams[#streams + 1] = stream
      end
    end
  end
  if jobs > RECOUNT_ENTRIES then
    redis.call('HSET', P .. ':counts', 'jobs', jobs)
    return
  end
  for _, stream in ipairs(streams) do
    for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do
      local _, est = read_entry(entry[2])
      tokens = tokens + est
    end
  end
  if jobs == 0 then
    redis.call('DEL', P .. ':counts')
  else
    redis.call('HSET', P .. ':counts', 'jobs', jobs, 'tok', int(tokens))
  end
end
