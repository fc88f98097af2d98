"""`bench explain`: a run, or one request, with an account of its time and what would help."""

import asyncio
import base64
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from appliance.bench.accounts import Account, accounts_of
from appliance.bench.errors import BenchError
from appliance.bench.exposition import Growth
from appliance.bench.latency import Run, Server
from appliance.bench.load import Recording
from appliance.bench.machine import environment
from appliance.bench.metrics import gaps_ms, measurements, summary, ttfts_ms
from appliance.bench.report import aligned, shown
from appliance.bench.symptoms import Facts, findings
from appliance.bench.target import Exchange, Target
from appliance.bench.traffic import encoded
from appliance.settings import Settings

_KINDS = {".jpg": "jpeg", ".jpeg": "jpeg", ".png": "png", ".webp": "webp", ".bmp": "bmp", ".gif": "gif"}
_TITLES = (
    ("first", "until the first token"),
    ("following", "from token to token"),
    ("stalls", "of that in stalls"),
)


@dataclass(frozen=True, slots=True)
class Question:
    """One request: a text, perhaps about a picture, and the most tokens of its answer."""

    text: str
    picture: Path | None = None
    max_tokens: int = 64


def explain_run(
    recording: Recording, engine: Mapping[str, Any] | None, targets: tuple[float, float], stall_ms: float
) -> dict[str, Any]:
    """Accounts and findings of a run, ready for JSON.

    `engine` are its settings where they are known, `targets` the milliseconds wanted from token to token and
    to the first token.
    """
    accounts = accounts_of(recording, stall_ms)
    server = measurements(recording)["server"] or {}
    facts = Facts(
        accounts,
        *targets,
        itl_p50_ms=summary(gaps_ms(recording.chats, recording.begin, recording.end))["p50"],
        ttft_p90_ms=summary(ttfts_ms(recording.chats, recording.begin, recording.end))["p90"],
        stalls=server.get("stalls", {}),
        overruns=server.get("overruns", {}),
        num_preemptions=sum(server.get("preemptions", {}).values()),
        scheduler=(engine or {}).get("scheduler") or _scheduler_of(recording),
    )
    return {
        "targets": {"itl_ms": targets[0], "ttft_ms": targets[1], "stall_ms": stall_ms},
        "measured": {"itl_p50_ms": facts.itl_p50_ms, "ttft_p90_ms": facts.ttft_p90_ms},
        "waits": {name: _as_json(getattr(accounts, name)) for name, _ in _TITLES},
        "findings": [asdict(finding) for finding in findings(facts)],
    }


def explain_text(told: Mapping[str, Any]) -> str:
    """An explanation for people."""
    lines: list[str] = []
    for name, title in _TITLES:
        account = told["waits"][name]
        if account["num"]:
            lines += [f"{title}: {account['num']} waits of {shown(account['mean_ms'])} ms on average"]
            rows = [
                [f"  {part}", shown(ms), f"{100 * ms / account['mean_ms']:.0f} %"]
                for part, ms in account["parts_ms"].items()
                if ms >= account["mean_ms"] / 100
            ]
            lines += [*aligned(rows), ""] if rows else [""]
    for finding in told["findings"]:
        share = f"{100 * finding['share']:.0f} %"
        lines += [f"{finding['symptom']}: {finding['cause']} ({share})", f"  what helps: {finding['advice']}"]
    targets, measured = told["targets"], told["measured"]
    if not told["findings"]:
        lines.append("no symptom shows")
    lines.append(
        f"token to token {shown(measured['itl_p50_ms'])} ms (p50), wanted {targets['itl_ms']:g}; "
        f"first token {shown(measured['ttft_p90_ms'])} ms (p90), wanted {targets['ttft_ms']:g}"
    )
    return "\n".join(lines)


def ask_once(server: Server, question: Question, own: Settings | None = None) -> Run:
    """One request and all that the server tells of it, which `own` may have made; raises `BenchError`."""
    body = _body(question)
    return asyncio.run(_ask_once(server, body, asdict(own.engine) if own else None))


async def _ask_once(server: Server, body: dict[str, Any], engine: dict[str, Any] | None) -> Run:
    target = Target(server.url, server.api_key)
    try:
        model = await target.model_name(server.model)
        before = await target.exposition()
        exchange = Exchange(time.perf_counter())
        await target.ask(encoded({"model": model} | body), exchange)
        if exchange.error or not exchange.chunks or exchange.ended_at is None:
            raise BenchError(f"{target.shown_url} did not answer: {exchange.error or 'no token came'}")
        recording = Recording(exchange.due_at, exchange.ended_at, [exchange])
        after = await target.exposition()
        recording.growth = Growth(before, after) if before and after else None
        recording.steps = await target.steps()
    finally:
        await target.close()
    about = {"url": target.shown_url, "model": model, "engine": engine}
    return Run({"target": about, "arguments": {"max_tokens": body["max_tokens"]}} | environment(), recording)


def _body(question: Question) -> dict[str, Any]:
    content: list[dict[str, Any]] = [{"type": "text", "text": question.text}]
    if question.picture is not None:
        content.append({"type": "image_url", "image_url": {"url": _data_uri(question.picture)}})
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": question.max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def _data_uri(picture: Path) -> str:
    kind = _KINDS.get(picture.suffix.lower())
    if kind is None:
        raise BenchError(f"{picture}: unknown kind of picture; give one of {', '.join(_KINDS)}")
    try:
        return f"data:image/{kind};base64,{base64.b64encode(picture.read_bytes()).decode()}"
    except OSError as error:
        raise BenchError(f"{picture}: {error.strerror}") from None


def _scheduler_of(recording: Recording) -> str | None:
    """By whether steps have an allowance in milliseconds; None where no steps are known."""
    if not recording.steps:
        return None
    return "static" if recording.steps[-1].allowance_ms is None else "latency"


def _as_json(account: Account) -> dict[str, Any]:
    """Means a wait, the largest part first."""
    num = max(1, account.num)
    ranked = sorted(account.parts_ms.items(), key=lambda item: -item[1])
    parts = {part: round(ms / num, 2) for part, ms in ranked if ms > 0}
    return {"num": account.num, "mean_ms": round(account.total_ms / num, 2), "parts_ms": parts} | (
        {"queued_ms": round(account.queued_ms / num, 2)} if account.queued_ms else {}
    )
