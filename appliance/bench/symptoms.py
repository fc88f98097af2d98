"""From where the time went to what helps: slow first tokens, slow next tokens, stalls."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from appliance.bench.accounts import QUEUED, Account, Accounts

LEAST_SHARE = 0.25
"""A cause that takes less of the time than this is not worth a change."""

STALL_SHARE = 0.02
"""Of the time between tokens; less in long gaps is not felt."""

RECOMPUTED = 0.003
"""Share of a wait from which on it is one for memory that was given back."""

OFTEN = 0.2
"""Of the waits: what happens in fewer of them is not what makes them long."""

FRAMES = ("frame picture", "frame prompt", "frame text")
PROMPTS = ("chat prompt", "chat picture")


@dataclass(frozen=True, slots=True)
class Facts:
    """What the rules go by.

    Args:
        accounts: Where the time went.
        itl_ms: What is wanted from one token to the next, at the median.
        ttft_ms: What is wanted to the first token, at the 90th percentile.
        itl_p50_ms: What was measured; None without a token.
        ttft_p90_ms: The same.
        stalls: Requests that got nothing in a step, by reason, as the server counted them.
        overruns: Pieces given although they did not fit, by kind.
        num_preemptions: Requests sent back to the queue.
        scheduler: ``latency`` or ``static``; None where it is not known.
    """

    accounts: Accounts
    itl_ms: float
    ttft_ms: float
    itl_p50_ms: float | None
    ttft_p90_ms: float | None
    stalls: Mapping[str, int] = field(default_factory=dict)
    overruns: Mapping[str, int] = field(default_factory=dict)
    num_preemptions: int = 0
    scheduler: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """One cause of one symptom: its share of the time, and what helps."""

    symptom: str
    cause: str
    share: float
    advice: str


def findings(facts: Facts) -> list[Finding]:
    """The symptoms that show, each with its causes, the largest first; none when all is as wanted."""
    told: list[Finding] = []
    following, stalls = facts.accounts.following, facts.accounts.stalls
    if facts.ttft_p90_ms is not None and facts.ttft_p90_ms > facts.ttft_ms:
        told += _causes("slow first token", facts.accounts.first, _first_token(facts))
    if facts.itl_p50_ms is not None and facts.itl_p50_ms > facts.itl_ms:
        told += _causes("slow next token", following, _next_token(facts, following))
    if following.total_ms and stalls.total_ms / following.total_ms > STALL_SHARE:
        told += _causes("stalls", stalls, _next_token(facts, stalls))
    return told


Rule = tuple[str, tuple[str, ...], str]


def _causes(symptom: str, account: Account, rules: Iterator[Rule]) -> list[Finding]:
    found = [Finding(symptom, cause, account.share(*parts), advice) for cause, parts, advice in rules]
    large = sorted((f for f in found if f.share >= LEAST_SHARE), key=lambda f: -f.share)
    return large or [Finding(symptom, "many small things", 1.0, "see where the time went")]


def _first_token(facts: Facts) -> Iterator[Rule]:
    """What a first token waits for."""
    reason = max(_SHORT, key=lambda name: facts.stalls.get(name, 0))
    if facts.stalls.get(reason):
        yield _SHORT[reason][0], QUEUED, _SHORT[reason][1]
    else:
        room = "a higher engine.chat_itl_ms, so that steps have room for prompts, or fewer chats at once"
        yield "other chats were computed meanwhile", ("chat text", *PROMPTS), room
        yield "the queue", ("queue",), "fewer chats at once, or another machine"
    yield "frames were computed meanwhile", FRAMES, _against_frames(facts, "engine.chat_ttft_ms")
    pixels = "smaller pictures: an encoder's time grows with the pixels"
    yield "its own picture", ("own picture",), pixels
    prefix = "shorter prompts, equal at the start, so that engine.enable_prefix_caching finds them"
    yield "its own prompt", ("own prompt",), prefix
    yield "preprocessing", ("preprocessing",), "smaller pictures, or more cores beside the engine"
    yield from _ANYWHERE


def _next_token(facts: Facts, account: Account) -> Iterator[Rule]:
    """What a next token waits for."""
    yield "frames were computed in the same steps", FRAMES, _against_frames(facts, "engine.chat_itl_ms")
    yield "prompts of other chats", PROMPTS, _against_prompts(facts)
    faster = (
        "bfloat16, more engine.num_threads, fewer chats (engine.max_num_seqs), or a higher engine.chat_itl_ms"
    )
    memory = f"more engine.kv_cache_tokens: {facts.num_preemptions} requests had to give theirs back"
    if account.share("computed again") >= RECOMPUTED:
        # why: who gave its memory back waits while the others are computed
        yield "prompts were computed again", ("computed again", "chat text"), memory
    else:
        yield "the chats' own decoding", ("chat text",), faster
    yield from _ANYWHERE


_SHORT = {
    "slots": ("all places were taken", "more engine.max_num_seqs"),
    "memory": ("the KV cache was full", "more engine.kv_cache_tokens"),
    "encoder_cache": ("the encoder cache was full", "more engine.encoder_cache_tokens"),
}
_ANYWHERE: tuple[Rule, ...] = (
    (
        "the detector's turns",
        ("detector",),
        "a smaller detector.imgsz, or fewer frames a second (cameras.*.fps)",
    ),
    ("the machine held the engine up", ("held up", "between steps"), "cores that other programs leave alone"),
    ("the way to the client", ("stream",), "look for a proxy that buffers, a slow network, a busy client"),
    (
        "frames were read meanwhile",
        ("while a frame was read",),
        "a server that cuts prompts and pictures into pieces, smaller pictures, or fewer frames at once",
    ),
    ("the server, without frames", ("without a frame",), "fewer chats at once, or a faster server"),
)


def _against_frames(facts: Facts, target: str) -> str:
    if facts.scheduler == "static":
        return "engine.scheduler: latency, or a smaller engine.max_num_batched_tokens"
    number = facts.overruns.get("floor_overruns", 0)
    if number > OFTEN * facts.accounts.following.num:
        return f"a lower engine.background_share: frames got it {number} times without room for it"
    return f"a lower {target}, which frames fill up, or fewer or smaller frames"


def _against_prompts(facts: Facts) -> str:
    if facts.scheduler == "static":
        return "engine.scheduler: latency, or a smaller engine.max_num_batched_tokens"
    if facts.overruns.get("chat_overruns", 0) > OFTEN * facts.accounts.following.num:
        return "a higher engine.chat_ttft_ms: prompts that were due were computed without room for them"
    return "a lower engine.chat_itl_ms, which prompts fill up"
