"""What the engine's process and its client say to each other: msgpack headers, raw tensors."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import torch
from torch import Tensor

from vlm_engine.config import EngineConfig, TurnConfig
from vlm_engine.limits import PromptLimits
from vlm_engine.metrics import EngineStats
from vlm_engine.models import ImageInput, PreparedPrompt
from vlm_engine.request import GenerationRequest, Priority, TokenEvent
from vlm_engine.sampling_params import SamplingParams
from vlm_engine.sequence import Placeholder
from vlm_engine.trace import StepTrace


class Start(msgspec.Struct, frozen=True):
    """First words to a new process, on its standard input."""

    config: EngineConfig
    address: str
    turns: TurnConfig | None = None


class TensorInfo(msgspec.Struct, frozen=True):
    """Shape and element type of a tensor whose bytes come in a frame of their own."""

    dtype: str
    shape: tuple[int, ...]


class WireImage(msgspec.Struct, frozen=True):
    """An image's place, digest and patch grid; its pixels come in a frame of their own."""

    start: int
    length: int
    digest: bytes
    grid: tuple[int, int, int]
    attends_both_ways: bool


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A prepared request; frames: positions, then the pixels of each image."""

    request_id: str
    sampling: SamplingParams
    priority: Priority
    expires_at: float | None
    tenant: str
    wanted_at: float | None
    token_ids: list[int]
    position_delta: int
    images: list[WireImage]
    tensors: list[TensorInfo]
    preprocess_s: float


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End a request."""

    request_id: str


class TraceWanted(msgspec.Struct, frozen=True, tag=True):
    """Tell the steps that were recorded, from `first` on."""

    first: int


class Progress(msgspec.Struct, frozen=True, tag=True):
    """What the process is doing before it is ready, in words."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The model is loaded."""

    limits: PromptLimits
    stats: EngineStats
    dtype: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The model cannot be loaded, or the engine cannot go on; `kind` names the error class."""

    kind: str
    message: str


class Events(msgspec.Struct, frozen=True, tag=True):
    """News of one step."""

    events: list[TokenEvent]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A request that was not queued; `kind` names the error class."""

    request_id: str
    kind: str
    message: str
    field: str | None = None


class Trace(msgspec.Struct, frozen=True, tag=True):
    """Recorded steps from `first` on; None when none are recorded."""

    first: int
    steps: list[StepTrace] | None


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """The loop runs; sent at least twice a second unless a step takes longer.

    `trouble` says why requests fail or do not move all the same.
    """

    stats: EngineStats
    trouble: str | None = None


ToServer = Submit | Abort | TraceWanted
ToClient = Progress | Ready | Failed | Events | Refused | Trace | Heartbeat
Frames = Sequence[Any]
_encoder = msgspec.msgpack.Encoder()
_to_server = msgspec.msgpack.Decoder(ToServer)
_to_client = msgspec.msgpack.Decoder(ToClient)


def encode(message: ToServer | ToClient) -> bytes:
    """A message without tensors as one frame."""
    return _encoder.encode(message)


def decode_to_client(frame: bytes) -> ToClient:
    """A frame from the server."""
    return _to_client.decode(frame)


def decode_to_server(frame: bytes) -> ToServer:
    """The first frame from the client; the others are tensors."""
    return _to_server.decode(frame)


def encode_submit(request: GenerationRequest, prompt: PreparedPrompt, preprocess_s: float) -> list[Any]:
    """A prepared request as frames: a header and one for each tensor, not copied."""
    tensors = [prompt.positions, *(image.pixels for image in prompt.images)]
    pairs = zip(prompt.placeholders, prompt.images, strict=True)
    header = Submit(
        request_id=request.request_id,
        sampling=request.sampling,
        priority=request.priority,
        expires_at=request.expires_at,
        tenant=request.tenant,
        wanted_at=request.wanted_at,
        token_ids=prompt.token_ids,
        position_delta=prompt.position_delta,
        images=[
            WireImage(run.start, run.length, run.digest, image.grid, run.attends_both_ways)
            for run, image in pairs
        ],
        tensors=[TensorInfo(str(t.dtype).removeprefix("torch."), tuple(t.shape)) for t in tensors],
        preprocess_s=preprocess_s,
    )
    return [_encoder.encode(header), *(_bytes_of(tensor) for tensor in tensors)]


def decode_submit(header: Submit, frames: Frames) -> tuple[GenerationRequest, PreparedPrompt]:
    """The request and prompt of a header and its tensors."""
    tensors = [_tensor_of(info, frame) for info, frame in zip(header.tensors, frames, strict=True)]
    runs = tuple(
        Placeholder(im.start, im.length, im.digest, index, attends_both_ways=im.attends_both_ways)
        for index, im in enumerate(header.images)
    )
    images = tuple(ImageInput(t, im.grid) for t, im in zip(tensors[1:], header.images, strict=True))
    request = GenerationRequest(
        header.request_id,
        (),
        header.sampling,
        header.priority,
        header.expires_at,
        header.tenant,
        header.wanted_at,
    )
    return request, PreparedPrompt(header.token_ids, tensors[0], header.position_delta, runs, images)


def narrowed(prompt: PreparedPrompt, dtype: str) -> PreparedPrompt:
    """The prompt with pixels in the model's element type: what the tower reads, mostly half the bytes."""
    images = tuple(replace(image, pixels=image.pixels.to(getattr(torch, dtype))) for image in prompt.images)
    return replace(prompt, images=images)


def _bytes_of(tensor: Tensor) -> memoryview:
    flat: Any = tensor.contiguous().flatten().view(torch.uint8).numpy()
    return memoryview(flat)


def _tensor_of(info: TensorInfo, frame: Any) -> Tensor:
    tensor = torch.empty(info.shape, dtype=getattr(torch, info.dtype))
    # why: copied, because a frame's memory belongs to the socket's library and is not writable
    tensor.flatten().view(torch.uint8).numpy()[:] = memoryview(frame)
    return tensor
