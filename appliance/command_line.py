"""What every command of the command line shares: options, settings, and how mistakes are told."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from appliance.tasks import SignalError

EXIT_PARTIAL = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130
EXIT_SIGNAL = 128

Overrides = dict[str, dict[str, Any]]

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", help="YAML settings; without it the bundled demo models are used."),
]
VlmOption = Annotated[
    str | None,
    typer.Option("--vlm", help="Vision-language model: a checkpoint folder or a hub name."),
]


def load_given(config: Path | None, overrides: Overrides) -> Any:
    """The settings of `config` under those `overrides` that are not None; raises `SettingsError`."""
    from appliance.settings import load_settings

    return load_settings(config, _given(overrides))


def load_checked(config: Path | None, overrides: Overrides, *, is_worker: bool = False) -> Any:
    """The same, looked at closely: what a start would meet later is told now; raises `SettingsError`.

    With `is_worker` only what cameras need is looked at.
    """
    from appliance.settings_check import ALL_CHECKS, CAMERA_CHECKS, load_checked

    checks = CAMERA_CHECKS if is_worker else ALL_CHECKS
    return load_checked(
        config, _given(overrides), checks, lambda text: typer.echo(f"appliance: {text}", err=True)
    )


def _given(overrides: Overrides) -> dict[str, Any]:
    given = {
        part: {key: value for key, value in values.items() if value is not None}
        for part, values in overrides.items()
    }
    return {part: values for part, values in given.items() if values}


@contextmanager
def readable_errors() -> Iterator[None]:
    """Turns the errors a user can cause into one line and an exit code; everything else stays a traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(EXIT_INTERRUPTED) from None
    except SignalError as error:
        typer.echo(f"appliance: {error}", err=True)
        raise typer.Exit(EXIT_SIGNAL + error.number) from None
    except _expected_errors() as error:
        from vision.readable import readable

        for line in readable(str(error)).splitlines():
            typer.echo(f"appliance: {line}", err=True)
        raise typer.Exit(EXIT_USAGE) from None


def _expected_errors() -> tuple[type[Exception], ...]:
    from appliance.bench.errors import BenchError
    from appliance.client import ClientError
    from appliance.processes import ChildError
    from appliance.settings import SettingsError
    from queues.errors import QueueError
    from vision.errors import VisionError
    from vlm_engine.errors import EngineError

    return (SettingsError, ChildError, ClientError, BenchError, QueueError, VisionError, EngineError)
