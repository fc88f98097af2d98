"""The queue's state changes as Lua scripts: each is atomic, so a killed process leaves no half-done step.

An entry has the fields job_id, key, slot, created_at, expires_at, deadline_ms, num_replaced, permit. The key
`job:<id>` holds a job id's state for `dedup_ttl_s`: the token of the `put` that queued it, then
`done:<the delivery's token>`.

invariant: a job's entry stays in the stream until it is finished, buried or dropped, and is then deleted, so
XLEN is what waits plus what is pending.

why: scripts instead of XADD's `MAXLEN ~`: that trims the oldest entries, which are the ones being worked on,
and does not tell how many nor how many bytes went. And lines of our own instead of XREADGROUP's order: that
serves who floods the queue, at the cost of who does not.
"""

from queues.prelude import BOOKS, LINES

PUT = (
    LINES
    + """
-- In one transaction with the SET of `put:<token>`, which is the body, before it and its DEL after it.
-- ARGV: token, job_id, key, slot, created_at, expires_at, ttl_ms, size, dedup_ttl_ms, max_len, max_bytes,
--       max_per_slot, may_drop, permit, then reason, number of drops that the producer counted by itself.
-- Returns 1 queued, 0 duplicate, -1 no room.
local token, job_id, key, slot, size = ARGV[3], ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[10])
local max_len, max_bytes = tonumber(ARGV[12]), tonumber(ARGV[13])
local max_per_slot, may_drop = tonumber(ARGV[14]), ARGV[15] == '1'

local known = redis.call('SET', state_key(job_id), token, 'NX', 'GET', 'PX', ARGV[11])
if known == token then return 1 end
local length = redis.call('XLEN', stream)
if length == 0 and redis.call('EXISTS', turns, slots) > 0 then forget_lines() end
local books = redis.call('HMGET', counts, 'bytes', 'place', 'put', load(key))
local bytes, weight = 0, 0
if length > 0 then bytes, weight = tonumber(books[1] or 0), tonumber(books[4] or 0) end

-- The slot's jobs that this one replaces, and the places of all of them.
local replaced, kept, places = {}, {}, {}
if slot ~= '' and not known then
  local rows = redis.call('ZRANGE', line(key), 0, -1, 'WITHSCORES')
  for i = 1, #rows, 2 do
    if redis.call('HGET', slots, rows[i]) == slot then
      kept[#kept + 1], places[#places + 1] = rows[i], rows[i + 1]
    end
  end
  while #kept >= max_per_slot do replaced[#replaced + 1] = table.remove(kept, 1) end
end

local function is_over()
  return length > 0 and (length + 1 > max_len or bytes + size > max_bytes)
end
if not known and #replaced == 0 and not may_drop and is_over() then
  redis.call('DEL', state_key(job_id))
  return -1
end

for i = 17, #ARGV, 2 do count('dropped:' .. ARGV[i], ARGV[i + 1]) end
if known then
  count('duplicates', 1)
  return 0
end

-- invariant: who replaces a waiting job takes its place, and the key keeps its turn: being new costs neither.
local last, num_replaced = place_after(books[2]), 0
local place = last
if #replaced > 0 then
  for i, entry_id in ipairs(kept) do redis.call('ZADD', line(key), places[i], entry_id) end
  place = places[#kept + 1]
end
local turn = #replaced > 0 and redis.call('ZSCORE', turns, key)
for _, entry_id in ipairs(replaced) do
  local old, old_size = drop_waiting(key, entry_id, 'replaced')
  num_replaced = num_replaced + 1 + (old and tonumber(old.num_replaced) or 0)
  length, bytes, weight = length - 1, bytes - old_size, weight - old_size
end

-- The key whose waiting jobs take the most room, this job included; among equals the putting one.
local function heaviest(by_length)
  local found, most = false, -1
  for _, other in ipairs(redis.call('ZRANGE', turns, 0, -1)) do
    local is_own = other == key
    local room = by_length and redis.call('ZCARD', line(other))
      or tonumber(redis.call('HGET', counts, load(other)) or 0)
    if is_own then room = room + (by_length and 1 or size) end
    if room > most or (room == most and is_own) then found, most = other, room end
  end
  return found
end

while may_drop and is_over() do
  local victim = heaviest(length + 1 > max_len)
  if not victim then
    redis.call('HSET', counts, 'place', last)
    count('put', 1)
    count('dropped:overflow', 1)
    tell_dropped(job_id, key, 'overflow')
    return 1
  end
  local _, old_size = drop_waiting(victim, redis.call('ZRANGE', line(victim), 0, 0)[1], 'overflow')
  length, bytes = length - 1, bytes - old_size
  if victim == key then weight = weight - old_size end
end

local deadline_ms = ''
if ARGV[9] ~= '' then deadline_ms = string.format('%d', now_ms() + ARGV[9]) end
local entry_id = redis.call('XADD', stream, '*', 'job_id', job_id, 'key', key, 'slot', slot,
  'created_at', ARGV[7], 'expires_at', ARGV[8], 'deadline_ms', deadline_ms, 'num_replaced', num_replaced,
  'permit', ARGV[16])
redis.call('RENAME', own('put:' .. token), body_key(entry_id))
redis.call('HSET', counts, 'bytes', bytes + size, 'place', last, 'put', tonumber(books[3] or 0) + 1,
  load(key), weight + size)
join(key, entry_id, slot, place)
if turn then redis.call('ZADD', turns, turn, key) end
return 1
"""
)

