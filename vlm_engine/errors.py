"""What can go wrong in the engine, as one tree.

::

    EngineError
    ├── RequestError            a request that can never run; `field` names the part of it
    │   ├── PromptTooLong       more tokens than the model or the KV cache holds
    │   └── ImageRejected       an image that cannot be read or encoded
    ├── ModelLoadError          a checkpoint that cannot be loaded
    │   ├── UnsupportedModel    a family without an adapter
    │   └── NotEnoughMemory     a checkpoint that does not fit beside its caches
    ├── EngineBusy              too much of what comes seldom waits; the same request may succeed later
    ├── GateError               detectors cannot be let in to share the device
    └── EngineStopped           the engine was closed or its loop died
        └── EngineBroken        its steps fail, or move nothing; a new engine may do better
"""


class EngineError(Exception):
    """Root of all errors that the engine raises on purpose."""


class RequestError(EngineError):
    """A request that can never run.

    Args:
        message: What is wrong and what to do, in one sentence.
        field: The part of the request, for example ``messages[0].content[1]``.
    """

    def __init__(self, message: str, *, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class PromptTooLong(RequestError):
    """The prompt has more tokens than the model's context or the KV cache holds."""


class ImageRejected(RequestError):
    """An image that the model's processor cannot take, or that exceeds the encoder cache."""


class ModelLoadError(EngineError):
    """A checkpoint that cannot be loaded; the message names the directory or hub name."""


class UnsupportedModel(ModelLoadError):
    """A checkpoint of a family that has no adapter; the message lists those that have."""


class NotEnoughMemory(ModelLoadError):
    """A checkpoint that does not fit; the message says what is needed, what is there, and what would fit."""


class GateError(EngineError):
    """The socket on which detectors ask for the device cannot be made; the message names its path."""


class EngineBusy(EngineError):
    """Too much waits of what is done one after the other; the same request may succeed later."""


class EngineStopped(EngineError):
    """The engine was closed, or its loop died, while a request was running."""


class EngineBroken(EngineStopped):
    """No step succeeds any more, or none moves anything; only a new engine may do better."""
