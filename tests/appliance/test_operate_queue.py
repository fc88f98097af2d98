"""`appliance queue …` against a real server; test_serve.py looks at an embedded one."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest
from typer.testing import CliRunner, Result

from appliance.board import MAX_ASKED, AskedTooOftenError, BoardReader, BoardWriter
from appliance.cli import app
from appliance.jobs import CameraStatus
from queues import EmbeddedServer, Job, JobConsumer, JobProducer, QueueConfig, connect, rules

CONFIG = QueueConfig()


@pytest.fixture(scope="module")
def server() -> Iterator[EmbeddedServer]:
    with EmbeddedServer() as server:
        yield server


@pytest.fixture
async def _two_letters(server: EmbeddedServer) -> None:
    """Jobs `a` and `b` of the camera `yard`, given up after three tries."""
    with JobProducer(server.url, CONFIG) as producer:
        async with JobConsumer(server.url, CONFIG) as consumer:
            for name in "ab":
                producer.put(Job(name, "yard", b"body", created_at=1.0))
                (delivery,) = await consumer.take(1, 10_000)
                await consumer.fail(replace(delivery, times_delivered=3), f"no {name}\nfor me")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["queue", *arguments])


async def test_a_user_with_what_is_told_may_all_that_the_board_does(server: EmbeddedServer) -> None:
    """`test_permissions.py` tells the same of the queue."""
    told = run("acl").stdout.split()
    url = server.url.replace("unix://", "unix://vision:hush@")
    with connect(server.url, CONFIG) as client:
        client.execute_command("ACL", "SETUSER", "vision", "reset", "on", ">hush", *told)
        client.acl_log_reset()
        writer, reader = BoardWriter(url), BoardReader(url, ("yard",))
        writer.write_frame("yard", b"jpeg")
        writer.write_status(CameraStatus(name="yard", state="running", updated_at=1.0))
        frame = await reader.frame("yard")
        assert frame is not None
        assert frame.jpeg == b"jpeg"
        assert (await reader.statuses())[0].state == "running"
        assert await reader.going_on({"event": "yard"}) == {"event"}
        ids = [await reader.ask("yard") for _ in range(MAX_ASKED)]
        with pytest.raises(AskedTooOftenError):
            await reader.ask("yard")
        assert writer.watched(["yard"]) == {"yard"}
        assert writer.take_asked(["yard"]) == {"yard": ids[0]}
        writer.forget_frame("yard")
        assert await reader.frame("yard") is None
        writer.close()
        await reader.close()
        assert {entry["object"] for entry in client.acl_log()} <= {"client|setinfo"}


def test_a_user_who_lacks_something_is_told_what(server: EmbeddedServer) -> None:
    with connect(server.url, CONFIG) as client:
        client.execute_command(
            "ACL", "SETUSER", "vision", "reset", "on", ">hush", *rules(CONFIG), "-rename", "-copy"
        )
    result = run("status", "--redis", server.url.replace("unix://", "unix://vision:hush@"))
    assert result.exit_code == 2
    assert "lacks what the queue needs: +copy +rename: add it with ACL SETUSER" in result.stderr
    assert "hush" not in result.stderr


@pytest.mark.usefixtures("_two_letters")
def test_letters_are_told_put_back_and_dropped(server: EmbeddedServer) -> None:
    there = ("--redis", server.url)
    rows = json.loads(run("dead", "--json", *there).stdout)
    assert [(row["job"], row["camera"], row["reason"], row["num_tries"]) for row in rows] == [
        ("b", "yard", "no b\nfor me", 3),
        ("a", "yard", "no a\nfor me", 3),
    ]
    lines = run("dead", "--limit", "1", *there).stdout.splitlines()
    assert lines[0].split() == ["id", "time", "camera", "job", "num_tries", "reason"]
    assert lines[1].endswith("yard    b    3          no b for me")

    assert run("status", "--check", *there).exit_code == 1
    assert run("retry", rows[1]["id"], *there).stdout == "1 put back\n"
    result = run("retry", rows[1]["id"], *there)
    assert (result.stdout, result.exit_code) == ("0 put back\n", 1)
    assert run("drop", "--all", *there).stdout == "1 dropped\n"
    status = json.loads(run("status", "--json", *there).stdout)
    assert (status["depth"], status["dead"], status["dropped"]) == (1, 0, {"dead": 2})
    assert run("status", "--check", *there).exit_code == 0
    assert "dropped.dead: 2\n" in run("status", *there).stdout


def test_a_status_for_people_has_what_the_one_for_programs_has() -> None:
    with EmbeddedServer() as server:
        programs = json.loads(run("status", "--json", "--redis", server.url).stdout)
        people = run("status", "--redis", server.url).stdout.splitlines()
    assert [line.split(":")[0] for line in people] == list(programs)
    assert {"dropped: none", "waiting: none", "refusal: none"} <= set(people)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("retry", "--redis", "URL"), "give the ID of one dead letter, or --all"),
        (("drop", "1-0", "--all", "--redis", "URL"), "give the ID of one dead letter, or --all"),
        (("drop", "one", "--redis", "URL"), "'one' is no ID of a dead letter"),
        (("status", "--redis", "redis://:hush@127.0.0.1:9"), "redis://127.0.0.1:9 cannot be reached"),
        (("status", "--redis", "redis://:hu?sh@a"), "cannot be read"),
        (("status", "--url", "http://127.0.0.1:9"), "no appliance answers at http://127.0.0.1:9"),
    ],
)
def test_mistakes_are_told(server: EmbeddedServer, arguments: tuple[str, ...], problem: str) -> None:
    result = run(*(server.url if argument == "URL" else argument for argument in arguments))
    assert result.exit_code == 2, result.output
    assert problem in result.stderr
    assert result.stderr.startswith("appliance: ")
    assert "hush" not in result.output