TAKE = (
    LINES
    + """
-- Takes the oldest job of the key whose turn it is, again and again, and copies the first one's body to the
-- key `hand`, for a command behind this one. ARGV: hand, is_first, max_jobs, dead_max_len, then keys to pass
-- over.
-- Returns the server's time, (entry_id, fields, ms that its place waited)..., of the keys that still wait a
-- flat list of (key, ms that its first place waits), the same of jobs that expired meanwhile, and the newest
-- entry's id, behind which the stream tells of the next put. Who looked a moment ago (not is_first) need not
-- look again for what others added, and knows that id.
local hand, is_first, max_jobs, passed = ARGV[3], ARGV[4] == '1', tonumber(ARGV[5]), {}
for i = 7, #ARGV do passed[ARGV[i]] = true end
local now, found, waits, expired = now_ms(), {}, {}, {}
if is_first
  and redis.call('XLEN', stream) > redis.call('XPENDING', stream, group)[1] + redis.call('HLEN', slots) then
  reindex(ARGV[6])
end

-- The turns as they stand, read again after each change.
local order
local function next_key()
  order = order or redis.call('ZRANGE', turns, 0, -1)
  for _, key in ipairs(order) do
    if not passed[key] then return key end
  end
end

local function wait_of(place) return math.max(0, math.floor(now - tonumber(place) / 1000)) end

local function hand_over(entry_id, job)
  if job.body then has_body(entry_id, job) end
  if #found > 0 then return redis.call('EXISTS', body_key(entry_id)) == 1 end
  if redis.call('COPY', body_key(entry_id), hand, 'REPLACE') == 0 then return false end
  redis.call('PEXPIRE', hand, 10000)
  return true
end

local key = next_key()
while key and #found < max_jobs do
  local entry_id, place = unpack(redis.call('ZRANGE', line(key), 0, 0, 'WITHSCORES'))
  local entry = entry_of(entry_id)
  local job = entry and fields_of(entry)
  if not job or is_late(job, now) then
    drop_waiting(key, entry_id, 'expired')
    expired[#expired + 1], expired[#expired + 2] = key, wait_of(place)
  elseif is_withdrawn(job) then
    drop_waiting(key, entry_id, 'withdrawn')
  else
    -- why: first, so that nothing has changed when there is no such group.
    redis.call('XCLAIM', stream, group, consumer, 0, entry_id, 'RETRYCOUNT', 1, 'FORCE', 'JUSTID')
    local has_more = leave(key, entry_id)
    if is_done(job.job_id) then
      remove(entry_id)
      count('duplicates', 1)
    elseif not hand_over(entry_id, job) then
      remove(entry_id)
      count('dropped:expired', 1)
      tell_dropped(job.job_id, key, 'expired')
    else
      if has_more then redis.call('ZADD', turns, next_place(), key) end
      found[#found + 1] = {entry_id, entry[2], wait_of(place)}
    end
  end
  order = nil
  key = next_key()
end

for _, other in ipairs(order) do
  local head = redis.call('ZRANGE', line(other), 0, 0, 'WITHSCORES')
  waits[#waits + 1], waits[#waits + 2] = other, wait_of(head[2])
end
local last = is_first and redis.call('XREVRANGE', stream, '+', '-', 'COUNT', 1)[1]
return {now, found, waits, expired, last and last[1] or '0-0'}
"""
)

