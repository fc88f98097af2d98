"""Whether the engine is at fault when steps fail, or what it was asked: a request of its own tells."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from PIL import Image

from vlm_engine.block_pool import BlockPool
from vlm_engine.errors import RequestError
from vlm_engine.models import PreparedPrompt, VisionLanguageModel
from vlm_engine.plan import Chunk, EncodeItem, StepPlan
from vlm_engine.request import GenerationRequest
from vlm_engine.runner import ModelRunner
from vlm_engine.sampling_params import SamplingParams
from vlm_engine.sequence import Placeholder, Sequence

log = logging.getLogger(__name__)

NAME = "the engine's own"
SIDE = 64


def is_sound(model: VisionLanguageModel, runner: ModelRunner, pool: BlockPool) -> bool:
    """Whether a small picture, or a text for models that read none, can be computed.

    It is a step of its own, which leaves nothing behind; without room for it the answer is no.
    """
    sequence, prompt = _good_sequence(model)
    num_blocks = -(-sequence.num_tokens // pool.block_size)
    if num_blocks > pool.num_free:
        return False
    sequence.block_ids = pool.allocate(num_blocks)
    runner.add(sequence, prompt)
    encodes = tuple(EncodeItem(sequence, image, 0, len(image.slices)) for image in sequence.placeholders)
    try:
        result = runner.execute(StepPlan((Chunk(sequence, 0, sequence.num_tokens),), encodes))
    except Exception:
        log.exception("a request of the engine's own fails as well")
        return False
    finally:
        runner.remove(NAME)
        runner.forget_images(tuple(image.digest for image in sequence.placeholders))
        pool.release(sequence.block_ids)
    return not result.runs[NAME].failed


def _good_sequence(model: VisionLanguageModel) -> tuple[Sequence, PreparedPrompt]:
    picture = {"type": "image", "image": Image.new("RGB", (SIDE, SIDE), "grey")}
    try:
        prompt = model.prompts.prepare([_asked([picture])])
    except RequestError:
        prompt = model.prompts.prepare([_asked("a b c d")])
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    sequence = Sequence(
        GenerationRequest(NAME, (), sampling),
        list(prompt.token_ids),
        len(prompt.token_ids),
        tuple(_own(model, prompt, run) for run in prompt.placeholders),
        max_tokens=1,
        stop_token_ids=frozenset(),
        arrival_s=0.0,
    )
    return sequence, prompt


def _asked(content: object) -> Mapping[str, Any]:
    return {"role": "user", "content": content}


def _own(model: VisionLanguageModel, prompt: PreparedPrompt, run: Placeholder) -> Placeholder:
    """An image under a digest that no other has, so that nobody else's embeddings are touched."""
    slices = tuple(part.work for part in model.encoder.slices(prompt.images[run.index]))
    return replace(run, digest=f"{NAME} {run.index}".encode(), slices=slices)
