"""`appliance queue …`: how the queue stands, and the jobs that were given up. Exit codes as in `operate`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from appliance.command_line import EXIT_PARTIAL, ConfigOption, load_given, readable_errors
from appliance.operate import (
    AllOption,
    CheckOption,
    JsonOption,
    LetterArgument,
    LimitOption,
    chosen,
    iso_time,
    show_table,
    show_values,
    tell_number,
)

if TYPE_CHECKING:
    from queues import DeadLetter, DeadLetters

queue = typer.Typer(help="The job queue: its state, and the jobs that were given up.", no_args_is_help=True)

RedisOption = Annotated[
    str | None, typer.Option("--redis", help="URL of the Redis; without it that of the settings.")
]
UrlOption = Annotated[
    str | None,
    typer.Option(
        envvar="APPLIANCE_URL", help="A running `serve` whose embedded Valkey is meant, if not the settings'."
    ),
]
MAX_LETTERS = 10_000


@queue.command("status")
def queue_status(
    config: ConfigOption = None,
    redis: RedisOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
    check: CheckOption = False,
) -> None:
    """How many jobs wait, are worked on, were answered, dropped (by reason) or given up."""
    with readable_errors(), _open(config, redis, url) as letters:
        status = letters.status()
    show_values(asdict(status), as_json=as_json)
    if check and status.dead:
        raise typer.Exit(EXIT_PARTIAL)


@queue.command("dead")
def queue_dead(
    config: ConfigOption = None,
    redis: RedisOption = None,
    url: UrlOption = None,
    limit: LimitOption = 100,
    as_json: JsonOption = False,
) -> None:
    """The jobs that were given up, newest first, with the reason and the time."""
    with readable_errors(), _open(config, redis, url) as letters:
        rows = [_row(letter) for letter in letters.newest(limit)]
    show_table(rows, as_json=as_json, nothing="there are no dead letters")


@queue.command("acl")
def queue_acl(config: ConfigOption = None) -> None:
    """What a Redis user of its own has to be allowed, as `ACL SETUSER vision on >SECRET …` takes it."""
    with readable_errors():
        settings = load_given(config, {})
        from appliance import board
        from queues import rules

        wanted = [*rules(settings.queue), f"~{board.KEYS}*", *(f"+{command}" for command in board.COMMANDS)]
    typer.echo(" ".join(dict.fromkeys(wanted)))


@queue.command("retry")
def queue_retry(
    letter: LetterArgument = None,
    config: ConfigOption = None,
    redis: RedisOption = None,
    url: UrlOption = None,
    every: AllOption = False,
) -> None:
    """Put one job back in the queue, or all, as long as there is room; they do not expire."""
    with readable_errors(), _open(config, redis, url) as letters:
        # why: the oldest first, so that they are answered in the order in which they came.
        wanted = _wanted(letters, chosen(letter, every))[::-1]
        tell_number(sum(letters.retry(entry_id) for entry_id in wanted), "put back")


@queue.command("drop")
def queue_drop(
    letter: LetterArgument = None,
    config: ConfigOption = None,
    redis: RedisOption = None,
    url: UrlOption = None,
    every: AllOption = False,
) -> None:
    """Forget one of these jobs, or all."""
    with readable_errors(), _open(config, redis, url) as letters:
        wanted = _wanted(letters, chosen(letter, every))
        tell_number(sum(letters.drop(entry_id) for entry_id in wanted), "dropped")


@contextmanager
def _open(config: Path | None, redis: str | None, url: str | None) -> "Iterator[DeadLetters]":
    settings = load_given(config, {"redis": {"url": redis}})
    address = settings.redis.address or _embedded(url or settings.server.url, settings.server.key)
    from queues import DeadLetters

    with DeadLetters(address, settings.queue) as letters:
        yield letters


def _embedded(url: str, api_key: str | None) -> str:
    """Where the Valkey is that a running appliance has embedded; only its own user may connect there."""
    from appliance.client import ApplianceClient, ClientError

    with ApplianceClient(url, api_key) as client:
        address = client.health().get("queue", {}).get("embedded_url")
    if not isinstance(address, str):
        raise ClientError(f"the appliance at {url} tells no embedded Valkey: give --redis, or its API key")
    return address


def _wanted(letters: "DeadLetters", entry_id: str | None) -> list[str]:
    return [letter.entry_id for letter in letters.newest(MAX_LETTERS)] if entry_id is None else [entry_id]


def _row(letter: "DeadLetter") -> dict[str, Any]:
    return {
        "id": letter.entry_id,
        "time": iso_time(letter.died_at),
        "camera": letter.key,
        "job": letter.job_id,
        "num_tries": letter.times_delivered,
        "reason": letter.reason,
    }
