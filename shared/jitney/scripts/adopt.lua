#!lua flags=allow-oom
-- with: base
-- The reply of a claim was lost: which jobs did it hand out that are still this worker's?
-- If it has not been here, it may be on its way yet, over a connection that its sender has given up: it comes too late.
local worker, nonce = ARGV[2], ARGV[3]
local LONGEST_WAY_MS = 3600000
local last = redis.call('GET', P .. ':last:' .. worker) or ''
local found, k = {}, 0
local word = string.gmatch(last, '%S+')
if word() ~= nonce then
  redis.call('SET', P .. ':last:' .. worker, nonce, 'PX', LONGEST_WAY_MS)
  return found
end
for id in word do
  k = k + 1
  local fence = nonce .. '.' .. k
  local has = redis.pcall('HMGET', P .. ':job:' .. id, 'fence', 'band', 'tenant', 'tries', 'strikes', 'seq', 'n', 'at',
    'vt', 'was', 'deadline')
  local body, prompt_ids = redis.pcall('GET', P .. ':body:' .. id), redis.pcall('GET', P .. ':ids:' .. id)
  if has[1] == fence then
    local deadline = num(has[11])
    found[#found + 1] = {id, has[2], has[3], fence, num(has[4]), num(has[5]), num(has[6]), num(has[7]), has[8],
      has[9] or '0', has[10] or '', int(deadline > 0 and math.max(0, deadline - NOW) or -1),
      type(body) == 'string' and body or '', type(prompt_ids) == 'string' and prompt_ids}
  end
end
return found
