"""Forms tried out in a process of their own, so that one that takes too much ends this one and no other.

``python -m vlm_engine.trial_process``: frames of `trial` on standard input, a `Vocabulary` and then forms;
for each form a frame with the reason why it is refused, or an empty one. Each is tried out in a fork with
limits of its own: some forms take llguidance hours, and on others its stack overflows.
"""

import os
import random
import resource
import signal
import sys
import threading
import time

import msgspec
from llguidance import LLTokenizer

from vlm_engine.forms import FormError, Vocabulary, new_matcher, new_tokenizer, shortened
from vlm_engine.sampling_params import StructuredOutput
from vlm_engine.trial import read_frame, write_frame

CPU_S = 3.0
WALL_S = 30.0
"""Beside the time of the processor, for a machine that has none to spare."""
ROOM_BYTES = 256 << 20
"""Beside what the vocabulary takes; the engine keeps some dozens of forms."""
STACK_BYTES = 1 << 20
"""Much less than threads have elsewhere, so that what fits here fits there."""
NUM_TOKENS = 12
TOKEN_CPU_S = 0.1
NICENESS = 10
TOO_MUCH = (
    f"it takes more than {CPU_S:.0f} s, {ROOM_BYTES >> 20} MB or a nesting of some hundred levels to compile"
)
TOO_SLOW = f"it takes more than {1e3 * TOKEN_CPU_S:.0f} ms for a token"


def main() -> None:
    """Answer until the input ends."""
    os.nice(NICENESS)
    vocabulary = msgspec.msgpack.decode(read_frame(sys.stdin.buffer) or b"", type=Vocabulary)
    tokenizer = new_tokenizer(vocabulary)
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        wanted = msgspec.msgpack.decode(frame, type=StructuredOutput)
        write_frame(sys.stdout.buffer, _try_apart(tokenizer, wanted))


def _try_apart(tokenizer: LLTokenizer, wanted: StructuredOutput) -> bytes:
    """Why a form is refused, found out in a fork; empty for one that is not."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(ours)
        _limit()
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=lambda: os.write(theirs, _reason(tokenizer, wanted)))
        thread.start()
        thread.join()
        os._exit(0)
    os.close(theirs)
    with open(ours, "rb") as pipe:
        reason = pipe.read()
    _, status = os.waitpid(pid, 0)
    return TOO_MUCH.encode() if status else reason


def _limit() -> None:
    """Have the kernel end this process when it takes too much; nothing of that is worth a word in the log."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in range(3):
        os.dup2(nothing, stream)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":
        with open("/proc/self/statm") as file:
            used = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, used + ROOM_BYTES))
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)


def _reason(tokenizer: LLTokenizer, wanted: StructuredOutput) -> bytes:
    try:
        _walk(tokenizer, wanted)
    except MemoryError:
        return TOO_MUCH.encode()
    # why: llguidance panics at some forms, which is no Exception
    except BaseException as error:
        return str(error).encode()[:1000] or type(error).__name__.encode()
    return b""


def _walk(tokenizer: LLTokenizer, wanted: StructuredOutput) -> None:
    """Compile a form and draw some tokens; raises `FormError`."""
    matcher, draw = new_matcher(tokenizer, wanted), random.Random(0)
    for number in range(NUM_TOKENS):
        started_s = time.thread_time()
        mask = matcher.compute_bitmask()
        # why: the first one is computed where the form is compiled, and no step waits for it
        if number and time.thread_time() - started_s > TOKEN_CPU_S:
            raise FormError(TOO_SLOW)
        if matcher.is_error():
            raise FormError(shortened(matcher.get_error()))
        if matcher.is_stopped():
            return
        place = draw.choice([place for place, byte in enumerate(mask) if byte])
        matcher.consume_token(8 * place + draw.choice([bit for bit in range(8) if mask[place] >> bit & 1]))


if __name__ == "__main__":
    main()
