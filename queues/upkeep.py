"""Lua scripts that look after the queue beside the jobs' way through it; as in `queues.scripts`."""

from queues.prelude import BOOKS, LINES

PERMIT = (
    LINES
    + """
-- Says what the jobs of a key have to have as their `permit` from now on, and drops those that wait without.
-- ARGV: key, permit, is_again. Returns how many were dropped. What is said again changes no newer word.
local key, permit, withdrawn = ARGV[3], ARGV[4], 0
if ARGV[5] == '1' and redis.call('HEXISTS', permits, key) == 1 then return 0 end
-- why: a full memory allows growing after that.
redis.call('HDEL', permits, key)
redis.call('HSET', permits, key, permit)
for _, entry_id in ipairs(redis.call('ZRANGE', line(key), 0, -1)) do
  local entry = entry_of(entry_id)
  if entry and is_withdrawn(fields_of(entry)) then
    drop_waiting(key, entry_id, 'withdrawn')
    withdrawn = withdrawn + 1
  end
end
return withdrawn
"""
)


REVIVE = (
    LINES
    + """
-- Queues a dead letter's job again, last in its line and without a deadline, and forgets the letter.
-- ARGV: entry_id among the dead, max_len, max_bytes, dedup_ttl_ms.
-- Returns 1 queued or answered by now, 0 no such letter, -1 no room.
local letter = redis.call('XRANGE', dead, ARGV[3], ARGV[3])[1]
if not letter then return 0 end
local job = fields_of(letter)
if is_done(job.job_id) then
  redis.call('XDEL', dead, letter[1])
  count('duplicates', 1)
  return 1
end
local length = redis.call('XLEN', stream)
if length == 0 then
  redis.call('HSET', counts, 'bytes', 0)
  forget_lines()
end
local bytes = tonumber(redis.call('HGET', counts, 'bytes') or 0) + #job.body
if length > 0 and (length + 1 > tonumber(ARGV[4]) or bytes > tonumber(ARGV[5])) then return -1 end
local created_at = job.created_at or string.match(letter[1], '^%d+') / 1000
redis.call('SET', state_key(job.job_id), 'revived:' .. letter[1], 'PX', ARGV[6])
local entry_id = redis.call('XADD', stream, '*', 'job_id', job.job_id, 'key', job.key, 'slot', '',
  'created_at', created_at, 'expires_at', '', 'deadline_ms', '', 'num_replaced', 0,
  'permit', job.permit or '')
redis.call('SET', body_key(entry_id), job.body)
redis.call('XDEL', dead, letter[1])
-- invariant: what was put is done, dropped, waiting or pending: the letter was dropped, and this is put.
count('put', 1)
count('bytes', #job.body)
count(load(job.key), #job.body)
join(job.key, entry_id, '', next_place())
return 1
"""
)


SWEEP = (
    BOOKS
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
    LINES
    + """
-- Returns length, pending, dead, age of the oldest entry in ms, counts as a flat list, and by key (name,
-- number of waiting jobs, ms that the first has waited for its turn)..., and why the server takes nothing
-- now, '' when it does. Changes nothing.
local now, age, waiting = now_ms(), 0, {}
local oldest = redis.call('XRANGE', stream, '-', '+', 'COUNT', 1)[1]
if oldest then age = now - tonumber(string.match(oldest[1], '^%d+')) end
local summary = redis.pcall('XPENDING', stream, group)
local pending = summary.err and 0 or summary[1]
for _, key in ipairs(redis.call('ZRANGE', turns, 0, -1)) do
  local head = redis.call('ZRANGE', line(key), 0, 0, 'WITHSCORES')
  waiting[#waiting + 1] = {key, redis.call('ZCARD', line(key)), math.floor(now - tonumber(head[2]) / 1000)}
end
local length, num_dead = redis.call('XLEN', stream), redis.call('XLEN', dead)
-- why: a server that is full, or cannot save, still reads; to add nothing to no key leaves none behind.
local added = redis.pcall('SETRANGE', own('probe'), 0, '')
local refusal = type(added) == 'table' and added.err or ''
return {length, pending, num_dead, age, redis.call('HGETALL', counts), waiting, refusal}
"""
)


FORGET = (
    LINES
    + """
-- Deletes all that the queue keeps, but for the ids of its jobs, which expire.
forget_lines()
for _, entry in ipairs(redis.call('XRANGE', stream, '-', '+')) do redis.call('DEL', body_key(entry[1])) end
redis.call('DEL', own('told'), own('dropped'), permits, unpack(KEYS))
return 1
"""
)
