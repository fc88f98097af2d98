"""The settings of what events are sent to: webhooks and an MQTT broker."""

import re
from typing import Annotated, Literal, Self
from urllib.parse import SplitResult, urlsplit

from pydantic import AfterValidator, Field, SecretStr, model_validator

from appliance.outputs.signing import signing_key
from appliance.settings_part import SettingsPart

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_OWN_HEADERS = {
    "content-length",
    "transfer-encoding",
    "connection",
    "webhook-id",
    "webhook-timestamp",
    "webhook-signature",
}
_TOPIC = re.compile(r"[^#+\s/]+(/[^#+\s/]+)*")

Kinds = tuple[Literal["new", "update", "end", "described", "failed"], ...]


def _check_http(url: SecretStr) -> SecretStr:
    text = url.get_secret_value()
    parts = _split(text)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("must be http:// or https:// and a host")
    # why: httpx takes a while to import, and most settings name no webhook
    import httpx

    try:
        httpx.URL(text)
    except httpx.InvalidURL:
        raise ValueError("is no address: percent-encode what is not letters and digits") from None
    return url


def _split(url: str) -> SplitResult:
    """The URL's parts; raises `ValueError` without a word of it, which may be a secret."""
    try:
        parts = urlsplit(url)
    except ValueError:
        raise ValueError("is no address: check the brackets") from None
    try:
        is_port = parts.port is None or parts.port > 0
    except ValueError:
        is_port = False
    if not is_port:
        raise ValueError("the port must be a number from 1 to 65535")
    return parts


def _check_mqtt(url: str) -> str:
    parts = _split(url)
    if parts.scheme not in {"mqtt", "mqtts"} or not parts.hostname or parts.path.strip("/"):
        raise ValueError("must be mqtt://HOST[:PORT] or mqtts://HOST[:PORT]")
    if parts.username or parts.password:
        raise ValueError("must not hold a user or password: give `username` and `password`")
    return url


def _check_name(name: str) -> str:
    if not _NAME.fullmatch(name) or name == "mqtt":
        raise ValueError("use letters, digits, '-' and '_', and not 'mqtt'")
    return name


def _check_topic(topic: str) -> str:
    if not _TOPIC.fullmatch(topic):
        raise ValueError("must be levels between '/', without spaces, '#' and '+'")
    return topic


def _check_secret(secret: SecretStr | None) -> SecretStr | None:
    if secret is not None and not signing_key(secret.get_secret_value()):
        raise ValueError("must not be empty: leave it out to send unsigned")
    return secret


def _check_headers(headers: dict[str, SecretStr]) -> dict[str, SecretStr]:
    for name, value in headers.items():
        if not re.fullmatch(r"[A-Za-z0-9-]+", name):
            raise ValueError(f"{name!r} is no header name")
        if name.lower() in _OWN_HEADERS:
            raise ValueError(f"{name} is the sender's own: leave it out")
        if not re.fullmatch(r"[ -~]*", value.get_secret_value()):
            raise ValueError(f"the value of {name} must be printable ASCII")
    return headers


def check_output_names(webhooks: "tuple[WebhookSettings, ...]") -> "tuple[WebhookSettings, ...]":
    """The same webhooks; raises `ValueError` when two share a name, by which the outbox knows them."""
    names = [webhook.name for webhook in webhooks]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"two webhooks are called {name!r}: give each a `name` of its own")
    return webhooks


class WhatIsSent(SettingsPart):
    """Which changes (`send`) of which events are sent; without `cameras` or `labels` those of all.

    What is not taken for `give_up_after_s` becomes a dead letter.
    """

    send: Kinds = ("described",)
    cameras: tuple[str, ...] | None = None
    labels: tuple[str, ...] | None = None
    give_up_after_s: float = Field(default=86_400.0, gt=0)


class WebhookSettings(WhatIsSent):
    """One receiver of POSTs; `secret` signs them, `headers` are added. URL and headers may hold secrets."""

    name: Annotated[str, AfterValidator(_check_name)] = "webhook"
    url: Annotated[SecretStr, AfterValidator(_check_http)]
    secret: Annotated[SecretStr | None, AfterValidator(_check_secret)] = None
    headers: Annotated[dict[str, SecretStr], AfterValidator(_check_headers)] = Field(default_factory=dict)
    timeout_s: float = Field(default=10.0, gt=0, le=120)


class MqttSettings(WhatIsSent):
    """A broker: `ca_file` checks an `mqtts://` one by a CA of your own, `snapshots` sends pictures too.

    Topics begin with `prefix`. Home Assistant finds the cameras under `discovery_prefix` (None: do not tell).
    """

    url: Annotated[str, AfterValidator(_check_mqtt)]
    username: str | None = None
    password: SecretStr | None = None
    ca_file: str | None = None
    prefix: Annotated[str, AfterValidator(_check_topic)] = "appliance"
    discovery_prefix: Annotated[str, AfterValidator(_check_topic)] | None = "homeassistant"
    snapshots: bool = True
    timeout_s: float = Field(default=10.0, gt=0, le=120)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.password is not None and self.username is None:
            raise ValueError("password belongs to a user: give `username` too")
        if self.ca_file is not None and not self.url.lower().startswith("mqtts"):
            raise ValueError("ca_file is for TLS: the url has to begin with mqtts://")
        return self


class OutputSettings(SettingsPart):
    """Where events are sent, beside the API."""

    webhooks: Annotated[tuple[WebhookSettings, ...], AfterValidator(check_output_names)] = ()
    mqtt: MqttSettings | None = None

    @property
    def by_name(self) -> dict[str, WhatIsSent]:
        """All outputs by the name under which messages wait for them."""
        mqtt: dict[str, WhatIsSent] = {"mqtt": self.mqtt} if self.mqtt else {}
        return mqtt | {webhook.name: webhook for webhook in self.webhooks}
