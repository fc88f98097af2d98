"""`appliance bench trace` and `explain`: looking into runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.bench.options import (
    ApiKeyOption,
    ChatsOption,
    ChatTokensOption,
    ConcurrencyOption,
    FrameTokensOption,
    ImageOption,
    JsonOption,
    ModelOption,
    PlainOption,
    RateOption,
    SecondsOption,
    SeedOption,
    SetOption,
    StallOption,
    UrlOption,
    WarmUpOption,
    refuse_mixed,
    say,
    seed_of,
    settings_of,
)
from appliance.command_line import ConfigOption, VlmOption, readable_errors

if TYPE_CHECKING:
    from appliance.bench.explain import Question
    from appliance.bench.latency import Run
    from appliance.bench.plan import LoadPlan
    from appliance.settings import Settings

TRACE_STEPS = 50_000


def trace(  # noqa: PLR0913, PLR0917 - one parameter is one option
    url: UrlOption = None,
    model: ModelOption = None,
    api_key: ApiKeyOption = None,
    chats: ChatsOption = 2,
    frame_rate: RateOption = 0.5,
    frame_concurrency: ConcurrencyOption = 0,
    image: ImageOption = "1280x720",
    chat_tokens: ChatTokensOption = 64,
    frame_tokens: FrameTokensOption = 32,
    seconds: SecondsOption = 10.0,
    warm_up: WarmUpOption = 5.0,
    seed: SeedOption = None,
    out: Annotated[Path, typer.Option(help="File for Perfetto or Chrome.")] = Path("trace.json"),
    png: Annotated[Path, typer.Option(help="File for the picture.")] = Path("trace.png"),
    no_png: Annotated[bool, typer.Option("--no-png", help="Draw nothing.")] = False,
    window: Annotated[
        float | None, typer.Option(min=0.01, help="Seconds that the picture shows, around the longest gap.")
    ] = None,
    config: ConfigOption = None,
    vlm: VlmOption = None,
    settings: SetOption = None,
) -> None:
    """What the engine's steps did when: chunked beside one-pass, for Perfetto and as a picture.

    Two engines are started one after the other, yours and one that takes prompts and pictures whole; with
    --url the steps of that appliance are shown, which has to record them (engine.trace_steps).
    """
    with readable_errors():
        from appliance.bench.frontier import check_can_draw
        from appliance.bench.plan import LoadPlan, parse_size
        from appliance.bench.report import check_writable
        from appliance.bench.trace import draw_trace, traced, write_trace

        refuse_mixed(url, model, config, vlm, settings)
        plan = LoadPlan(
            num_chats=chats,
            frame_rate=0.0 if frame_concurrency else frame_rate,
            frame_concurrency=frame_concurrency,
            image_size=parse_size(image),
            chat_tokens=chat_tokens,
            frame_tokens=frame_tokens,
            seconds=seconds,
            warm_up_s=warm_up,
            seed=seed_of(seed),
        )
        check_writable(out)
        if not no_png:
            check_can_draw()
            check_writable(png)
        runs = _trace_runs(url, model, api_key, plan, (config, vlm, settings))
        shown = [traced(name, run) for name, run in runs.items()]
        write_trace(out, shown)
        typer.echo(f"{out}: open it in https://ui.perfetto.dev or chrome://tracing")
        if not no_png:
            draw_trace(shown, png, window)
            typer.echo(f"{png}: the picture")


def _trace_runs(
    url: str | None,
    model: str | None,
    api_key: str | None,
    plan: "LoadPlan",
    given: tuple[Path | None, str | None, list[str] | None],
) -> "dict[str, Run]":
    """The runs to be shown, by their names for people."""
    from appliance.bench.latency import Server, measure_own_engine, measure_server
    from appliance.bench.trace import ONE_PASS_TOKENS

    if url:
        return {url: measure_server(Server(url, model, api_key), plan, say)}
    recording: dict[str, Any] = {"trace_steps": TRACE_STEPS}
    whole = {"scheduler": "static", "max_num_batched_tokens": ONE_PASS_TOKENS}
    engines = {"chunked": settings_of(*given, recording), "one pass": settings_of(*given, recording | whole)}
    return {name: measure_own_engine(engine, plan, say) for name, engine in engines.items()}


def explain(  # noqa: PLR0913, PLR0917 - one parameter is one option
    url: UrlOption = None,
    model: ModelOption = None,
    api_key: ApiKeyOption = None,
    ask: Annotated[str | None, typer.Option(help="Ask this once, and explain that one answer.")] = None,
    picture: Annotated[Path | None, typer.Option(help="A picture to ask about, with --ask.")] = None,
    chats: ChatsOption = 2,
    frame_rate: RateOption = 0.0,
    frame_concurrency: ConcurrencyOption = 0,
    image: ImageOption = "1280x720",
    chat_tokens: ChatTokensOption = 64,
    frame_tokens: FrameTokensOption = 32,
    seconds: SecondsOption = 20.0,
    warm_up: WarmUpOption = 5.0,
    seed: SeedOption = None,
    itl_ms: Annotated[
        float | None,
        typer.Option(min=0.1, help="Milliseconds wanted from token to token; else the engine's."),
    ] = None,
    ttft_ms: Annotated[
        float | None, typer.Option(min=0.1, help="Milliseconds wanted to the first token; else the engine's.")
    ] = None,
    stall_ms: StallOption = 100.0,
    plain: PlainOption = False,
    json: JsonOption = None,
    config: ConfigOption = None,
    vlm: VlmOption = None,
    settings: SetOption = None,
) -> None:
    """Where the time of chats goes, which symptom that shows, and which setting helps.

    An appliance that records its steps (engine.trace_steps; one that is started here does) tells what every
    wait went into; of other servers it is told what can be seen from outside.
    """
    with readable_errors():
        from appliance.bench.errors import BenchError
        from appliance.bench.explain import Question
        from appliance.bench.plan import LoadPlan, parse_size
        from appliance.bench.report import check_writable

        refuse_mixed(url, model, config, vlm, settings)
        if picture and not ask:
            raise BenchError("--picture: give the question with --ask")
        if json:
            check_writable(json)
        plan = LoadPlan(
            num_chats=chats,
            frame_rate=frame_rate,
            frame_concurrency=frame_concurrency,
            image_size=parse_size(image),
            chat_tokens=chat_tokens,
            frame_tokens=frame_tokens,
            seconds=seconds,
            warm_up_s=warm_up,
            seed=seed_of(seed),
            is_plain=plain,
        )
        own = None if url else settings_of(config, vlm, settings, {"trace_steps": TRACE_STEPS})
        server, question = (url or "", model, api_key), Question(ask, picture, chat_tokens) if ask else None
        _tell(_explained_run(own, server, question, plan), own, (itl_ms, ttft_ms), stall_ms, json)


def _tell(
    run: "Run",
    own: "Settings | None",
    wanted_ms: tuple[float | None, float | None],
    stall_ms: float,
    json: Path | None,
) -> None:
    """Explains the run by the times that are wanted (to the next token, to the first), else the engine's."""
    from appliance.bench.explain import explain_run, explain_text
    from appliance.bench.report import write_json
    from vlm_engine import EngineConfig

    engine = own.engine if own else EngineConfig("")
    targets = wanted_ms[0] or engine.chat_itl_ms, wanted_ms[1] or engine.chat_ttft_ms
    told = explain_run(run.recording, run.result["target"]["engine"], targets, stall_ms)
    typer.echo(explain_text(told))
    if json:
        write_json(json, run.result | {"kind": "explain", "explanation": told})


def _explained_run(
    own: "Settings | None",
    server: tuple[str, str | None, str | None],
    question: "Question | None",
    plan: "LoadPlan",
) -> "Run":
    """The run, or the one answer, to be explained: of an engine of one's own, or of a server."""
    from appliance.bench.explain import ask_once
    from appliance.bench.latency import Server, measure_own_engine, measure_server
    from appliance.bench.own_engine import own_engine

    if own is None:
        target = Server(*server)
        return ask_once(target, question) if question else measure_server(target, plan, say)
    if question is None:
        return measure_own_engine(own, plan, say)
    say("starting the engine …")
    with own_engine(own) as engine:
        return ask_once(Server(engine.url), question, own)
