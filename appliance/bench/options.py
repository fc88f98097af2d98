"""What the benchmarks' commands share: options, settings, how they speak."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from appliance.settings import Settings

UrlOption = Annotated[
    str | None, typer.Option(help="Server to measure; without it an engine is started for the run.")
]
ModelOption = Annotated[str | None, typer.Option(help="Model to ask there; without it the first one.")]
ApiKeyOption = Annotated[str | None, typer.Option(envvar="APPLIANCE_API_KEY", help="Key of the server.")]
ChatsOption = Annotated[int, typer.Option(min=0, help="Chat streams, each asks again when it is answered.")]
RateOption = Annotated[float, typer.Option(min=0, help="Frames a second, at fixed times as from cameras.")]
ConcurrencyOption = Annotated[int, typer.Option(min=0, help="Frames at once, the next when one is answered.")]
ImageOption = Annotated[str, typer.Option(help="Size of the frames in pixels, width x height.")]
ChatTokensOption = Annotated[int, typer.Option(min=2, help="Tokens of a chat's answer.")]
FrameTokensOption = Annotated[int, typer.Option(min=1, help="Tokens of a frame's answer.")]
SecondsOption = Annotated[float, typer.Option(min=0.1, help="How long to measure.")]
WarmUpOption = Annotated[float, typer.Option(min=0, help="Seconds of the same load before that.")]
SeedOption = Annotated[
    int | None,
    typer.Option(
        min=0, help="Seed of texts and pictures; without it a new one, since caches know old prompts."
    ),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting of the engine that is started, as in engine.scheduler=static."),
]
PlainOption = Annotated[bool, typer.Option("--plain", help="Send only fields of OpenAI's protocol.")]
StallOption = Annotated[float, typer.Option(min=1, help="Milliseconds above which a gap is a stall.")]
JsonOption = Annotated[
    Path | None, typer.Option("--json", help="File for all numbers, and where they were got.")
]


def settings_of(
    config: Path | None,
    vlm: str | None,
    assignments: list[str] | None,
    engine: dict[str, Any] | None = None,
) -> "Settings":
    """The settings with `assignments` over the file's, over them `vlm` and what a point sets."""
    from appliance.bench.overrides import overrides_of
    from appliance.settings import load_settings

    overrides = overrides_of(assignments or ())
    model = {"model": vlm} if vlm else {}
    overrides["engine"] = {**overrides.get("engine", {}), **model, **(engine or {})}
    return load_settings(config, {part: given for part, given in overrides.items() if given != {}})


def refuse_mixed(
    url: str | None,
    model: str | None,
    config: Path | None,
    vlm: str | None,
    assignments: list[str] | None,
) -> None:
    """Raises `BenchError` when options for a server that runs stand beside those for one that is started."""
    from appliance.bench.errors import BenchError

    if url and (config or vlm or assignments):
        raise BenchError("--config, --vlm and --set are for an engine that is started: leave out --url")
    if not url and model:
        raise BenchError("--model is for a server that runs: give its --url")


def seed_of(given: int | None) -> int:
    """The seed given, or one of the clock's."""
    return time.time_ns() // 1_000_000 % 2**31 if given is None else given


def say(line: str) -> None:
    """Tells how far things are, beside the result."""
    typer.echo(line, err=True)
