"""Random requests in every combination; after each hundred nothing is held and nothing is lost.

``FUZZ_REQUESTS=2000 python -m pytest tests/vlm_engine/test_fuzz.py`` runs the long one.
"""

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests.vlm_engine.test_engine import picture
from vlm_engine import Engine, EngineConfig, GenerationRequest, RequestError, SamplingParams, StructuredOutput
from vlm_engine.config import SpeculativeConfig
from vlm_engine.models import load_model
from vlm_engine.models.messages import image_digest
from vlm_engine.request import TokenEvent

NUM_REQUESTS = int(os.environ.get("FUZZ_REQUESTS", "100"))
FORMS = [
    StructuredOutput.of_json({"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}),
    StructuredOutput("regex", "[a-z]{1,9}( [0-9]+)?"),
    StructuredOutput.of_choice(["red", "blue car", "é"]),
    StructuredOutput("regex", "(never"),
]
WORDS = ["a", "car", "two people", "<|im_end|>", "é🥊", "\n\n", "What is it?", "night " * 9, "long " * 120]


class Fuzz:
    """Requests that go in and events that come out, with what may be said of them."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        config = EngineConfig(
            str(folder),
            dtype="float32",
            device="cpu",
            kv_cache_tokens=512,
            max_num_seqs=6,
            max_num_batched_tokens=48,
            speculative=SpeculativeConfig(prompt_lookup_min=1),
        )
        self.now = 0.0
        self.engine = Engine(config, model=load_model(config), clock=lambda: self.now)
        self.open: dict[str, dict[int, bool]] = {}
        self.texts: dict[tuple[str, int], str] = {}
        self.forms: dict[str, StructuredOutput] = {}
        self.num_ended = {"stop": 0, "length": 0, "expired": 0, "refused": 0, "cancelled": 0, "error": 0}

    def sampling(self) -> SamplingParams:
        pick, rng = self.random.choice, self.random
        return SamplingParams(
            max_tokens=pick([1, 2, 5, 9, 20, 40]),
            temperature=pick([0.0, 0.0, 0.7, 1.5]),
            top_p=pick([1.0, 0.9, 0.1]),
            top_k=pick([0, 0, 1, 7]),
            min_p=pick([0.0, 0.0, 0.2]),
            seed=pick([None, rng.randrange(2**63)]),
            presence_penalty=pick([0.0, 0.0, -1.0, 2.0]),
            frequency_penalty=pick([0.0, 0.0, 0.5]),
            repetition_penalty=pick([1.0, 1.0, 1.2]),
            logit_bias=pick([{}, {}, {5: -100.0, 9: 3.0}]),
            logprobs=pick([None, None, 0, 4]),
            n=pick([1, 1, 1, 2, 3]),
            stop=pick([(), (), ("e",), ("the", "zz")]),
            stop_token_ids=pick([(), (), (70, 71)]),
            min_tokens=pick([0, 0, 1]),
            ignore_eos=pick([False, True]),
            structured=pick([None, None, *FORMS]),
        )

    def request(self, number: int) -> GenerationRequest:
        rng = self.random
        parts: list[dict[str, Any]] = []
        for _ in range(rng.randrange(1, 4)):
            if rng.random() < 0.3:
                size = (rng.choice([32, 96, 160, 400]), rng.choice([32, 64, 200]))
                parts.append({"type": "image", "image": picture(rng.randrange(5), size)})
            else:
                parts.append({"type": "text", "text": rng.choice(WORDS)})
        priority = rng.choice(["interactive", "background"])
        expires_at = self.now + rng.random() * 3 if rng.random() < 0.2 else None
        messages = [{"role": "user", "content": parts}]
        return GenerationRequest(f"r{number}", messages, self.sampling(), priority, expires_at)  # type: ignore[arg-type]

    def add(self, number: int) -> None:
        request = self.request(number)
        try:
            self.engine.add(request)
        except RequestError as error:
            self.num_ended["refused"] += bool(error.field)
            return
        self.open[request.request_id] = dict.fromkeys(range(request.sampling.n), False)
        if request.sampling.structured is not None and not request.sampling.stop:
            self.forms[request.request_id] = request.sampling.structured

    def step(self) -> None:
        self.now += 0.05
        for event in self.engine.step():
            self.take(event)

    def take(self, event: TokenEvent) -> None:
        ended = self.open[event.request_id]
        assert not ended[event.index], "an event after the last one"
        key = (event.request_id, event.index)
        self.texts[key] = self.texts.get(key, "") + event.text
        if not event.is_last:
            return
        assert event.usage is not None
        assert event.finish_reason is not None
        self.num_ended[event.finish_reason] += 1
        ended[event.index] = True
        if event.finish_reason == "stop" and event.request_id in self.forms:
            self.check_form(self.forms[event.request_id], self.texts[key])
        if event.is_failure or all(ended.values()):
            del self.open[event.request_id]

    @staticmethod
    def check_form(form: StructuredOutput, text: str) -> None:
        if form.kind == "json":
            assert "n" in json.loads(text)
        elif form.kind == "choice":
            assert text in json.loads(form.value)

    def cancel(self) -> None:
        name = self.random.choice(list(self.open))
        event = self.engine.abort(name)
        assert event is not None
        self.take(event)

    def drain(self) -> None:
        while self.engine.has_work:
            self.step()
        assert not self.open, "requests that never ended"
        self.engine.check_integrity()


@pytest.mark.timeout(900 + NUM_REQUESTS)
def test_random_requests(qwen3_vl_checkpoint: Path) -> None:
    """2,000 by ``FUZZ_REQUESTS``: cancels, deadlines, refusals, forms, several answers, priorities."""
    fuzz = Fuzz(qwen3_vl_checkpoint, seed=NUM_REQUESTS)
    for number in range(NUM_REQUESTS):
        fuzz.add(number)
        for _ in range(fuzz.random.choice([0, 0, 1, 4])):
            fuzz.step()
        if fuzz.open and fuzz.random.random() < 0.15:
            fuzz.cancel()
        if number % 100 == 99:
            fuzz.drain()
    fuzz.drain()
    assert fuzz.num_ended.pop("error") == 0, fuzz.num_ended
    assert all(fuzz.num_ended.values()), fuzz.num_ended


@given(
    width=st.integers(1, 12),
    height=st.integers(1, 12),
    mode=st.sampled_from(["RGB", "L", "RGBA"]),
    data=st.data(),
)
def test_equal_digests_mean_equal_pictures(width: int, height: int, mode: str, data: st.DataObject) -> None:
    """E10: one changed byte, another shape of the same bytes, another mode of the same pixels."""
    length = width * height * len(Image.new(mode, (1, 1)).getbands())
    pixels = data.draw(st.binary(min_size=length, max_size=length))
    image = Image.frombytes(mode, (width, height), pixels)
    digest = image_digest(image)
    assert image_digest(Image.frombytes(mode, (width, height), pixels)) == digest
    place = data.draw(st.integers(0, length - 1))
    other = bytes([*pixels[:place], pixels[place] ^ 1, *pixels[place + 1 :]])
    assert image_digest(Image.frombytes(mode, (width, height), other)) != digest
    if width != height:
        assert image_digest(Image.frombytes(mode, (height, width), pixels)) != digest
    for mode_of_more in {"RGB", "L", "RGBA"} - {mode}:
        assert image_digest(image.convert(mode_of_more)) != digest
