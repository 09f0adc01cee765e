-- The owner gives the job back: at once, or after a delay.
local function give_back(job, delay_ms)
  job.state = delay_ms > 0 and 'later' or 'returned'
  save(job, 'state', job.state, 'owner', '', 'fence', '', 'since', NOW, 'tries', job.tries, 'strikes', job.strikes)
  if delay_ms > 0 then
    redis.call('ZREM', P .. ':leases:' .. job.band, job.id)
    redis.call('ZADD', P .. ':later', NOW + delay_ms, job.id)
    save(job, 'due', int(NOW + delay_ms))
  else
    hand(job)
  end
  rest_if_idle()
end
