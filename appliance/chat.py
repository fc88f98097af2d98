"""`appliance chat`: one question or a conversation with a running appliance, over HTTP."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from appliance.client import (
    ApplianceClient,
    ChatTimes,
    ClientError,
    Message,
    percentile,
    read_image,
    user_message,
)
from vision.readable import readable


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What was asked for: the server, one `prompt` or None for a conversation, a picture or a camera."""

    url: str
    prompt: str | None
    image: Path | None
    camera: str | None
    max_tokens: int
    api_key: str | None
    is_stats_wanted: bool


def run_chat(options: ChatOptions) -> None:
    """Asks and prints until there is nothing more to ask; raises `ClientError`."""
    if options.image and options.camera:
        raise ClientError("--image and --camera: choose one of them")
    for what, text in (("the question", options.prompt), ("--camera", options.camera)):
        if text and readable(text) != text:
            raise ClientError(f"{what} is no UTF-8, as text to a server has to be: {text}")
    with ApplianceClient(options.url, options.api_key) as client:
        model, history = client.model_name(), list[Message]()
        for question in _questions(options):
            history.append(user_message(question, _picture(client, options, is_first=not history)))
            history.append(_answer(client, model, history, options))


def _questions(options: ChatOptions) -> Iterator[str]:
    """The one question of the command line, or each line that is typed (or piped in) until the input ends."""
    if options.prompt is not None:
        yield options.prompt
        return
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("Ask something; an empty line or Ctrl-D ends.", file=sys.stderr)
    while True:
        try:
            line = input("> " if is_terminal else "").strip()
        except EOFError:
            return
        if line:
            yield line
        elif is_terminal:
            return


def _picture(client: ApplianceClient, options: ChatOptions, *, is_first: bool) -> tuple[str, bytes] | None:
    """A picture goes with the first question; a camera is looked at again for every one."""
    if options.camera:
        return "image/jpeg", client.newest_frame(options.camera)
    return read_image(options.image) if options.image and is_first else None


def _answer(client: ApplianceClient, model: str, history: list[Message], options: ChatOptions) -> Message:
    times, pieces = ChatTimes(), list[str]()
    for piece in client.stream_chat(history, model=model, max_tokens=options.max_tokens, times=times):
        pieces.append(piece)
        print(piece, end="", flush=True)
    print()
    if options.is_stats_wanted:
        gaps = times.itl_ms
        print(
            f"first text after {times.ttft_ms:.0f} ms, then every {percentile(gaps, 0.5):.0f} ms "
            f"(p99 {percentile(gaps, 0.99):.0f} ms, {len(times.piece_times)} pieces)",
            file=sys.stderr,
        )
    return {"role": "assistant", "content": "".join(pieces)}
