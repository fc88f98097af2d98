"""What load to put on a server, and for how long."""

from dataclasses import dataclass

from appliance.bench.errors import BenchError


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """One run's load.

    `num_chats` streams ask one question after the other. Frames come every 1 / `frame_rate` seconds whatever
    the server does, as cameras send them, or `frame_concurrency` at once, the next when one is answered.
    `image_size` is (width, height) in pixels. What happens in the first `warm_up_s` is not measured, the
    `seconds` after it are. A `plain` run sends none of the fields that OpenAI's protocol does not have, and
    `frame_priority` is sent with frames to servers that know a `priority`. Gaps over `stall_ms` are stalls.

    Raises `BenchError` when there is no load, or two kinds of frames.
    """

    num_chats: int = 2
    frame_rate: float = 0.0
    frame_concurrency: int = 0
    image_size: tuple[int, int] = (1280, 720)
    chat_tokens: int = 64
    frame_tokens: int = 32
    seconds: float = 30.0
    warm_up_s: float = 5.0
    seed: int = 0
    is_plain: bool = False
    frame_priority: int | None = None
    stall_ms: float = 100.0

    def __post_init__(self) -> None:
        if self.frame_rate and self.frame_concurrency:
            raise BenchError("--frame-rate and --frame-concurrency: choose one of them")
        if not (self.num_chats or self.has_frames):
            raise BenchError("no load: give --chats, --frame-rate or --frame-concurrency")

    @property
    def has_frames(self) -> bool:
        """Whether frames are sent at all."""
        return bool(self.frame_rate or self.frame_concurrency)


def parse_size(text: str) -> tuple[int, int]:
    """(width, height) of a text like `1280x720`; raises `BenchError`."""
    width, _, height = text.lower().partition("x")
    if not (
        width.isdecimal() and height.isdecimal() and 16 <= int(width) <= 8192 and 16 <= int(height) <= 8192
    ):
        raise BenchError(f"--image {text}: write width x height in pixels, 16 to 8192 each, as in 1280x720")
    return int(width), int(height)


def parse_numbers(text: str, option: str) -> list[float]:
    """The numbers of a list like `40,60,90`; raises `BenchError` that names the `option`."""
    try:
        numbers = [float(part) for part in text.split(",") if part.strip()]
    except ValueError:
        numbers = [-1.0]
    if not all(number > 0 for number in numbers):
        raise BenchError(f"{option} {text}: write numbers above 0 with commas between, as in 40,60,90")
    return numbers
