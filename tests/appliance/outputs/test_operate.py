"""`appliance outputs …` and the numbers of outputs, beside a store that somebody else has open."""

import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from typer.testing import CliRunner, Result

from appliance import event_schema
from appliance.api.metrics import _Families
from appliance.cli import app
from appliance.events import EventStore
from appliance.metrics import output_families
from tests.appliance.descriptions import description


@pytest.fixture
def config(tmp_path: Path) -> str:
    path = tmp_path / "config.yaml"
    path.write_text(f"events: {{path: {tmp_path / 'events.db'}}}")
    return str(path)


@pytest.fixture
def letters(tmp_path: Path) -> Iterator[EventStore]:
    """A store with two dead letters and a message that waits."""
    with closing(EventStore(tmp_path / "events.db")) as store:
        store.outbox.connect({"webhook": lambda kind, body: True})
        for number in range(3):
            store.add(description(f"{number}"))
        for number in range(2):
            message = store.outbox.next_due("webhook")
            assert message is not None
            store.outbox.failed(message, f"http://a answered 40{number}", None)
        yield store


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["outputs", *arguments])


def test_dead_letters_are_told_put_back_and_dropped(letters: EventStore, config: str) -> None:
    told = json.loads(run("dead", "--json", "-c", config).stdout)
    assert [(letter["event"], letter["reason"]) for letter in told] == [
        ("1", "http://a answered 401"),
        ("0", "http://a answered 400"),
    ]
    assert told[0]["time"].startswith("20")
    lines = run("dead", "-c", config, "--limit", "1").stdout.splitlines()
    assert lines[0].split() == ["id", "time", "output", "event", "kind", "num_tries", "reason"]
    assert lines[1].endswith("http://a answered 401")
    assert len(lines) == 2

    assert run("status", "-c", config, "--check").exit_code == 1
    assert run("retry", f"{told[0]['id']}", "-c", config).stdout == "1 put back\n"
    assert run("retry", f"{told[0]['id']}", "-c", config).exit_code == 1
    assert run("drop", "--all", "-c", config).stdout == "1 dropped\n"
    (status,) = json.loads(run("status", "--json", "-c", config).stdout)
    age_s = status.pop("oldest_age_s")
    assert 0 <= age_s < 60
    assert status == {"output": "webhook", "num_waiting": 2, "num_dead": 0}
    assert run("status", "-c", config, "--check").exit_code == 0
    assert letters.outbox.statuses()["webhook"].num_waiting == 2


@pytest.mark.parametrize("arguments", [("retry",), ("drop", "1", "--all"), ("drop", "one")])
def test_mistakes_are_told(letters: EventStore, config: str, arguments: tuple[str, ...]) -> None:
    result = run(*arguments, "-c", config)
    assert result.exit_code == 2
    assert result.stderr.startswith("appliance: ")
    assert letters.outbox.statuses()["webhook"].num_dead == 2


def test_nothing_is_said_in_words(tmp_path: Path, config: str) -> None:
    EventStore(tmp_path / "events.db").close()
    assert run("status", "-c", config).stdout == "nothing waits for an output, and nothing was given up\n"
    assert run("dead", "-c", config).stdout == "there are no dead letters\n"
    assert run("dead", "-c", config, "--json").stdout == "[]\n"
    assert run("status", "-c", config, "--check").exit_code == 0


@pytest.mark.parametrize("command", [("status",), ("dead",), ("retry", "--all"), ("drop", "--all")])
def test_a_file_that_somebody_else_writes_in(
    letters: EventStore, config: str, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line that says so, when it takes too long."""
    monkeypatch.setattr(event_schema, "BUSY_S", 0.1)
    letters._database.execute("BEGIN EXCLUSIVE")
    result = run(*command, "-c", config)
    letters._database.execute("ROLLBACK")
    if command[0] in ("retry", "drop"):
        assert result.exit_code == 2
        assert result.stderr.startswith("appliance: events.path: ")
        assert "locked" in result.stderr
    assert "Traceback" not in result.output


def test_a_file_that_is_not_there(config: str) -> None:
    result = run("status", "-c", config)
    assert (result.exit_code, "there is no event file" in result.stderr) == (2, True)
    assert run("status").exit_code == 2


def test_metrics(letters: EventStore) -> None:
    registry = CollectorRegistry()
    registry.register(_Families(list(output_families(letters.outbox.statuses()))))
    lines = generate_latest(registry).decode().splitlines()
    assert 'appliance_output_dead{output="webhook"} 2.0' in lines
    assert 'appliance_output_waiting{output="webhook"} 1.0' in lines
    assert 'appliance_output_sent_total{output="webhook"} 0.0' in lines
