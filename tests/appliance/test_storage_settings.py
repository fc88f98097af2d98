"""The settings of Redis: one URL of all that is given, and mistakes that are told without a password (A2)."""

from pathlib import Path

import pytest

from appliance.settings import Settings, SettingsError, load_settings, to_json

HARD = "p@ss/word?with#every:thing%"
ENCODED = "p%40ss%2Fword%3Fwith%23every%3Athing%25"


def load(folder: Path, redis: str) -> Settings:
    path = folder / "config.yaml"
    path.write_text(f"redis: {redis}")
    return load_settings(path)


def test_one_address_of_all_parts(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("")
    settings = load(
        tmp_path,
        f"{{url: 'rediss+sentinel://a,b:1/jobs/2?sentinel_password=s', username: john.doe, "
        f"password: '{HARD}', ca_file: '{tmp_path}/ca.pem'}}",
    )
    assert settings.redis.address == (
        f"rediss+sentinel://john.doe:{ENCODED}@a,b:1/jobs/2?sentinel_password=s"
        f"&ssl_ca_certs={str(tmp_path).replace('/', '%2F')}%2Fca.pem"
    )
    assert HARD not in repr(settings)
    assert "sentinel_password" not in repr(settings)
    assert Settings.model_validate_json(to_json(settings)).redis.address == settings.redis.address
    assert load(tmp_path, "{url: 'redis://a'}").redis.address == "redis://a"
    assert load(tmp_path, "{}").redis.address is None


@pytest.mark.parametrize(
    ("redis", "problem"),
    [
        ("{url: 'http://hush'}", "redis.url: "),
        ("{url: 'redis://:hu?sh@a'}", "the server's URL redis://(hidden) cannot be read"),
        ("{url: 'redis://:hush/hush@a'}", "cannot be read"),
        ("{url: 'redis://doe:hush@a', password: hush}", "a user or password stands in `url` too"),
        ("{password: hush}", "redis.password: belongs to a server: give `url` too"),
        ("{url: 'redis://a', ca_file: x.pem}", "redis.ca_file: is for TLS"),
        ("{url: 'rediss://a', ca_file: nowhere.pem}", "nowhere.pem: no such file"),
        ("{url: 'redis://a/0?hush=hush'}", "has an unknown option"),
    ],
)
def test_mistakes_are_told_without_a_password(tmp_path: Path, redis: str, problem: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load(tmp_path, redis)
    text = str(caught.value)
    assert problem in text
    assert "hush" not in text.replace("option hush", "")
