"""The queue's state changes as Lua scripts: each is atomic, so a killed process leaves no half-done step.

KEYS are always stream, counts, dead letters, results; ARGV starts with group and consumer.
An entry has the fields job_id, key, created_at, expires_at, deadline_ms, body. The key `job:<id>` holds a job
id's state for `dedup_ttl_s`: the token of the `put` that queued it, then `done:<the delivery's token>`.

invariant: a job's entry stays in the stream until it is finished, buried or dropped, and is then deleted, so
XLEN is what waits plus what is pending, and `bytes` in counts is the size of exactly these bodies.

why: scripts instead of XADD's `MAXLEN ~`: that trims the oldest entries, which are the ones being worked on,
and does not tell how many nor how many bytes went.
"""

_PRELUDE = """
local stream, counts, dead, results = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, consumer = ARGV[1], ARGV[2]

local function now_ms()
  local time = redis.call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

local function state_key(job_id) return '{' .. stream .. '}:job:' .. job_id end

local function count(name, number) redis.call('HINCRBY', counts, name, number) end

local function is_done(job_id)
  local state = redis.call('GET', state_key(job_id))
  return state and string.sub(state, 1, 5) == 'done:'
end

local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end

local function remove(entry_id, size)
  redis.call('XACK', stream, group, entry_id)
  if redis.call('XDEL', stream, entry_id) == 1 then count('bytes', -size) end
end

local function bury(entry_id, job, times, reason, max_len)
  remove(entry_id, #job.body)
  redis.call('XADD', dead, 'MAXLEN', '~', max_len, '*', 'job_id', job.job_id, 'key', job.key,
    'times_delivered', times, 'reason', reason, 'body', job.body)
  count('dropped:dead', 1)
end

local function held_by_us(entry_id)
  return #redis.call('XPENDING', stream, group, entry_id, entry_id, 1, consumer) == 1
end
"""

PUT = (
    _PRELUDE
    + """
-- ARGV: token, job_id, key, created_at, expires_at, ttl_ms, body, dedup_ttl_ms, max_len, max_bytes, may_drop,
--       then reason, number of drops that the producer counted by itself.
-- Returns 1 queued, 0 duplicate, -1 no room.
local token, job_id, body = ARGV[3], ARGV[4], ARGV[9]
local max_len, max_bytes, may_drop = tonumber(ARGV[11]), tonumber(ARGV[12]), ARGV[13] == '1'

local known = redis.call('GET', state_key(job_id))
if known == token then return 1 end
local length = redis.call('XLEN', stream)
if length == 0 then redis.call('HSET', counts, 'bytes', 0) end
local bytes = tonumber(redis.call('HGET', counts, 'bytes') or 0) + #body
local is_over = length > 0 and (length + 1 > max_len or bytes > max_bytes)
if not known and is_over and not may_drop then return -1 end

for i = 14, #ARGV, 2 do count('dropped:' .. ARGV[i], ARGV[i + 1]) end
if known then
  count('duplicates', 1)
  return 0
end

local deadline_ms = ''
if ARGV[8] ~= '' then deadline_ms = string.format('%d', now_ms() + ARGV[8]) end
redis.call('SET', state_key(job_id), token, 'PX', ARGV[10])
redis.call('XADD', stream, '*', 'job_id', job_id, 'key', ARGV[5], 'created_at', ARGV[6],
  'expires_at', ARGV[7], 'deadline_ms', deadline_ms, 'body', body)
count('bytes', #body)
count('put', 1)
length = length + 1

local function last_delivered()
  for _, row in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    local info = {}
    for i = 1, #row, 2 do info[row[i]] = row[i + 1] end
    if info.name == group then return info['last-delivered-id'] end
  end
  return '0-0'
end

local first = is_over and '(' .. last_delivered()
while is_over do
  local oldest = redis.call('XRANGE', stream, first, '+', 'COUNT', 1)[1]
  if not oldest then break end
  local size = #fields_of(oldest).body
  redis.call('XDEL', stream, oldest[1])
  count('bytes', -size)
  count('dropped:overflow', 1)
  length, bytes = length - 1, bytes - size
  is_over = length > max_len or bytes > max_bytes
end
return 1
"""
)

