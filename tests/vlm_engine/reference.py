"""What `transformers` itself answers, to hold the engine against, and how to run the engine beside it."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor

from vlm_engine import Engine, EngineConfig, GenerationRequest, SamplingParams, TokenEvent
from vlm_engine.models import ModelSpec, VisionLanguageModel, load_model
from vlm_engine.models.base import ImageEncoder
from vlm_engine.models.gemma3 import Gemma3Parts
from vlm_engine.models.internvl import InternVLParts
from vlm_engine.models.smolvlm import SiglipParts
from vlm_engine.models.tile_tower import TileParts, TileTower
from vlm_engine.models.tower import QwenTower
from vlm_engine.sequence import Placeholder
from vlm_engine.slices import Slice

TILES: dict[str, Callable[[Any, ModelSpec], TileParts]] = {
    "smolvlm": SiglipParts,
    "idefics3": SiglipParts,
    "internvl": InternVLParts,
    "gemma3": Gemma3Parts,
}
MIN_LEAD = 1e-4


@dataclass(frozen=True, slots=True)
class Clip:
    """Frames of a video in the order of time, `fps` of them a second."""

    frames: tuple[Image.Image, ...]
    fps: float = 2.0


Part = str | Image.Image | Clip


@dataclass(frozen=True, slots=True)
class Case:
    """One request: a name, the parts of its user message, and how many tokens it generates."""

    name: str
    parts: tuple[Part, ...]
    num_tokens: int = 20
    more: Mapping[str, Any] = field(default_factory=dict)

    @property
    def messages(self) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [as_content(part) for part in self.parts]}]

    @property
    def request(self) -> GenerationRequest:
        sampling = SamplingParams(max_tokens=self.num_tokens, temperature=0.0, ignore_eos=True)
        return GenerationRequest(self.name, self.messages, sampling, **self.more)


def as_content(part: Part) -> dict[str, Any]:
    if isinstance(part, Clip):
        return {"type": "video", "frames": list(part.frames), "fps": part.fps}
    return {"type": "text", "text": part} if isinstance(part, str) else {"type": "image", "image": part}


@dataclass(frozen=True, slots=True)
class Family:
    """A checkpoint loaded twice: stock, and for the engine.

    Args:
        name: Its ``model_type``.
        token_side: Pixels of an image token's side, where a picture is not resized before.
    """

    name: str
    token_side: int
    processor: Any
    stock: Any
    model: VisionLanguageModel

    @classmethod
    def load(cls, folder: Path) -> "Family":
        processor = AutoProcessor.from_pretrained(folder)
        stock = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        model = load_model(EngineConfig(str(folder), dtype="float32", device="cpu"))
        return cls(stock.config.model_type, _token_side(stock.config), processor, stock, model)

    @property
    def has_tiles(self) -> bool:
        """Whether a picture is resized and becomes one or several images of one size to the engine."""
        return self.name in TILES

    def tower(self, rows_per_slice: int) -> ImageEncoder:
        """The vision tower with slices of another size."""
        spec = self.model.spec
        if self.has_tiles:
            return TileTower(TILES[self.name](self.stock.model, spec), spec, rows_per_slice)
        return QwenTower(self.stock.model.visual, spec, rows_per_slice)

    def engine(self, **limits: Any) -> Engine:
        config = EngineConfig(
            self.model.spec.name, **({"kv_cache_tokens": 4096, "scheduler": "static"} | limits)
        )
        return Engine(config, model=self.model)

    def picture(self, seed: int, columns: int = 6, rows: int = 5) -> Image.Image:
        """A smooth random picture, of ``columns * rows`` image tokens if it is not resized."""
        pixels = np.random.default_rng(seed).integers(0, 256, (3, 4, 3), dtype=np.uint8)
        return Image.fromarray(pixels).resize((columns * self.token_side, rows * self.token_side))

    def greedy(self, case: Case) -> list[int]:
        """What ``generate()`` gives, past end tokens too.

        Raises:
            AssertionError: Two tokens are so close that rounding could decide; take another case.
        """
        text = self.processor.apply_chat_template(case.messages, add_generation_prompt=True)
        images = [part for part in case.parts if isinstance(part, Image.Image)]
        options = self._videos([part for part in case.parts if isinstance(part, Clip)])
        bos = self.processor.tokenizer.bos_token
        if bos and text.startswith(bos):
            options["add_special_tokens"] = False
        inputs = self.processor(text=[text], images=images or None, return_tensors="pt", **options)
        options = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        outputs = {"return_dict_in_generate": True, "output_logits": True}
        output = self.stock.generate(**inputs, max_new_tokens=case.num_tokens, **options, **outputs)
        best = torch.cat(output.logits).topk(2).values
        assert (best[:, 0] - best[:, 1]).min() > MIN_LEAD, f"{case.name}: a token is not clear"
        token_ids: list[int] = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
        return token_ids

    def _videos(self, clips: list[Clip]) -> dict[str, Any]:
        """What a processor wants of clips whose frames are all read."""
        if not clips:
            return {}
        metadata = [
            {
                "total_num_frames": num,
                "fps": clip.fps,
                "duration": num / clip.fps,
                "frames_indices": [*range(num)],
            }
            for clip in clips
            for num in (len(clip.frames),)
        ]
        options = {"do_sample_frames": False, "video_metadata": metadata}
        if not self.has_tiles:
            options["cap_pixels_per_frame"] = True
        return {
            "videos": [np.stack([np.asarray(frame) for frame in clip.frames]) for clip in clips],
            "videos_kwargs": options,
        }


def _token_side(config: Any) -> int:
    patch = config.vision_config.patch_size
    scales = (
        getattr(config.vision_config, "spatial_merge_size", None),
        getattr(config, "scale_factor", None),
        1 / getattr(config, "downsample_ratio", 1),
    )
    side = patch if isinstance(patch, int) else patch[0]
    return side * int(next(scale for scale in scales if scale))


def run(engine: Engine, cases: Iterable[Case], *, every: int = 0) -> dict[str, list[int]]:
    """Token ids of all cases; each is added `every` steps after the one before, all at once for 0."""
    queue, answers = list(cases), {case.name: [] for case in cases}
    for step in range(100_000):
        while queue and (not every or step % every == 0):
            engine.add(queue.pop(0).request)
            if every:
                break
        if not queue and not engine.has_work:
            break
        for event in engine.step():
            assert event.error is None, event.error
            answers[event.request_id] += event.token_ids
    engine.check_integrity()
    return answers


def drain(engine: Engine) -> list[TokenEvent]:
    """All events until nothing is left to do."""
    events: list[TokenEvent] = []
    while engine.has_work:
        events += engine.step()
    engine.check_integrity()
    return events


def images_of(engine: Engine, *cases: Case) -> list[Placeholder]:
    """All images of some prompts, tiles one by one, each content once."""
    prompts = [engine.prepare(case.request)[0] for case in cases]
    return list({image.digest: image for prompt in prompts for image in prompt.placeholders}.values())


def prompt_length(engine: Engine, case: Case) -> int:
    return len(engine.prepare(case.request)[0].token_ids)


def near_identical(family: Family) -> Iterator[Image.Image]:
    """Frames of one camera: the same picture with one spot of another colour."""
    scene = family.picture(71, 4, 3)
    for index in range(16):
        frame = scene.copy()
        colour = (16 * index, 255 - 16 * index, 99)
        frame.paste(colour, (family.token_side, 0, 2 * family.token_side, family.token_side))
        yield frame


def least_chunks(engine: Engine, case: Case, chunk: int) -> int:
    """Chunks of a prompt where no step is cut short: all of `chunk` tokens but the last, or of an image that
    may not be cut, or up to such an image."""
    prompt, end, count = engine.prepare(case.request)[0], 0, 0
    while end < len(prompt.token_ids):
        start, end = end, min(end + chunk, len(prompt.token_ids))
        for image in prompt.placeholders:
            if image.attends_both_ways and image.start < end < image.end:
                end = image.end if image.start <= start else image.start
        count += 1
    return count


def tight_limits(engine: Engine, cases: Iterable[Case]) -> dict[str, int]:
    """Memory for twice the longest case, embeddings for its images: others must give way."""
    longest = max(prompt_length(engine, case) + case.num_tokens for case in cases)
    num_image = max(sum(image.length for image in images_of(engine, case)) for case in cases)
    return {"kv_cache_tokens": 2 * longest, "encoder_cache_tokens": num_image}


def stock_features(family: Family, image: Image.Image) -> torch.Tensor:
    """Embeddings of all tiles of an image by the stock model of a family with tiles."""
    inputs = family.processor.image_processor(images=[image], return_tensors="pt")
    masks = [inputs[name] for name in ("pixel_attention_mask",) if name in inputs]
    with torch.inference_mode():
        output = family.stock.model.get_image_features(inputs["pixel_values"], *masks)
    return torch.cat(list(output.pooler_output))


def sliced_features(family: Family, image: Image.Image, rows: int, lost: Slice | None = None) -> torch.Tensor:
    """The same by the sliced tower, one slice left out if `lost` is one."""
    prompt = family.model.prompts.prepare(Case("x", (image,)).messages)
    tower, features = family.tower(rows), []
    for tile in prompt.images:
        state = tower.start(tile)
        tower.run(state, [part for part in tower.slices(tile) if part != lost])
        features += tower.features(state)
    return torch.cat(features)
