"""`appliance bench …`: the commands. What they need is imported inside them, as everywhere here."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.bench import cli_looking
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
from appliance.command_line import EXIT_PARTIAL, ConfigOption, VlmOption, readable_errors

if TYPE_CHECKING:
    from appliance.bench.frontier import Point
    from appliance.bench.latency import Run
    from appliance.bench.plan import LoadPlan
    from appliance.settings import Settings

FRONTIER_FRAMES = 2

bench = typer.Typer(
    help="Measure what chats and camera frames wait for each other, here or on any OpenAI-compatible server.",
    no_args_is_help=True,
)
bench.command()(cli_looking.trace)
bench.command()(cli_looking.explain)


@bench.command()
def latency(  # noqa: PLR0913, PLR0917 - one parameter is one option
    url: UrlOption = None,
    model: ModelOption = None,
    api_key: ApiKeyOption = None,
    chats: Annotated[str, typer.Option(help="Chat streams; 1,2,4 measures each in turn.")] = "2",
    frame_rate: Annotated[str, typer.Option(help="Frames a second, at fixed times; a list as well.")] = "0",
    frame_concurrency: ConcurrencyOption = 0,
    image: Annotated[
        str, typer.Option(help="Size of the frames, width x height; a list as well.")
    ] = "1280x720",
    chat_tokens: ChatTokensOption = 64,
    frame_tokens: FrameTokensOption = 32,
    seconds: SecondsOption = 30.0,
    warm_up: WarmUpOption = 5.0,
    seed: SeedOption = None,
    plain: PlainOption = False,
    frame_priority: Annotated[
        int | None, typer.Option(help="Send this 'priority' with frames, for servers that know it.")
    ] = None,
    stall_ms: StallOption = 100.0,
    json: JsonOption = None,
    config: ConfigOption = None,
    vlm: VlmOption = None,
    settings: SetOption = None,
) -> None:
    """Chat streams and frames: time between tokens, time to the first token, frames a second.

    With lists for --chats, --frame-rate or --image every combination is measured, and told in one table.
    """
    with readable_errors():
        from appliance.bench.errors import BenchError
        from appliance.bench.plan import LoadPlan
        from appliance.bench.report import check_writable
        from appliance.bench.sweep import plans_of

        base = LoadPlan(
            num_chats=1,
            frame_concurrency=frame_concurrency,
            chat_tokens=chat_tokens,
            frame_tokens=frame_tokens,
            seconds=seconds,
            warm_up_s=warm_up,
            seed=seed_of(seed),
            is_plain=plain,
            frame_priority=frame_priority,
            stall_ms=stall_ms,
        )
        plans = plans_of(base, chats, frame_rate, image)
        refuse_mixed(url, model, config, vlm, settings)
        if not url and frame_priority is not None:
            raise BenchError("--frame-priority is for a server that runs: give its --url")
        if json:
            check_writable(json)
        with _measuring(url, model, api_key, config, vlm, settings) as measure:
            results = _swept(plans, measure, json)
    if any(result["errors"]["num"] for result in results):
        raise typer.Exit(EXIT_PARTIAL)


def _swept(
    plans: "list[LoadPlan]", measure: "Callable[[LoadPlan], Run]", json: Path | None
) -> list[dict[str, Any]]:
    """Measures one plan after the other, writes what is there so far, and tells it at the end."""
    from appliance.bench.report import latency_text, write_json
    from appliance.bench.sweep import run_sweep, sweep_text

    for sweep in run_sweep(plans, measure, say):
        if json:
            write_json(json, sweep if len(plans) > 1 else sweep["results"][0])
    results: list[dict[str, Any]] = sweep["results"]
    typer.echo(sweep_text(sweep) if len(plans) > 1 else latency_text(results[0]))
    return results


@bench.command()
def compare(
    results: Annotated[
        list[Path], typer.Argument(metavar="A.json B.json...", help="Results of bench latency.")
    ],
) -> None:
    """Results side by side, with ratios to the first."""
    with readable_errors():
        from appliance.bench.report import compare_text, read_result

        typer.echo(compare_text([path.stem for path in results], [read_result(path) for path in results]))


@bench.command()
def frontier(  # noqa: PLR0913, PLR0917 - one parameter is one option
    chat_itl_ms: Annotated[
        str, typer.Option(help="Targets of the latency scheduler to measure, milliseconds.")
    ] = "40,60,90,150",
    token_budgets: Annotated[
        str, typer.Option(help="Token budgets of the static scheduler to measure.")
    ] = "256,512,2048",
    chats: ChatsOption = 2,
    frame_rate: RateOption = 0.0,
    frame_concurrency: ConcurrencyOption = 0,
    image: ImageOption = "1280x720",
    chat_tokens: ChatTokensOption = 64,
    frame_tokens: FrameTokensOption = 32,
    seconds: SecondsOption = 30.0,
    warm_up: WarmUpOption = 5.0,
    seed: SeedOption = None,
    png: Annotated[Path, typer.Option(help="File for the picture.")] = Path("frontier.png"),
    no_png: Annotated[bool, typer.Option("--no-png", help="Draw nothing.")] = False,
    json: JsonOption = None,
    config: ConfigOption = None,
    vlm: VlmOption = None,
    settings: SetOption = None,
) -> None:
    """What chat pays for frames: `latency` against a fresh engine for every setting, drawn as one picture.

    Without --frame-rate there are always two frames on their way, so that frames take what chat leaves.
    """
    with readable_errors():
        from appliance.bench.frontier import points_of
        from appliance.bench.plan import LoadPlan, parse_numbers, parse_size

        plan = LoadPlan(
            num_chats=chats,
            frame_rate=frame_rate,
            frame_concurrency=frame_concurrency or (0 if frame_rate else FRONTIER_FRAMES),
            image_size=parse_size(image),
            chat_tokens=chat_tokens,
            frame_tokens=frame_tokens,
            seconds=seconds,
            warm_up_s=warm_up,
            seed=seed_of(seed),
        )
        points = points_of(
            parse_numbers(chat_itl_ms, "--chat-itl-ms"), parse_numbers(token_budgets, "--token-budgets")
        )
        # why: a setting that cannot be is told now, not before the last point.
        engines = [settings_of(config, vlm, settings, point.overrides) for point in points]
        _sweep(points, engines, plan, json or png.with_suffix(".json"), None if no_png else png)


def _sweep(
    points: "list[Point]", engines: "list[Settings]", plan: "LoadPlan", json: Path, png: Path | None
) -> None:
    """Measures every point with its engine, keeps the file up to date, and shows them all."""
    from appliance.bench.frontier import check_can_draw, draw_frontier, frontier_text, run_frontier
    from appliance.bench.latency import measure_own_engine
    from appliance.bench.report import check_writable, write_json

    check_writable(json)
    if png:
        check_can_draw()
        check_writable(png)
    for result in run_frontier(
        points, engines, lambda engine: measure_own_engine(engine, plan, say).result, say
    ):
        write_json(json, result)
    typer.echo(frontier_text(result))
    if png:
        draw_frontier(result, png)


@contextmanager
def _measuring(
    url: str | None,
    model: str | None,
    api_key: str | None,
    config: Path | None,
    vlm: str | None,
    assignments: list[str] | None,
) -> "Iterator[Callable[[LoadPlan], Run]]":
    """What runs a load: against the server at `url`, or against one fresh engine."""
    from appliance.bench.latency import Server, engine_to_measure, measure_server

    if url:
        yield lambda plan: measure_server(Server(url, model, api_key), plan, say)
    else:
        with engine_to_measure(settings_of(config, vlm, assignments), say) as measure:
            yield measure