CLAIM = (
    BOOKS
    + """
-- Takes over entries whose worker has been silent. ARGV: visibility_ms, cursor, max_jobs, max_deliveries,
-- dead_max_len. Returns the next cursor, the server's time and (entry_id, fields, times_delivered)...
local reply = redis.call('XAUTOCLAIM', stream, group, consumer, ARGV[3], ARGV[4], 'COUNT', ARGV[5])
local max_deliveries, dead_max_len = tonumber(ARGV[6]), ARGV[7]
local now, wanted = now_ms(), {}
for _, entry_id in ipairs(reply[3]) do remove(entry_id) end
if #reply[3] > 0 then count('dropped:expired', #reply[3]) end
for _, entry in ipairs(reply[2]) do
  local job = fields_of(entry)
  local times = redis.call('XPENDING', stream, group, entry[1], entry[1], 1)[1][4]
  local has_any = has_body(entry[1], job)
  if is_done(job.job_id) then
    remove(entry[1])
    count('duplicates', 1)
  elseif not has_any or is_late(job, now) then
    remove(entry[1])
    count('dropped:expired', 1)
    tell_dropped(job.job_id, job.key, 'expired')
  elseif is_withdrawn(job) then
    remove(entry[1])
    count('dropped:withdrawn', 1)
    tell_dropped(job.job_id, job.key, 'withdrawn')
  elseif times > max_deliveries then
    bury(entry[1], job, times - 1, 'its workers died or fell silent', dead_max_len)
  else
    wanted[#wanted + 1] = {entry[1], entry[2], times}
  end
end
return {reply[1], now, wanted}
"""
)

FINISH = (
    BOOKS
    + """
-- ARGV: entry_id, job_id, key, token, result, dedup_ttl_ms, result_max_len.
-- Returns 1 when this delivery's result is the one that was stored, 0 when another one was.
local entry_id, job_id, token = ARGV[3], ARGV[4], 'done:' .. ARGV[6]
local known = redis.call('GET', state_key(job_id))
-- why: first, because Redis refuses a script's growing writes when memory is full unless it has freed some.
remove(entry_id)
if known == token then return 1 end
if known and string.sub(known, 1, 5) == 'done:' then
  count('duplicates', 1)
  return 0
end
redis.call('SET', state_key(job_id), token, 'PX', ARGV[8])
redis.call('XADD', results, 'MAXLEN', '~', ARGV[9], '*', 'job_id', job_id, 'key', ARGV[5], 'body', ARGV[7])
count('done', 1)
return 1
"""
)

FAIL = (
    BOOKS
    + """
-- ARGV: entry_id, times_delivered, max_deliveries, idle_ms (how silent it shall look), reason, dead_max_len,
-- job_id, key.
-- Returns 1 to be delivered again, 0 buried or gone, -1 when another worker has it.
local entry_id, times = ARGV[3], tonumber(ARGV[4])
if not held_by_us(entry_id) then return -1 end
local entry = entry_of(entry_id)
if not entry then
  remove(entry_id)
  count('dropped:expired', 1)
  tell_dropped(ARGV[9], ARGV[10], 'expired')
  return 0
end
if times >= tonumber(ARGV[5]) then
  bury(entry_id, fields_of(entry), times, ARGV[7], ARGV[8])
  return 0
end
redis.call('XCLAIM', stream, group, consumer, 0, entry_id, 'IDLE', ARGV[6], 'JUSTID')
count('retried', 1)
return 1
"""
)

DROP = (
    BOOKS
    + """
-- Ends a job that is not worth an answer any more. ARGV: entry_id, reason, job_id, key.
-- Returns 1 dropped, 0 when another worker has it.
if not held_by_us(ARGV[3]) then return 0 end
remove(ARGV[3])
count('dropped:' .. ARGV[4], 1)
tell_dropped(ARGV[5], ARGV[6], ARGV[4])
return 1
"""
)

RENEW = (
    BOOKS
    + """
-- Keeps the leases of the given entries. ARGV: entry_id... Returns the ids that are not ours any more.
local lost = {}
for i = 3, #ARGV do
  if held_by_us(ARGV[i]) then
    redis.call('XCLAIM', stream, group, consumer, 0, ARGV[i], 'JUSTID')
  else
    lost[#lost + 1] = ARGV[i]
  end
end
return lost
"""
)

RELEASE = (
    BOOKS
    + """
-- Gives entries back unworked, to be claimed at once.
-- ARGV: visibility_ms, then (entry_id, times_delivered)...
for i = 4, #ARGV, 2 do
  if held_by_us(ARGV[i]) then
    redis.call('XCLAIM', stream, group, consumer, 0, ARGV[i], 'IDLE', ARGV[3],
      'RETRYCOUNT', ARGV[i + 1] - 1, 'JUSTID')
  end
end
if #redis.call('XPENDING', stream, group, '-', '+', 1, consumer) == 0 then
  redis.call('XGROUP', 'DELCONSUMER', stream, group, consumer)
end
return 1
"""
)
