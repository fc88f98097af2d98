"""The settings of what is kept, and where: the Redis of jobs, the file of events."""

from pathlib import Path
from typing import Self
from urllib.parse import quote, urlencode

from pydantic import Field, SecretStr, model_validator

from appliance.settings_part import SettingsPart

_TLS_FILES = {"ca_file": "ssl_ca_certs", "cert_file": "ssl_certfile", "key_file": "ssl_keyfile"}


class RedisSettings(SettingsPart):
    """`url` of your own Redis or Valkey; None embeds a Valkey.

    `redis://`, `rediss://` (TLS), `unix://`, or `redis+sentinel://host:port,host:port/service/db`. `username`
    and `password` stand here as they are; inside the URL they are percent-encoded. `ca_file` checks a server
    by a CA of your own, `cert_file` and `key_file` show it who we are.
    """

    url: str | None = Field(default=None, repr=False, pattern=r"^(unix|rediss?(\+sentinel)?)://")
    username: str | None = None
    password: SecretStr | None = None
    ca_file: Path | None = None
    cert_file: Path | None = None
    key_file: Path | None = None

    @property
    def address(self) -> str | None:
        """The whole URL, with password and files of TLS in it; None when there is none."""
        if self.url is None:
            return None
        scheme, _, rest = self.url.partition("://")
        user = quote(self.username or "", safe="")
        password = quote(self.password.get_secret_value(), safe="") if self.password else ""
        given = f"{user}:{password}@" if user or password else ""
        files = {option: str(path) for name, option in _TLS_FILES.items() if (path := getattr(self, name))}
        mark = "&" if "?" in rest else "?"
        return f"{scheme}://{given}{rest}{mark + urlencode(files) if files else ''}"

    @model_validator(mode="after")
    def _check(self) -> Self:
        others = [
            name for name in type(self).model_fields if name != "url" and getattr(self, name) is not None
        ]
        if self.url is None:
            if others:
                raise ValueError(f"{others[0]} belongs to a server: give `url` too")
            return self
        self._check_files(self.url)
        if "@" in self.url and (self.username or self.password):
            raise ValueError("a user or password stands in `url` too: give it once")
        # why: redis takes a while to import, and most settings name no server.
        from queues.address import parse_address
        from queues.errors import ServerError

        try:
            parse_address(str(self.address))
        except ServerError as error:
            raise ValueError(str(error)) from None
        return self

    def _check_files(self, url: str) -> None:
        for name in _TLS_FILES:
            path = getattr(self, name)
            if path is None:
                continue
            if not url.startswith("rediss"):
                raise ValueError(f"{name} is for TLS: the url has to begin with rediss")
            if not path.is_file():
                raise ValueError(f"{name}: {path}: no such file")


class EventSettings(SettingsPart):
    """Where events are kept: in the file `path`, or in memory until the end.

    One appliance at a time has the file; it belongs on a local disk, for SQLite's log cannot be shared over a
    network file system.

    Those of the last `retain_days` (None: no limit) stay, the newest `max_events` at most. Over `max_bytes`
    (about) the oldest snapshots go first, then the oldest events. What waits for an output has room of its
    own. None is too old by a clock that jumped within the last day.
    """

    path: Path | None = None
    retain_days: float | None = Field(default=30.0, gt=0)
    max_events: int = Field(default=20_000, ge=1)
    max_bytes: int = Field(default=256 * 2**20, ge=2**20)
