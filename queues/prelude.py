"""Lua that the queue's scripts share: the books, and the lines in which jobs wait for their turn.

KEYS are always stream, counts, dead letters, results, wake; ARGV starts with group and consumer.

The stream holds the jobs, the consumer group the leases; the lines say whose turn it is. Of each key with
waiting jobs `turns` has the place at which it stands in the round, and `line:<key>` its jobs' places. A place
is a time in microseconds that is never given twice, so that it also tells since when it is held. `loads` has
a key's waiting bytes, `slots` every waiting entry with its slot ('' for none). `wake` tells readers of a put.

invariant: an entry of the stream is in a line or pending, never both; `reindex` puts back what was added to
the stream by others, or whose group is gone.
"""

BOOKS = """
local stream, counts, dead, results, wake = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local group, consumer = ARGV[1], ARGV[2]

-- why: asked once; a script is one moment.
local time
local function now_us()
  time = time or redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function now_ms() return math.floor(now_us() / 1000) end

local function own(name) return '{' .. stream .. '}:' .. name end

local function state_key(job_id) return own('job:' .. job_id) end

local function count(name, number) redis.call('HINCRBY', counts, name, number) end

local function is_done(job_id)
  local state = redis.call('GET', state_key(job_id))
  return state and string.sub(state, 1, 5) == 'done:'
end

local function is_late(job, now)
  local deadline_ms = tonumber(job.deadline_ms)
  return deadline_ms and deadline_ms <= now
end

-- Tells readers of a job that gets no result. Called after its removal: a full memory allows growing then.
local function tell_dropped(job_id, key, reason)
  redis.call('XADD', own('dropped'), 'MAXLEN', '~', 1000, '*', 'job_id', job_id, 'key', key, 'body', reason)
end

local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end

local function entry_of(entry_id) return redis.call('XRANGE', stream, entry_id, entry_id)[1] end

-- why: `0 - size`, since the minus of 0 is '-0' to Redis, which is no integer.
local function remove(entry_id, size)
  redis.call('XACK', stream, group, entry_id)
  if redis.call('XDEL', stream, entry_id) == 1 then count('bytes', 0 - size) end
end

local function bury(entry_id, job, times, reason, max_len)
  remove(entry_id, #job.body)
  redis.call('XADD', dead, 'MAXLEN', '~', max_len, '*', 'job_id', job.job_id, 'key', job.key,
    'times_delivered', times, 'reason', reason, 'created_at', job.created_at, 'body', job.body)
  count('dropped:dead', 1)
  tell_dropped(job.job_id, job.key, 'dead: ' .. reason)
end

local function held_by_us(entry_id)
  return #redis.call('XPENDING', stream, group, entry_id, entry_id, 1, consumer) == 1
end
"""

LINES = (
    BOOKS
    + """
local turns, loads, slots = own('turns'), own('loads'), own('slots')

local function line(key) return own('line:' .. key) end

local function place_after(last)
  -- why: a number becomes text with 14 digits otherwise, and a place has 16.
  return string.format('%.0f', math.max(now_us(), (tonumber(last) or 0) + 1))
end

local function next_place()
  local place = place_after(redis.call('HGET', counts, 'place'))
  redis.call('HSET', counts, 'place', place)
  return place
end

local function join(key, entry_id, size, slot, place)
  redis.call('ZADD', line(key), place, entry_id)
  redis.call('ZADD', turns, 'NX', place, key)
  redis.call('HINCRBY', loads, key, size)
  redis.call('HSET', slots, entry_id, slot)
end

-- Returns whether others of the key still wait.
local function leave(key, entry_id, size)
  redis.call('ZREM', line(key), entry_id)
  redis.call('HDEL', slots, entry_id)
  if redis.call('EXISTS', line(key)) == 1 then
    redis.call('HINCRBY', loads, key, 0 - size)
    return true
  end
  redis.call('ZREM', turns, key)
  redis.call('HDEL', loads, key)
  return false
end

local function drop_waiting(key, entry_id, reason)
  local entry = entry_of(entry_id)
  local job = entry and fields_of(entry)
  local size = job and #job.body or 0
  leave(key, entry_id, size)
  if job then remove(entry_id, size) end
  if job and is_late(job, now_ms()) then reason = 'expired' end
  count('dropped:' .. reason, 1)
  if job then tell_dropped(job.job_id, key, reason) end
  return job, size
end

local function forget_lines()
  for _, key in ipairs(redis.call('ZRANGE', turns, 0, -1)) do redis.call('DEL', line(key)) end
  redis.call('DEL', turns, loads, slots)
end

local function reindex()
  local pending = {}
  for _, row in ipairs(redis.call('XPENDING', stream, group, '-', '+', 1000000)) do pending[row[1]] = true end
  for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do
    if not pending[entry[1]] and redis.call('HEXISTS', slots, entry[1]) == 0 then
      local job = fields_of(entry)
      join(job.key, entry[1], #job.body, job.slot or '', next_place())
    end
  end
end
"""
)
