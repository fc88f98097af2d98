"""Who gets in: keys, names of this machine, pages from elsewhere."""

from collections.abc import Iterator

import httpx
import openai
import pytest
from openai import OpenAI
from pydantic import SecretStr

from appliance.api import UnsafeBindingError, create_app
from appliance.api.access import check_binding
from appliance.events import EventStore
from appliance.settings import ServerSettings
from tests.appliance.api.serving import MODEL, Running, Servers, two_cameras

KEY = "s3cret"
PATHS = [
    "/v1/models",
    "/v1/cameras",
    "/v1/events",
    "/v1/cameras/street/frame.jpg",
    "/openapi.json",
    "/metrics",
    "/nothing",
]


@pytest.fixture(scope="module")
def locked(servers: Servers) -> Iterator[Running]:
    running = servers.start(api_key=KEY)
    yield running
    servers.stop(running)


@pytest.mark.parametrize(
    "authorization", [None, "Bearer wrong", "Bearer", "Basic s3cret", "s3cret", "Bearer schlüssel"]
)
@pytest.mark.parametrize("path", PATHS)
def test_without_the_key_nothing_is_told(locked: Running, path: str, authorization: str | None) -> None:
    headers = {"Authorization": authorization.encode()} if authorization else {}
    reply = httpx.get(locked.url + path, headers=headers)
    assert reply.status_code == 401
    assert reply.json()["error"]["code"] == "invalid_api_key"
    assert reply.headers["www-authenticate"] == "Bearer"


def test_with_the_key(locked: Running) -> None:
    with OpenAI(base_url=locked.base_url, api_key=KEY, max_retries=0) as client:
        assert client.models.list().data[0].id == MODEL
    with (
        OpenAI(base_url=locked.base_url, api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="an API key is needed"),
    ):
        client.models.list()


def test_a_key_may_have_any_letters(servers: Servers) -> None:
    running = servers.start(api_key="schlüssel")
    try:
        for key, status in (("schlüssel", 200), ("schlussel", 401)):
            headers = {"Authorization": f"Bearer {key}".encode()}
            assert httpx.get(f"{running.url}/v1/models", headers=headers).status_code == status
    finally:
        servers.stop(running)


def test_what_is_open_tells_no_details(locked: Running) -> None:
    """A load balancer may ask for health, a browser gets the page that asks for the key."""
    health = httpx.get(f"{locked.url}/health")
    assert health.status_code == 200
    assert health.json() == {"status": "ok"}
    assert "engine" in httpx.get(f"{locked.url}/health", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert httpx.get(locked.url).status_code == 200
    assert httpx.get(f"{locked.url}/assets/app.js").status_code == 200
    assert httpx.get(f"{locked.url}/assets/../v1/models").status_code == 401
    assert httpx.get(f"{locked.url}/assets/%2e%2e/settings.py").status_code == 404


def test_with_a_key_any_name_of_the_server_will_do(locked: Running) -> None:
    headers = {
        "Authorization": f"Bearer {KEY}",
        "Host": "camera-box.example",
        "Origin": "https://else.example",
    }
    assert httpx.get(f"{locked.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "127.0.0.1.evil.example"},
        {"Host": "localhost@evil.example"},
        {"Host": ""},
        {"Host": "[::"},
        {"Host": "[localhost]"},
        {"Host": "127.0.0.1", "Origin": "http://[::"},
        {"Origin": "https://evil.example"},
        {"Origin": "null"},
    ],
)
def test_without_a_key_other_pages_stay_out(server: Running, headers: dict[str, str]) -> None:
    for path in ("/", "/health", "/v1/cameras/street/frame.jpg"):
        reply = httpx.get(server.url + path, headers=headers)
        assert reply.status_code == 403
        assert reply.json()["error"]["code"] == "foreign_host"


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:8000"},
        {"Host": "[::1]:8000"},
        {"Host": "127.1.2.3"},
        {"Origin": "http://localhost:3000"},
    ],
)
def test_without_a_key_this_machine_gets_in(server: Running, headers: dict[str, str]) -> None:
    assert httpx.get(f"{server.url}/v1/models", headers=headers).status_code == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "", "192.168.1.5", "camera-box", "localhost.example"])
def test_a_network_needs_a_key(host: str, servers: Servers) -> None:
    with pytest.raises(UnsafeBindingError, match=r"set server\.api_key"):
        check_binding(ServerSettings(host=host))
    with pytest.raises(UnsafeBindingError):
        check_binding(ServerSettings(host=host, api_key=SecretStr("")))
    check_binding(ServerSettings(host=host, api_key=SecretStr(KEY)))
    with pytest.raises(UnsafeBindingError):
        create_app(servers.engine, EventStore(), two_cameras(), ServerSettings(host=host))


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1", "[::1]", "LOCALHOST"])
def test_this_machine_needs_none(host: str) -> None:
    check_binding(ServerSettings(host=host))
