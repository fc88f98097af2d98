"""Executes plans on the model; decides nothing."""

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vlm_engine.batch import build_batch
from vlm_engine.beside import SideThread
from vlm_engine.choosing import Run, TokenChooser, choose_runs
from vlm_engine.config import EngineConfig
from vlm_engine.cost_model import Road
from vlm_engine.grammar import GrammarMatcher
from vlm_engine.kv_cache import KVCache, bytes_per_token
from vlm_engine.models.base import PreparedPrompt, VisionLanguageModel
from vlm_engine.models.free_memory import free_memory
from vlm_engine.plan import EncodeItem, StepPlan
from vlm_engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step gave: at least one token for each sequence whose chunk reached its newest token.

    Args:
        runs: By request id.
        encode_ms: Milliseconds that the encoder slices took.
        forward_ms: Milliseconds of the rest: batch, forward pass and sampling.
        road: How the forward pass ran, see `CostModel`.
    """

    runs: dict[str, Run]
    encode_ms: float
    forward_ms: float
    road: Road


class EncodeFault(Exception):
    """Slices of an image failed.

    Args:
        item: The slices.
        error: What was raised.
    """

    def __init__(self, item: EncodeItem, error: Exception) -> None:
        super().__init__(str(error))
        self.item = item
        self.error = error


class ModelRunner:
    """Holds the model, its KV cache and the images' embeddings.

    Args:
        model: A loaded model.
        config: Limits of the engine.
    """

    def __init__(self, model: VisionLanguageModel, config: EngineConfig) -> None:
        self.model = model
        self.num_encoded = 0
        self._block_size = config.block_size
        self.num_blocks = _num_blocks(model, config)
        spec = model.spec
        self.cache = KVCache(
            spec.num_layers,
            self.num_blocks * config.block_size,
            spec.num_kv_heads,
            spec.head_dim,
            dtype=spec.dtype,
            device=spec.device,
            spare_slots=config.block_size if spec.use_graphs else 0,
        )
        self._prompts: dict[str, PreparedPrompt] = {}
        self._choosers: dict[str, TokenChooser] = {}
        self._features: dict[bytes, tuple[Tensor, ...]] = {}
        self._encoding: dict[bytes, Any] = {}
        self._side = _side_thread(model, config)
        self._aside: frozenset[str] = frozenset()
        self._leaving: set[str] = set()

    @property
    def has_side(self) -> bool:
        """Whether there is a thread that runs plans beside the steps."""
        return self._side is not None

    def close(self) -> None:
        """End the side thread."""
        if self._side is not None:
            self._side.close()

    def add(self, sequence: Sequence, prompt: PreparedPrompt, matcher: GrammarMatcher | None = None) -> None:
        """Keep what a sequence needs besides its tokens: positions, pixels, random state, form."""
        self._prompts[sequence.request_id] = prompt
        self._choosers[sequence.request_id] = TokenChooser(sequence, matcher)

    def begin_again(self, sequence: Sequence) -> None:
        """Have the next token of a sequence chosen as if the step that failed had not been."""
        name = sequence.request_id
        self._choosers[name] = self._choosers[name].renewed(sequence)

    def remove(self, request_id: str) -> None:
        """Forget a finished sequence, once the side thread is done with it; without it, nothing happens."""
        if request_id in self._aside:
            self._leaving.add(request_id)
            return
        self._prompts.pop(request_id, None)
        self._choosers.pop(request_id, None)

    def forget_images(self, digests: tuple[bytes, ...]) -> None:
        """Free embeddings that the encoder cache dropped."""
        for digest in digests:
            self._features.pop(digest, None)
            self._encoding.pop(digest, None)

    def start_over(self) -> None:
        """Free all embeddings and begin to count anew; no plan is under way."""
        self._features.clear()
        self._encoding.clear()
        self.num_encoded = 0

    def execute(self, plan: StepPlan) -> StepResult:
        """Encode, run the forward pass, sample; measures both parts."""
        self.forget_images(plan.evicted)
        road = self._road(plan)
        if self._side is None or road == "wide":
            return self._run(plan, road)
        # why: a team waits for its slowest thread, which the machine may hold up for long (the front and its
        # clients compute as well); what people wait for takes no core that it would have to fight for
        return self._side.narrow(lambda: self._run(plan, road))

    def _road(self, plan: StepPlan) -> Road:
        if self._side is None:
            return "narrow"
        if self._side.is_busy:
            return "loaded"
        return "narrow" if plan.has_interactive else "wide"

    @torch.inference_mode()
    def _run(self, plan: StepPlan, road: Road) -> StepResult:
        encode_s = sum(map(self._encode, plan.encodes))
        started = time.perf_counter()
        runs = self._forward(plan) if plan.chunks else {}
        self._synchronize()
        return StepResult(runs, 1e3 * encode_s, 1e3 * (time.perf_counter() - started), road)

    def start_aside(self, plan: StepPlan) -> None:
        """Have the side thread execute a plan, whose sequences no step touches until it is taken back."""
        assert self._side is not None, "there is no side thread"
        self.forget_images(plan.evicted)
        self._aside = frozenset(sequence.request_id for sequence in plan.sequences)
        self._side.start(lambda: self._run(plan, "aside"))

    def is_aside_done(self, wait_s: float = 0.0) -> bool:
        """Whether the side thread is done with its plan, or is within `wait_s`."""
        return self._side is not None and self._side.is_done(wait_s)

    def take_aside(self) -> StepResult:
        """What the side thread's plan gave, waited for if need be; what went wrong there is raised."""
        assert self._side is not None, "there is no side thread"
        try:
            return self._side.take()
        finally:
            self._aside, leaving, self._leaving = frozenset(), self._leaving, set()
            for request_id in leaving:
                self.remove(request_id)

    def _forward(self, plan: StepPlan) -> dict[str, Run]:
        device = self.model.spec.device
        batch = build_batch(
            plan.chunks,
            self._prompts,
            self._features,
            self.cache,
            self._block_size,
            device,
            use_varlen=self.model.spec.use_varlen,
            use_graphs=self.model.spec.use_graphs,
        )
        hidden = self.model.forward(batch.token_ids, batch.positions, batch.images, batch.paged)
        sampled = [chunk for chunk in batch.chunks if chunk.samples]
        if not sampled:
            return {}
        logits = self.model.logits(hidden[batch.sample_rows])
        names = [chunk.sequence.request_id for chunk in sampled]
        choosers = [self._choosers[name] for name in names]
        return dict(zip(names, choose_runs(logits, choosers, [c.proposed for c in sampled]), strict=True))

    def _encode(self, item: EncodeItem) -> float:
        """Run slices of an image; returns the seconds that it took."""
        started = time.perf_counter()
        try:
            self._run_slices(item)
            self._synchronize()
        except Exception as error:
            raise EncodeFault(item, error) from error
        seconds = time.perf_counter() - started
        item.sequence.encode_s += seconds
        return seconds

    def _synchronize(self) -> None:
        """Wait for the GPU, so that what is measured is the work and not its launch."""
        if self.model.spec.device.type == "cuda":
            torch.cuda.synchronize(self.model.spec.device)

    def _run_slices(self, item: EncodeItem) -> None:
        image = self._prompts[item.sequence.request_id].images[item.image.index]
        digest, encoder = item.image.digest, self.model.encoder
        if not item.first:
            self._encoding[digest] = encoder.start(image)
        state = self._encoding[digest]
        encoder.run(state, encoder.slices(image)[item.first : item.last])
        if item.is_whole:
            self._features[digest] = encoder.features(state)
            del self._encoding[digest]
            self.num_encoded += 1


