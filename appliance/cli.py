"""The command line. Heavy parts are imported inside the commands: help and mistakes answer at once."""

import sys
from enum import StrEnum
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated

import typer

from appliance import __version__
from appliance.bench.cli import bench
from appliance.command_line import (
    EXIT_PARTIAL,
    ConfigOption,
    Overrides,
    VlmOption,
    load_checked,
    load_given,
    readable_errors,
)
from appliance.config_cli import config_app
from appliance.heap import leave_garbage
from appliance.models_cli import models
from appliance.operate import outputs
from appliance.operate_queue import queue

app = typer.Typer(
    help="Camera pipelines and chat on one vision-language engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(bench, name="bench")
app.add_typer(config_app, name="config")
app.add_typer(models, name="models")
app.add_typer(outputs, name="outputs")
app.add_typer(queue, name="queue")


DEMO_CONFIG = Path(__file__).parent / "demo" / "demo.yaml"


class Speed(StrEnum):
    """How fast recorded video is played."""

    MAX = "max"
    REALTIME = "1x"


DetectorOption = Annotated[
    str | None,
    typer.Option("--detector", help="YOLO weights: a .pt, .onnx or .tflite file."),
]
RedisOption = Annotated[
    str | None,
    typer.Option("--redis", help="URL of your own Redis or Valkey; an embedded one is started without it."),
]
DescribeOption = Annotated[
    str | None,
    typer.Option("--describe", help="Classes worth a description, for example person,car."),
]
PromptOption = Annotated[
    str | None,
    typer.Option("--prompt", help="What the model is asked about each picture."),
]
CooldownOption = Annotated[
    float | None,
    typer.Option("--cooldown", min=0, help="Seconds of video between two descriptions of one source."),
]


def main() -> None:
    """The `appliance` command."""
    leave_garbage()
    if isinstance(sys.stdout, TextIOWrapper):
        # why: a name of a file may be any bytes, and a terminal may lack letters
        sys.stdout.reconfigure(errors="backslashreplace")
    app()


def _version(value: bool) -> None:
    if value:
        typer.echo(f"appliance {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def replay(  # noqa: PLR0913, PLR0917 - one parameter is one option
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="Videos, images, folders of either, drawn scenes as synthetic://street?frames=100.",
        ),
    ],
    config: ConfigOption = None,
    describe: DescribeOption = None,
    prompt: PromptOption = None,
    cooldown: CooldownOption = None,
    camera: Annotated[
        str | None,
        typer.Option(
            help="Look at it as this camera of the settings does: its zones, filters, triggers, prompt. "
            "Lines and files keep the recording's name."
        ),
    ] = None,
    speed: Annotated[Speed, typer.Option(help="max, or 1x for the speed of the recording.")] = Speed.MAX,
    detector: DetectorOption = None,
    vlm: VlmOption = None,
    redis: RedisOption = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File for one JSON line a description; '-' is standard output."),
    ] = None,
    save: Annotated[
        Path | None, typer.Option(help="Folder for annotated snapshots and an annotated video.")
    ] = None,
) -> None:
    """Run recorded video through detection, tracking and description, one source after the other."""
    overrides: Overrides = {
        "detector": {"model": detector},
        "engine": {"model": vlm},
        "redis": {"url": redis},
        "describe": {"labels": describe, "prompt": prompt, "cooldown_s": cooldown},
    }
    with readable_errors():
        settings = load_given(config, overrides)
        from appliance.recordings import find_recordings

        recordings = find_recordings(sources)
        # why: torch comes with this one, and takes seconds that a mistake should not wait for.
        from appliance.replay import ReplayOptions, run_replay

        options = ReplayOptions(speed is Speed.REALTIME, camera, output, save, config)
        num_failed = run_replay(settings, recordings, options)
    if num_failed:
        raise typer.Exit(EXIT_PARTIAL)


@app.command()
def serve(
    config: ConfigOption = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = None,
    detector: DetectorOption = None,
    vlm: VlmOption = None,
    redis: RedisOption = None,
) -> None:
    """Describe the configured cameras and answer chat over an OpenAI-compatible API, until Ctrl-C."""
    overrides: Overrides = {
        "server": {"host": host, "port": port},
        "detector": {"model": detector},
        "engine": {"model": vlm},
        "redis": {"url": redis},
    }
    with readable_errors():
        settings = load_checked(config, overrides)
        from appliance.ports import listen

        with listen(settings.server) as listener:
            typer.echo("appliance: starting: torch alone takes some seconds …", err=True)
            # why: torch comes with this one, and takes seconds that a mistake should not wait for.
            from appliance.serve import run_serve

            run_serve(settings, listener, load=lambda: load_given(config, overrides))


@app.command()
def ingest(config: ConfigOption = None, detector: DetectorOption = None, redis: RedisOption = None) -> None:
    """Run the vision worker alone: the configured cameras into the Redis of an appliance elsewhere."""
    with readable_errors():
        overrides: Overrides = {"detector": {"model": detector}, "redis": {"url": redis}}
        settings = load_checked(config, overrides, is_worker=True)
        from appliance.ingest import run_ingest

        run_ingest(settings, load=lambda: load_given(config, overrides))


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One question; without it you get a conversation.")
    ] = None,
    config: ConfigOption = None,
    url: Annotated[
        str | None,
        typer.Option(envvar="APPLIANCE_URL", help="Where it serves, if not where the settings say."),
    ] = None,
    image: Annotated[Path | None, typer.Option(help="A picture to ask about.")] = None,
    camera: Annotated[str | None, typer.Option(help="Ask about this camera's newest frame.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    api_key: Annotated[
        str | None, typer.Option(envvar="APPLIANCE_API_KEY", help="Key of the server.")
    ] = None,
    stats: Annotated[
        bool, typer.Option("--stats", help="Show time to first token and between tokens.")
    ] = False,
) -> None:
    """Talk to a running appliance, about a picture or what a camera sees now."""
    with readable_errors():
        server = load_given(config, {}).server
        from appliance.chat import ChatOptions, run_chat

        key = api_key or server.key
        run_chat(ChatOptions(url or server.url, prompt, image, camera, max_tokens, key, stats))


@app.command()
def demo(
    config: Annotated[
        Path,
        typer.Option("--config", "-c", show_default=False, help="YAML settings in place of the demo's own."),
    ] = DEMO_CONFIG,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Stop by itself after this long.")] = None,
) -> None:
    """Show the appliance at work: two cameras described and asked about, live in the terminal."""
    with readable_errors():
        settings = load_checked(config, {"server": {"port": port}})
        from appliance.demo.run import run_demo

        run_demo(settings, seconds)
