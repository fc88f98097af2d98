"""Whether a form can be compiled and followed in time, asked before anything of the engine touches it."""

import subprocess
import sys
import weakref
from contextlib import suppress
from functools import lru_cache
from typing import IO

import msgspec

from vlm_engine.errors import EngineStopped, RequestError
from vlm_engine.forms import BYTES, FormError, Vocabulary
from vlm_engine.sampling_params import StructuredOutput

SIZE_BYTES = 4


class FormTrial:
    """Tries forms out in a process of its own (`trial_process`), started when it is first needed.

    For one thread at a time.

    Args:
        vocabulary: What the model can say.
    """

    def __init__(self, vocabulary: Vocabulary = BYTES) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None

    def check(self, wanted: StructuredOutput) -> None:
        """Refuse what cannot be compiled or followed, or not in some seconds.

        Raises:
            FormError: It says why.
            EngineStopped: There is no process to try it out.
        """
        try:
            reason = self._ask(wanted)
        except OSError as error:
            self.close()
            raise EngineStopped(f"forms cannot be tried out now: {error}") from None
        if reason:
            raise FormError(reason)

    def start(self) -> "subprocess.Popen[bytes]":
        """Start the process unless it runs; raises `OSError`."""
        if self._process is not None:
            return self._process
        command = [sys.executable, "-m", "vlm_engine.trial_process"]
        # why: a session of its own keeps the terminal's Ctrl-C with the parent; it ends with its input
        process = self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
        )
        self._end = weakref.finalize(self, _end, process)
        assert process.stdin is not None
        write_frame(process.stdin, msgspec.msgpack.encode(self._vocabulary))
        return process

    def close(self) -> None:
        """End the process; the next check starts another."""
        if self._process is not None:
            self._end()
            self._process = None

    def _ask(self, wanted: StructuredOutput) -> str:
        process = self.start()
        assert process.stdin is not None
        assert process.stdout is not None
        write_frame(process.stdin, msgspec.msgpack.encode(wanted))
        answer = read_frame(process.stdout)
        if answer is None:
            raise OSError("their process has ended")
        return answer.decode(errors="replace")


def check_grammar(wanted: StructuredOutput) -> None:
    """Refuse what no model could follow; needs neither tokenizer nor torch.

    Raises:
        RequestError: It names the field of the request.
        EngineStopped: There is no process to try it out.
    """
    reason = _refusal(wanted)
    if reason is not None:
        raise refused(wanted, reason)


def refused(wanted: StructuredOutput, reason: str) -> RequestError:
    """The error that tells why a form cannot be had."""
    return RequestError(
        f"{wanted.field} cannot be compiled: {reason}; change it or leave it out", field=wanted.field
    )


@lru_cache(maxsize=64)
def _refusal(wanted: StructuredOutput) -> str | None:
    """Why a form could be followed by no model, None if one could; takes about half a second.

    Raises:
        EngineStopped: There is no process to try it out.
    """
    trial = FormTrial()
    try:
        trial.check(wanted)
    except FormError as error:
        return str(error)
    finally:
        trial.close()
    return None


def write_frame(stream: IO[bytes], frame: bytes) -> None:
    """Write a frame and its size."""
    stream.write(len(frame).to_bytes(SIZE_BYTES, "little") + frame)
    stream.flush()


def read_frame(stream: IO[bytes]) -> bytes | None:
    """The next frame; None when the stream ends."""
    size = stream.read(SIZE_BYTES)
    if len(size) < SIZE_BYTES:
        return None
    frame = stream.read(count := int.from_bytes(size, "little"))
    return frame if len(frame) == count else None


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    with suppress(OSError), process:
        pass