ADMIT = (
    _PRELUDE
    + """
-- Looks at entries that were just delivered for the first time.
-- ARGV: (entry_id, job_id, deadline_ms, size)...
-- Returns the server's time and the ids of the entries that are worth working on.
local now, wanted = now_ms(), {}
for i = 3, #ARGV, 4 do
  local entry_id, job_id, deadline_ms, size = ARGV[i], ARGV[i + 1], tonumber(ARGV[i + 2]), ARGV[i + 3]
  if is_done(job_id) then
    remove(entry_id, size)
    count('duplicates', 1)
  elseif deadline_ms and deadline_ms <= now then
    remove(entry_id, size)
    count('dropped:expired', 1)
  else
    wanted[#wanted + 1] = entry_id
  end
end
return {now, wanted}
"""
)

CLAIM = (
    _PRELUDE
    + """
-- Takes over entries whose worker has been silent. ARGV: visibility_ms, cursor, max_jobs, max_deliveries,
-- dead_max_len. Returns the next cursor, the server's time and (entry_id, fields, times_delivered)...
local reply = redis.call('XAUTOCLAIM', stream, group, consumer, ARGV[3], ARGV[4], 'COUNT', ARGV[5])
local max_deliveries, dead_max_len = tonumber(ARGV[6]), ARGV[7]
local now, wanted = now_ms(), {}
if #reply[3] > 0 then count('dropped:expired', #reply[3]) end
for _, entry in ipairs(reply[2]) do
  local job = fields_of(entry)
  local times = redis.call('XPENDING', stream, group, entry[1], entry[1], 1)[1][4]
  local deadline_ms = tonumber(job.deadline_ms)
  if is_done(job.job_id) then
    remove(entry[1], #job.body)
    count('duplicates', 1)
  elseif deadline_ms and deadline_ms <= now then
    remove(entry[1], #job.body)
    count('dropped:expired', 1)
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
    _PRELUDE
    + """
-- ARGV: entry_id, size, job_id, key, token, result, dedup_ttl_ms, result_max_len.
-- Returns 1 when this delivery's result is the one that was stored, 0 when another one was.
local entry_id, size, job_id, token = ARGV[3], ARGV[4], ARGV[5], 'done:' .. ARGV[7]
local known = redis.call('GET', state_key(job_id))
-- why: first, because Redis refuses a script's growing writes when memory is full unless it has freed some.
remove(entry_id, size)
if known == token then return 1 end
if known and string.sub(known, 1, 5) == 'done:' then
  count('duplicates', 1)
  return 0
end
redis.call('SET', state_key(job_id), token, 'PX', ARGV[9])
redis.call('XADD', results, 'MAXLEN', '~', ARGV[10], '*', 'job_id', job_id, 'key', ARGV[6], 'body', ARGV[8])
count('done', 1)
return 1
"""
)

FAIL = (
    _PRELUDE
    + """
-- ARGV: entry_id, times_delivered, max_deliveries, idle_ms (how silent it shall look), reason, dead_max_len.
-- Returns 1 to be delivered again, 0 buried or gone, -1 when another worker has it.
local entry_id, times = ARGV[3], tonumber(ARGV[4])
if not held_by_us(entry_id) then return -1 end
local entry = redis.call('XRANGE', stream, entry_id, entry_id)[1]
if not entry then
  redis.call('XACK', stream, group, entry_id)
  count('dropped:expired', 1)
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

RENEW = (
    _PRELUDE
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
    _PRELUDE
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

SWEEP = (
    _PRELUDE
    + """
-- Forgets workers that left nothing behind. ARGV: idle_ms from which a worker counts as gone.
for _, row in ipairs(redis.call('XINFO', 'CONSUMERS', stream, group)) do
  local info = {}
  for i = 1, #row, 2 do info[row[i]] = row[i + 1] end
  if info.pending == 0 and info.idle > tonumber(ARGV[3]) then
    redis.call('XGROUP', 'DELCONSUMER', stream, group, info.name)
  end
end
return 1
"""
)

STATUS = (
    _PRELUDE
    + """
-- Returns length, pending, dead, age of the oldest entry in ms, and counts as a flat list. Read only.
local oldest = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
local age = 0
if oldest then age = now_ms() - tonumber(string.match(oldest[1], '^%d+')) end
local summary = redis.pcall('XPENDING', stream, group)
local pending = summary.err and 0 or summary[1]
return {redis.call('XLEN', stream), pending, redis.call('XLEN', dead), age, redis.call('HGETALL', counts)}
"""
)
