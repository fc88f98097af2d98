"""URLs of servers: what they mean, and what is never said of them (A2)."""

import re

import pytest

from queues import ServerError, parse_address, safe_url

HARD = "p@ss/word?with#every:thing%"
ENCODED = "p%40ss%2Fword%3Fwith%23every%3Athing%25"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://host:6379/0", "redis://host:6379/0"),
        ("redis://:hush@host:6379/0?password=hush", "redis://host:6379/0"),
        ("rediss://doe:hu@sh@host/1", "rediss://host/1"),
        ("redis://:hu/sh@host", "redis://host"),
        ("redis://:hu?sh@host", "redis://(hidden)"),
        ("redis://:hu#sh@host/0", "redis://(hidden)"),
        ("redis://:a@hu?sh@host", "redis://(hidden)"),
        ("redis://host/0?password=hu@sh", "redis://(hidden)"),
        ("redis://doe:hush", "redis://(hidden)"),
        ("unix:///run/a@b.sock?password=hush", "unix:///run/a@b.sock"),
        ("unix://doe:hush@/run/a.sock", "unix:///run/a.sock"),
        ("redis+sentinel://doe:hush@a:1,b/jobs/0?sentinel_password=hush", "redis+sentinel://a:1,b/jobs/0"),
    ],
)
def test_what_is_shown(url: str, shown: str) -> None:
    assert safe_url(url) == shown


def test_a_password_with_every_character() -> None:
    for url in (f"redis://john.doe:{ENCODED}@host:1/2", f"redis+sentinel://john.doe:{ENCODED}@host:1/jobs/2"):
        options = parse_address(url).options
        assert (options["username"], options["password"], options["db"]) == ("john.doe", HARD, 2)
        assert HARD not in repr(parse_address(url))


def test_sentinels() -> None:
    url = (
        "rediss+sentinel://a:1,[::1]:2,c/jobs?sentinel_username=s&sentinel_password=t%26&ssl_ca_certs=/ca%20x"
    )
    address = parse_address(url)
    assert address.sentinels == (("a", 1), ("::1", 2), ("c", 26379))
    assert (address.service, address.is_tls) == ("jobs", True)
    assert address.sentinel_options == {"username": "s", "password": "t&"}
    assert address.options == {"ssl_ca_certs": "/ca x"}


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("redis://:hu?sh@host", "redis://(hidden) cannot be read: it has to be redis://"),
        ("redis://:hu/sh@host", "redis://host cannot be read: it has to be redis://"),
        ("redis://doe:hush", "it has to be redis://"),
        ("redis://host:99999", "it has to be redis://"),
        ("redis://host:0", "it has to be redis://"),
        ("redis://host/jobs", "it has to be redis://"),
        ("redis://host/-1", "it has to be redis://"),
        ("unix://", "it has to be unix:///path"),
        ("redis://host?db=hush", "it has to be redis://"),
        ("redis://host?hush=1", "unknown option hush"),
        ("http://host", "it has to be redis://"),
        ("redis+sentinel://:hush@host", "it has to be redis+sentinel://"),
        ("redis+sentinel://:hush@host/jobs/x", "it has to be redis+sentinel://"),
        ("redis+sentinel://:hush@/jobs", "it has to be redis+sentinel://"),
        ("redis+sentinel://:hush@a,,b/jobs", "it has to be redis+sentinel://"),
        ("redis+sentinel://:hush@a:0/jobs", "it has to be redis+sentinel://"),
    ],
)
def test_what_is_no_address(url: str, problem: str) -> None:
    with pytest.raises(ServerError, match=re.escape(problem)) as caught:
        parse_address(url)
    assert "hush" not in str(caught.value).replace("option hush", "")
    assert caught.value.__cause__ is None
