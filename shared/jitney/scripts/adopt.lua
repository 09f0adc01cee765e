#!lua flags=allow-oom
-- with: base
-- The reply of a claim was lost: which jobs did it hand out that are still this worker's?
local worker, nonce = ARGV[2], ARGV[3]
local last = redis.call('GET', P .. ':last:' .. worker) or ''
local found, k = {}, 0
local word = string.gmatch(last, '%S+')
if word() ~= nonce then return found end
for id in word do
  k = k + 1
  local fence = nonce .. '.' .. k
  local has = redis.call('HMGET', P .. ':job:' .. id, 'fence', 'band', 'tenant', 'tries', 'strikes', 'seq', 'n', 'at',
    'vt', 'was', 'fp', 'deadline')
  if has[1] == fence then
    local deadline = num(has[12])
    local was = has[10] or ''
    local log_of = was ~= '' and was or (num(has[6]) > 0 and has[11] or '')
    found[#found + 1] = {id, has[2], has[3], fence, num(has[4]), num(has[5]), num(has[6]), num(has[7]), has[8],
      has[9] or '0', log_of, int(deadline > 0 and math.max(0, deadline - NOW) or -1), redis.call('GET', P .. ':body:' .. id) or '',
      redis.call('GET', P .. ':ids:' .. id)}
  end
end
return found
