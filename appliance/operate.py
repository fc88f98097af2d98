"""`appliance outputs …`: look at what is owed to webhooks and MQTT, and at what nobody took.

Exit codes: 0 done, 1 there was nothing to do it to (or `--check` found something), 2 it could not be done.
"""

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.command_line import EXIT_PARTIAL, EXIT_USAGE, ConfigOption, load_given, readable_errors

if TYPE_CHECKING:
    from appliance.outputs.outbox import Message, Outbox

outputs = typer.Typer(help="What is owed to webhooks and MQTT, and what was given up.", no_args_is_help=True)

JsonOption = Annotated[bool, typer.Option("--json", help="JSON for programs.")]
CheckOption = Annotated[bool, typer.Option("--check", help="Exit code 1 when there are dead letters.")]
LimitOption = Annotated[int, typer.Option(min=1, max=10_000, help="At most so many, the newest.")]
AllOption = Annotated[bool, typer.Option("--all", help="All of them.")]
LetterArgument = Annotated[
    str | None, typer.Argument(metavar="[ID]", help="One dead letter, as `dead` tells it.")
]


@outputs.command("status")
def outputs_status(
    config: ConfigOption = None, as_json: JsonOption = False, check: CheckOption = False
) -> None:
    """How many messages wait for each output, and how many were given up."""
    with readable_errors(), _open_outbox(config) as outbox:
        statuses = {name: asdict(status) for name, status in outbox.statuses().items()}
    for status in statuses.values():
        # why: these two are the sending process's own; `/metrics` tells them.
        del status["num_sent"], status["num_overflowed"]
    rows = [{"output": name} | status for name, status in statuses.items()]
    show_table(rows, as_json=as_json, nothing="nothing waits for an output, and nothing was given up")
    if check and any(status["num_dead"] for status in statuses.values()):
        raise typer.Exit(EXIT_PARTIAL)


@outputs.command("dead")
def outputs_dead(config: ConfigOption = None, limit: LimitOption = 100, as_json: JsonOption = False) -> None:
    """The dead letters, newest first, with the reason and the time of the event's change."""
    with readable_errors(), _open_outbox(config) as outbox:
        letters = outbox.dead(limit)
    show_table([_letter(letter) for letter in letters], as_json=as_json, nothing="there are no dead letters")


@outputs.command("retry")
def outputs_retry(
    letter: LetterArgument = None, config: ConfigOption = None, every: AllOption = False
) -> None:
    """Send one dead letter again, or all; a running `serve` takes up to 30 s to see it."""
    with readable_errors(), _open_outbox(config) as outbox:
        tell_number(outbox.retry(_number(letter, every)), "put back")


@outputs.command("drop")
def outputs_drop(
    letter: LetterArgument = None, config: ConfigOption = None, every: AllOption = False
) -> None:
    """Forget one dead letter, or all."""
    with readable_errors(), _open_outbox(config) as outbox:
        tell_number(outbox.drop(_number(letter, every)), "dropped")


def chosen(letter: str | None, every: bool) -> str | None:
    """The id of the one letter that is meant, None for all; anything else ends the command."""
    if (letter is None) != every:
        typer.echo("appliance: give the ID of one dead letter, or --all", err=True)
        raise typer.Exit(EXIT_USAGE)
    return letter


def tell_number(number: int, what: str) -> None:
    """Say how many it were; none is exit code 1."""
    typer.echo(f"{number} {what}")
    if number == 0:
        raise typer.Exit(EXIT_PARTIAL)


def show_table(rows: Sequence[Mapping[str, Any]], *, as_json: bool, nothing: str) -> None:
    """Rows with the same keys: a JSON list, or columns for people; without rows these read `nothing`."""
    if as_json:
        typer.echo(json.dumps(rows))
        return
    if not rows:
        typer.echo(nothing)
        return
    lines = [tuple(rows[0]), *(tuple(_shown(value) for value in row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        typer.echo("  ".join(map(str.ljust, line, widths)).rstrip())


def show_values(values: Mapping[str, Any], *, as_json: bool) -> None:
    """Names and values: a JSON object, or a line each for people, with the items of a table behind a dot."""
    if as_json:
        typer.echo(json.dumps(values))
        return
    for name, value in values.items():
        is_table = isinstance(value, dict) and value
        items = {f"{name}.{key}": item for key, item in value.items()} if is_table else {name: value}
        for key, item in items.items():
            typer.echo(f"{key}: {_shown(item)}")


def iso_time(seconds: float) -> str:
    """Unix seconds as local time with its offset."""
    return datetime.fromtimestamp(seconds).astimezone().isoformat(timespec="seconds")


@contextmanager
def _open_outbox(config: Path | None) -> "Iterator[Outbox]":
    from appliance.events import EventStore, EventStoreError
    from appliance.settings import SettingsError

    path = load_given(config, {}).events.path
    if path is None or not path.exists():
        raise SettingsError(f"events.path: {path or 'is not set'}: there is no event file to look into")
    try:
        store = EventStore(path)
    except EventStoreError as error:
        raise SettingsError(f"events.path: {error}") from None
    try:
        with closing(store):
            yield store.outbox
    except sqlite3.Error as error:
        raise SettingsError(f"events.path: {path}: cannot be used now: {error}") from None


def _letter(letter: "Message") -> dict[str, Any]:
    return {
        "id": letter.id,
        "time": iso_time(letter.created_at),
        "output": letter.output,
        "event": letter.event_id,
        "kind": letter.kind,
        "num_tries": letter.num_tries,
        "reason": letter.error,
    }


def _number(letter: str | None, every: bool) -> int | None:
    text = chosen(letter, every)
    if text is not None and not (text.isascii() and text.isdecimal()):
        typer.echo(f"appliance: {text}: the ID of a dead letter is a number", err=True)
        raise typer.Exit(EXIT_USAGE)
    return None if text is None else int(text)


def _shown(value: Any) -> str:
    if value is None or value == {}:
        return "none"
    return f"{value:.1f}" if isinstance(value, float) else " ".join(str(value).split())
