#!lua flags=allow-oom
-- with: base
-- ARGV: prefix, lease, then id, fence, band of each held job. Returns the ids that are no longer the caller's.
local expiry = int(NOW + num(ARGV[2]))
local lost, leases = {}, {}
for i = 3, #ARGV, 3 do
  local id, fence, band = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  -- pcall: what somebody put in the place of one record must not cost the leases of all others.
  if fence == '' or redis.pcall('HGET', P .. ':job:' .. id, 'fence') ~= fence then
    lost[#lost + 1] = id
  else
    local members = leases[band] or {}
    leases[band] = members
    members[#members + 1] = expiry
    members[#members + 1] = id
  end
end
-- No XX: it puts a lost lease set back.
for band, members in pairs(leases) do redis.call('ZADD', P .. ':leases:' .. band, unpack(members)) end
return lost
