"""Real MQTT brokers on loopback: mosquitto where it is installed, and amqtt, which comes from PyPI."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.appliance.running import until
from tests.ports import free_port

_SBIN = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/usr/local/sbin"))
_AMQTT = """
listeners:
  default: {{type: tcp, bind: "127.0.0.1:{port}"}}
plugins:
  amqtt.plugins.authentication.AnonymousAuthPlugin: {{allow_anonymous: true}}
"""


class Broker:
    """One broker; `start` and `kill` it as often as wanted. It keeps its port and nothing else."""

    def __init__(self, kind: str, folder: Path, user: str = "", password: str = "") -> None:
        self.kind, self.port = kind, free_port()
        self._folder, self._user, self._password = folder, user, password
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"mqtt://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = self._mosquitto() if self.kind == "mosquitto" else self._amqtt()
        with (self._folder / "broker.log").open("ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        until(self._is_listening)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def _is_listening(self) -> bool:
        assert self._process
        assert self._process.poll() is None, (self._folder / "broker.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def _mosquitto(self) -> list[str]:
        lines = [f"listener {self.port} 127.0.0.1", f"allow_anonymous {'false' if self._user else 'true'}"]
        if self._user:
            passwords = self._folder / "passwords"
            tool = shutil.which("mosquitto_passwd", path=_SBIN)
            assert tool
            subprocess.run(
                [tool, "-b", "-c", str(passwords), self._user, self._password],
                check=True,
                capture_output=True,
            )
            lines.append(f"password_file {passwords}")
        config = self._folder / "mosquitto.conf"
        config.write_text("\n".join([*lines, "user root", ""]))
        program = shutil.which("mosquitto", path=_SBIN)
        assert program
        return [program, "-c", str(config)]

    def _amqtt(self) -> list[str]:
        config = self._folder / "amqtt.yaml"
        config.write_text(_AMQTT.format(port=self.port))
        code = "from amqtt.scripts.broker_script import main; main()"
        return [sys.executable, "-W", "ignore", "-c", code, "-c", str(config)]


def usual_kind() -> str:
    """The broker that most tests use: mosquitto where it is installed."""
    return "mosquitto" if shutil.which("mosquitto", path=_SBIN) else "amqtt"


def skip_without(kind: str) -> None:
    """Skip the test when there is no such broker here."""
    if kind == "mosquitto" and not shutil.which("mosquitto", path=_SBIN):
        pytest.skip("mosquitto is not installed")
    if kind == "amqtt":
        pytest.importorskip("amqtt", reason="amqtt is not installed")
