"""What a user of the server needs for a queue: the commands, also those of scripts, and the keys."""

import re
from collections.abc import Sequence

from queues import scripts, upkeep
from queues.address import safe_url
from queues.config import QueueConfig
from queues.errors import ServerRefuses

_SENT = (
    *("evalsha", "script|load", "info", "multi", "exec", "set", "del", "getdel", "mget", "hget"),
    *("xadd", "xread", "xrevrange", "xdel", "xgroup|create", "select"),
)
_CALL = re.compile(r"redis\.p?call\('(\w+)'(?:, '([A-Z]+)')?")
_WITH_SUBCOMMANDS = ("XGROUP", "XINFO")


def _called() -> set[str]:
    texts = [value for module in (scripts, upkeep) for name, value in vars(module).items() if name.isupper()]
    calls = [call for text in texts for call in _CALL.findall(text)]
    return {(f"{name}|{sub}" if name in _WITH_SUBCOMMANDS else name).lower() for name, sub in calls}


COMMANDS: tuple[str, ...] = tuple(sorted({*_SENT, *_called()}))
"""Every command that a queue's clients send and its scripts call, as `ACL SETUSER` names them."""

CHECK = """
-- Has no KEYS, for the user may have none. ARGV: stream, then commands. Returns the keys that the user may
-- not use, and the commands; nothing where the server cannot tell.
local stream = ARGV[1]
local keys, commands = {}, {}
local may = redis.acl_check_cmd or function() return true end
local others = {evalsha = {'-', '1', stream}, xread = {'STREAMS', stream, '0'}}

-- Whether the user may call a command on the stream.
-- why: Redis 8 raises an error for another number of words than the command takes, others do not count them;
-- what no number suits, the server does not have.
local function may_call(name)
  local words = {}
  for word in string.gmatch(name, '[^|]+') do words[#words + 1] = word end
  for _, word in ipairs(others[name] or {stream}) do words[#words + 1] = word end
  for _ = 1, 8 do
    local is_asked, is_allowed = pcall(may, unpack(words))
    if is_asked then return is_allowed end
    words[#words + 1] = stream
  end
  local is_asked, is_allowed = pcall(may, name)
  return is_asked and is_allowed
end

for _, key in ipairs({stream, '{' .. stream .. '}:any'}) do
  -- why: this command is allowed, as it runs.
  if not may('evalsha', '-', '1', key) then keys[#keys + 1] = key end
end
for i = 2, #ARGV do
  if not may_call(ARGV[i]) then commands[#commands + 1] = ARGV[i] end
end
return {keys, commands}
"""


def rules(config: QueueConfig) -> list[str]:
    """What `ACL SETUSER` has to allow: keys (also of queues whose names begin so) and commands."""
    return [f"~{config.stream}*", f"~{{{config.stream}*", *(f"+{command}" for command in COMMANDS)]


def check_permissions(reply: Sequence[Sequence[bytes]], url: str) -> None:
    """Raise `ServerRefuses` that names what is missing, by the CHECK script's reply."""
    keys, commands = ([name.decode() for name in names] for names in reply)
    # why: who may not use the keys may use no command on them.
    missing = [f"~{key.removesuffix('any') + '*' if key.startswith('{') else key}" for key in keys] or [
        f"+{command}" for command in commands
    ]
    if missing:
        raise ServerRefuses(
            f"the user at {safe_url(url)} lacks what the queue needs: {' '.join(missing)}: "
            "add it with ACL SETUSER (`appliance queue acl` tells all)"
        )