def _side_thread(model: VisionLanguageModel, config: EngineConfig) -> SideThread[StepResult] | None:
    """A thread beside the steps where the configuration, and for `auto` the machine, has room for one."""
    num_threads, on_cpu = torch.get_num_threads(), model.spec.device.type == "cpu"
    fits = on_cpu and num_threads > 1 and config.scheduler == "latency"
    wanted = config.encode == "beside" or (config.encode == "auto" and model.spec.use_kernels)
    return SideThread(num_threads, use_kernels=model.spec.use_kernels) if fits and wanted else None


def _num_blocks(model: VisionLanguageModel, config: EngineConfig) -> int:
    """KV blocks: as configured, else a share of the free memory, at most what can be used."""
    if config.kv_cache_tokens is not None:
        return max(1, config.kv_cache_tokens // config.block_size)
    spec = model.spec
    per_token = bytes_per_token(spec.num_layers, spec.num_kv_heads, spec.head_dim, spec.dtype)
    longest = min(config.max_model_len or spec.max_model_len, spec.max_model_len)
    free = free_memory(spec.device)
    affordable = min(int(free * config.kv_cache_memory), free - spec.reserved_bytes) // per_token
    num_tokens = min(affordable, config.max_num_seqs * longest)
    return max(1, num_tokens // config.block_size)
