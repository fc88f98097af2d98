"""The command line. Heavy parts are imported inside the commands: help and mistakes answer at once."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance import __version__

EXIT_PARTIAL = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

Overrides = dict[str, dict[str, Any]]

app = typer.Typer(
    help="Camera pipelines and chat on one vision-language engine.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Speed(StrEnum):
    """How fast recorded video is played."""

    MAX = "max"
    REALTIME = "1x"


ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML settings; without it the bundled demo models are used."),
]
DetectorOption = Annotated[
    str | None,
    typer.Option("--detector", help="YOLO weights: a .pt, .onnx or .tflite file."),
]
VlmOption = Annotated[
    str | None,
    typer.Option("--vlm", help="Vision-language model: a checkpoint folder or a hub name."),
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
            metavar="SOURCE...", help="Videos, images, folders of either, or synthetic://street?frames=100."
        ),
    ],
    config: ConfigOption = None,
    describe: DescribeOption = None,
    prompt: PromptOption = None,
    cooldown: CooldownOption = None,
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
    with _readable_errors():
        settings = _settings(config, overrides)
        from appliance.recordings import find_recordings

        recordings = find_recordings(sources)
        # why: torch comes with this one, and takes seconds that a mistake should not wait for.
        from appliance.replay import ReplayOptions, run_replay

        options = ReplayOptions(realtime=speed is Speed.REALTIME, output=output, save=save)
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
    with _readable_errors():
        settings = _settings(config, overrides)
        from appliance.ports import listen

        with listen(settings.server) as listener:
            # why: torch comes with this one, and takes seconds that a mistake should not wait for.
            from appliance.serve import run_serve

            run_serve(settings, listener)


@app.command()
def ingest(config: ConfigOption = None, detector: DetectorOption = None, redis: RedisOption = None) -> None:
    """Run the vision worker alone: the configured cameras into the Redis of an appliance elsewhere."""
    with _readable_errors():
        settings = _settings(config, {"detector": {"model": detector}, "redis": {"url": redis}})
        from appliance.ingest import run_ingest

        run_ingest(settings)


@app.command()
def chat(
    prompt: Annotated[
        str | None, typer.Argument(help="One question; without it you get a conversation.")
    ] = None,
    url: Annotated[
        str, typer.Option(envvar="APPLIANCE_URL", help="Where the appliance serves.")
    ] = "http://127.0.0.1:8000",
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
    with _readable_errors():
        from appliance.chat import ChatOptions, run_chat

        run_chat(ChatOptions(url, prompt, image, camera, max_tokens, api_key, stats))


@app.command()
def demo(
    config: ConfigOption = None,
    port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes a free one.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=1, help="Stop by itself after this long.")] = None,
) -> None:
    """Show the appliance at work: two cameras described and asked about, live in the terminal."""
    with _readable_errors():
        settings = _settings(config, {"server": {"port": port}})
        from appliance.demo.run import run_demo

        run_demo(settings, seconds)


def _settings(config: Path | None, overrides: Overrides) -> Any:
    from appliance.settings import load_settings

    given = {
        part: {key: value for key, value in values.items() if value is not None}
        for part, values in overrides.items()
    }
    return load_settings(config, {part: values for part, values in given.items() if values})


@contextmanager
def _readable_errors() -> Iterator[None]:
    """Turns the errors a user can cause into one line and an exit code; everything else stays a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except _expected_errors() as error:
        for line in str(error).splitlines():
            typer.echo(f"appliance: {line}", err=True)
        raise typer.Exit(EXIT_USAGE) from None


def _expected_errors() -> tuple[type[Exception], ...]:
    from appliance.client import ClientError
    from appliance.processes import ChildError
    from appliance.settings import SettingsError
    from queues.errors import QueueError
    from vision.errors import VisionError
    from vlm_engine.errors import EngineError

    return (SettingsError, ChildError, ClientError, QueueError, VisionError, EngineError)
