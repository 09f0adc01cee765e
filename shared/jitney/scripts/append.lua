#!lua flags=allow-oom
-- with: base fair
-- KEYS: counts, then job and log of each job. ARGV: prefix, then of each job
--   fence, first seq, completion tokens after the events, prompt tokens or '', prompt ids or '', k, k events.
-- One job's refusal is no other's: no error leaves this script. Returns only what was refused.
local refused = {}

local function refuse(i, reason, seq, text)
  refused[#refused + 1] = {i, reason, seq, text}
end

-- The true prompt replaces its estimate, in the tenant's account too.
local function settle_prompt(job, num_prompt_tokens)
  local has = redis.call('HMGET', job, 'pt', 'paid', 'band', 'tenant')
  local paid, difference = num(has[2]), num_prompt_tokens - num(has[1])
  if paid > 0 and difference ~= 0 then
    charge(has[3], has[4], difference)
    redis.call('HSET', job, 'paid', paid + difference)
  end
  redis.call('HSET', job, 'pt', num_prompt_tokens)
end

local function write(i, job, log, first, n, from, k)
  for j = 0, k - 1 do
    local id, event = int(first + j) .. '-0', ARGV[from + j]
    local added
    if first + j == 1 then
      added = redis.pcall('XADD', log, id, 'e', event)
    else
      -- A log that vanished must not begin anew with a hole at its front.
      added = redis.pcall('XADD', log, 'NOMKSTREAM', id, 'e', event)
    end
    if type(added) ~= 'string' then
      if j > 0 then redis.call('HSET', job, 'seq', int(first + j - 1)) end
      return refuse(i, added and 'error' or 'nolog', first + j - 1, added and added.err or '')
    end
  end
  redis.call('HSET', job, 'seq', int(first + k - 1), 'n', n)
  for j = 0, k - 1 do redis.pcall('PUBLISH', log, ARGV[from + j]) end
end

local at = 2
for i = 1, (#KEYS - 1) / 2 do
  local job, log = KEYS[2 * i], KEYS[2 * i + 1]
  local fence, first, k = ARGV[at], num(ARGV[at + 1]), num(ARGV[at + 5])
  local has = redis.pcall('HMGET', job, 'fence', 'seq')
  local seq = num(not has.err and has[2])
  if has.err or fence == '' or has[1] ~= fence then
    refuse(i, 'fence', 0, '')
  elseif first ~= seq + 1 then
    refuse(i, 'seq', seq, '')
  else
    if ARGV[at + 3] ~= '' then settle_prompt(job, num(ARGV[at + 3])) end
    if ARGV[at + 4] ~= '' then redis.call('SET', P .. ':ids:' .. string.sub(job, #P + 6), ARGV[at + 4]) end
    write(i, job, log, first, ARGV[at + 2], at + 6, k)
  end
  at = at + 6 + k
end
return refused
