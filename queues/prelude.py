"""Lua that the queue's scripts share: the books, and the lines in which jobs wait for their turn.

KEYS are always stream, counts, dead letters, results; ARGV starts with group and consumer.

The stream holds the jobs, `body:<entry id>` the body of each, the consumer group the leases; the lines say
whose turn it is. Of each key with waiting jobs `turns` has the place at which it stands in the round,
`line:<key>` its jobs' places, and `load:<key>` in counts their bytes. A place is a time in microseconds that
is never given twice, so that it also tells since when it is held. `slots` has every waiting entry with its
slot ('' for none). `permits` has what the jobs of some keys have to have as their permit.

why: a body is a key of its own because Lua copies what passes it several times, plain commands do not.

invariant: an entry of the stream is in a line or pending, never both; `reindex` puts back what was added to
the stream by others, or whose group is gone. A body is there as long as its entry, and `bytes` in counts is
the size of all of them: they come and go in one step.
"""

BOOKS = """
local stream, counts, dead, results = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local group, consumer = ARGV[1], ARGV[2]

-- why: asked once; a script is one moment.
local time
local function now_us()
  time = time or redis.call('TIME')
  return time[1] * 1000000 + time[2]
end

local function now_ms() return math.floor(now_us() / 1000) end

local function own(name) return '{' .. stream .. '}:' .. name end

local permits = own('permits')

local function state_key(job_id) return own('job:' .. job_id) end

local function body_key(entry_id) return own('body:' .. entry_id) end

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

-- Whether its key's jobs have to have another permit by now.
local function is_withdrawn(job)
  local permit = redis.call('HGET', permits, job.key)
  return permit and permit ~= (job.permit or '')
end

local function fields_of(entry)
  local fields = {}
  for i = 1, #entry[2], 2 do fields[entry[2][i]] = entry[2][i + 1] end
  return fields
end

local function entry_of(entry_id) return redis.call('XRANGE', stream, entry_id, entry_id)[1] end

-- An entry that others added has its body inside; returns whether there is one at all.
local function has_body(entry_id, job)
  if job.body and redis.call('SETNX', body_key(entry_id), job.body) == 1 then count('bytes', #job.body) end
  return redis.call('EXISTS', body_key(entry_id)) == 1
end

-- Forgets an entry, which may be gone already, and its body; returns the size of that.
-- why: `0 - size`, since the minus of 0 is '-0' to Redis, which is no integer.
local function remove(entry_id)
  local size = redis.call('STRLEN', body_key(entry_id))
  redis.call('XACK', stream, group, entry_id)
  redis.call('XDEL', stream, entry_id)
  if redis.call('DEL', body_key(entry_id)) == 1 then count('bytes', 0 - size) end
  return size
end

local function bury(entry_id, job, times, reason, max_len)
  local body = redis.call('GET', body_key(entry_id)) or ''
  remove(entry_id)
  redis.call('XADD', dead, 'MAXLEN', '~', max_len, '*', 'job_id', job.job_id, 'key', job.key,
    'times_delivered', times, 'reason', reason, 'created_at', job.created_at, 'permit', job.permit or '',
    'body', body)
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
local turns, slots = own('turns'), own('slots')

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

local function load(key) return 'load:' .. key end

-- The caller counts the load.
local function join(key, entry_id, slot, place)
  redis.call('ZADD', line(key), place, entry_id)
  redis.call('ZADD', turns, 'NX', place, key)
  redis.call('HSET', slots, entry_id, slot)
end

-- Returns whether others of the key still wait.
local function leave(key, entry_id)
  redis.call('ZREM', line(key), entry_id)
  redis.call('HDEL', slots, entry_id)
  if redis.call('EXISTS', line(key)) == 1 then
    count(load(key), 0 - redis.call('STRLEN', body_key(entry_id)))
    return true
  end
  redis.call('ZREM', turns, key)
  redis.call('HDEL', counts, load(key))
  return false
end

local function drop_waiting(key, entry_id, reason)
  local entry = entry_of(entry_id)
  local job = entry and fields_of(entry)
  leave(key, entry_id)
  local size = remove(entry_id)
  if job and is_late(job, now_ms()) then reason = 'expired' end
  count('dropped:' .. reason, 1)
  if job then tell_dropped(job.job_id, key, reason) end
  return job, size
end

-- For a stream without any entry: those that waited are gone, and with them what is left of them.
local function forget_lines()
  for _, key in ipairs(redis.call('ZRANGE', turns, 0, -1)) do
    for _, entry_id in ipairs(redis.call('ZRANGE', line(key), 0, -1)) do
      redis.call('DEL', body_key(entry_id))
      count('dropped:expired', 1)
    end
    redis.call('DEL', line(key))
    redis.call('HDEL', counts, load(key))
  end
  redis.call('DEL', turns, slots)
end

-- Why an entry that others added is no job; nil for one that is.
local function fault_of(job)
  for _, name in ipairs({'job_id', 'key', 'created_at', 'expires_at'}) do
    if not job[name] then return 'it has no field ' .. name end
  end
  -- why: Lua takes more for a number than workers do
  local function is_time(text) return string.match(text, '^[0-9.eE+-]+$') and tonumber(text) end
  if not is_time(job.created_at) then return 'its created_at is no number' end
  if job.expires_at ~= '' and not is_time(job.expires_at) then return 'its expires_at is no number' end
  if not string.match(job.num_replaced or '0', '^%d+$') then return 'its num_replaced is no number' end
end

local function bury_stranger(entry_id, job, fault, max_len)
  job.job_id, job.key, job.created_at = job.job_id or entry_id, job.key or '', job.created_at or '0'
  has_body(entry_id, job)
  bury(entry_id, job, 0, 'not a job: ' .. fault, max_len)
end

local function reindex(dead_max_len)
  local pending = {}
  for _, row in ipairs(redis.call('XPENDING', stream, group, '-', '+', 1000000)) do pending[row[1]] = true end
  for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do
    if not pending[entry[1]] and redis.call('HEXISTS', slots, entry[1]) == 0 then
      local job = fields_of(entry)
      local fault = fault_of(job)
      if fault then
        bury_stranger(entry[1], job, fault, dead_max_len)
      else
        has_body(entry[1], job)
        join(job.key, entry[1], job.slot or '', next_place())
        count(load(job.key), redis.call('STRLEN', body_key(entry[1])))
      end
    end
  end
end
"""
)
