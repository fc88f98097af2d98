"""Two roads for an encoder beside chats: in slices between the steps, or on a thread of its own beside them.

Runs decode steps of chats for some seconds in each of four ways and prints JSON: alone; with the encoder in
slices between steps so that steps stay within `--itl-ms`; with the encoder on one thread of its own and the
steps on the others; and the encoder alone. Prefill is not part of it.

    python benchmarks/encoder_beside.py CHECKPOINT --chats 2 --itl-ms 40
"""

import argparse
import json
import threading
import time
from collections.abc import Iterator

import numpy as np
import torch
from PIL import Image

from appliance.bench.machine import environment
from vlm_engine import Engine, EngineConfig, GenerationRequest, SamplingParams
from vlm_engine.models import ImageInput


def make_engine(model: str) -> Engine:
    return Engine(EngineConfig(model, device="cpu", kv_cache_tokens=32768, enable_prefix_caching=False))


def chat(number: int) -> GenerationRequest:
    messages = [{"role": "user", "content": f"Question {number}: " + "a line of plain words " * 10}]
    sampling = SamplingParams(max_tokens=100_000, temperature=0.0, ignore_eos=True)
    return GenerationRequest(f"chat-{number}", messages, sampling)


def picture(engine: Engine, size: tuple[int, int]) -> ImageInput:
    pixels = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    content = [{"type": "image", "image": Image.fromarray(pixels)}, {"type": "text", "text": "?"}]
    return engine.model.prompts.prepare([{"role": "user", "content": content}]).images[0]


def encodings(engine: Engine, image: ImageInput) -> Iterator[bool]:
    """Runs the encoder slice by slice for ever; True at the end of each picture."""
    encoder = engine.model.encoder
    while True:
        state, slices = encoder.start(image), encoder.slices(image)
        for index, part in enumerate(slices, 1):
            encoder.run(state, [part])
            yield index == len(slices)


def steps(
    engine: Engine, seconds: float, *, between: Iterator[bool] | None = None, itl_ms: float = 0
) -> dict:
    """Decode steps for some seconds; `between` fills what they leave of `itl_ms`."""
    gaps, pictures, slice_ms = [], 0, 0.0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        started = time.perf_counter()
        engine.step()
        while between and 1e3 * (time.perf_counter() - started) + slice_ms < itl_ms:
            before = time.perf_counter()
            pictures += next(between)
            slice_ms = max(0.9 * slice_ms, 1e3 * (time.perf_counter() - before))
        slice_ms *= 0.98
        gaps.append(1e3 * (time.perf_counter() - started))
    p50, p99 = np.percentile(gaps, [50, 99])
    return {
        "itl_ms_p50": round(p50, 1),
        "itl_ms_p99": round(p99, 1),
        "pictures_per_s": round(pictures / seconds, 3),
    }


def beside(engine: Engine, image: ImageInput, seconds: float, num_threads: int) -> dict:
    """The encoder on one thread of its own, the steps on the others."""
    stop, pictures = threading.Event(), 0

    def encode() -> None:
        nonlocal pictures
        torch.set_num_threads(1)
        for is_done in encodings(engine, image):
            pictures += is_done
            if stop.is_set():
                return

    worker = threading.Thread(target=encode)
    torch.set_num_threads(max(1, num_threads - 1))
    worker.start()
    result = steps(engine, seconds)
    stop.set()
    worker.join()
    torch.set_num_threads(num_threads)
    return result | {"pictures_per_s": round(pictures / seconds, 3)}


def encoder_alone(engine: Engine, image: ImageInput, seconds: float) -> dict:
    encoder, pictures, started = engine.model.encoder, 0, time.perf_counter()
    while time.perf_counter() < started + seconds:
        encoder.run(encoder.start(image), encoder.slices(image))
        pictures += 1
    return {"pictures_per_s": round(pictures / (time.perf_counter() - started), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model")
    parser.add_argument("--chats", type=int, default=2)
    parser.add_argument("--itl-ms", type=float, nargs="+", default=[25.0, 40.0, 60.0])
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--size", type=int, nargs=2, default=(1280, 720))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    engine = make_engine(options.model)
    image = picture(engine, tuple(options.size))
    for number in range(options.chats):
        engine.add(chat(number))
    steps(engine, 1.0)
    seconds = options.seconds
    results = {"alone": steps(engine, seconds), "encoder_alone": encoder_alone(engine, image, seconds)}
    for itl_ms in options.itl_ms:
        between = encodings(engine, image)
        results[f"between_{itl_ms:g}ms"] = steps(engine, seconds, between=between, itl_ms=itl_ms)
    results["beside"] = beside(engine, image, seconds, options.threads)
    print(json.dumps({"environment": environment(), "chats": options.chats, "results": results}, indent=2))


if __name__ == "__main__":
    main()
