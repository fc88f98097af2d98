"""Proposed tokens change no token, leave nothing behind, and are made only where they are worth it."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.vlm_engine.builders import image as make_image
from tests.vlm_engine.builders import make_scheduler, make_sequence
from tests.vlm_engine.guesses import Guesses
from tests.vlm_engine.test_answers import answers, wish
from tests.vlm_engine.test_engine import make_engine, picture
from tests.vlm_engine.test_scheduler_properties import sequences
from vlm_engine import Engine, EngineConfig, StructuredOutput, TokenEvent
from vlm_engine.budget import LatencyTargets, Moment, TimeBudget
from vlm_engine.config import SpeculativeConfig
from vlm_engine.cost_model import CostModel
from vlm_engine.lookup import Earlier, Lookup
from vlm_engine.models import VisionLanguageModel, load_model
from vlm_engine.plan import Chunk, StepPlan
from vlm_engine.scheduler import Scheduler
from vlm_engine.sequence import Sequence, Status
from vlm_engine.speculation import DecodeCosts, Speculator

CHEAP = (10.0, 6.4, 0.8, 0.0, 0.0)


@pytest.fixture(scope="module")
def model(qwen3_vl_checkpoint: Path) -> VisionLanguageModel:
    return load_model(EngineConfig(str(qwen3_vl_checkpoint), dtype="float32", device="cpu"))


def found_slowly(text: list[int], shortest: int, longest: int) -> int | None:
    """Index behind the newest earlier run of the longest end of the text that has one."""
    for length in range(min(longest, len(text) - 1), shortest - 1, -1):
        for start in reversed(range(len(text) - length)):
            if text[start : start + length] == text[-length:]:
                return start + length
    return None


@settings(max_examples=100, deadline=None)
@given(
    text=st.lists(st.sampled_from([0, 1, 256, 257, 65536, 16777216, 16843009]), min_size=1, max_size=24),
    shortest=st.integers(1, 3),
    more=st.integers(0, 3),
)
def test_lookup_finds_the_newest_place_of_the_longest_end(text: list[int], shortest: int, more: int) -> None:
    """Ids whose bytes look alike, so that a run is also found where no token begins."""
    lookup = Lookup(shortest, shortest + more)
    for count in range(1, len(text) + 1):
        found, proposed = lookup.find(text[:count], 3)
        place = found_slowly(text[:count], shortest, shortest + more)
        assert bool(found) == (place is not None)
        if place is not None:
            assert proposed[: count - place] == tuple(text[place : min(place + 3, count)])


def test_the_newest_of_earlier_texts_are_looked_in() -> None:
    earlier = Earlier(2)
    lookup = Lookup(2, 8, earlier)
    for text in ([1, 2, 3, 4, 5], [1, 2, 3, 6], [9, 2, 3, 7, 8]):
        earlier.add(text)
    assert lookup.find([5, 1, 2, 3], 3) == (3, (6,))
    assert lookup.find([5, 1, 2, 3, 6], 3)[1] == ()
    assert Lookup(2, 8, earlier).find([0, 2, 3], 3) == (2, (7, 8))
    assert Lookup(2, 8, earlier).find([2, 3, 1, 2, 3], 3) == (3, (6,))
    assert Lookup(2, 2, earlier).find([2, 3, 1, 2, 3], 3) == (2, (1, 2, 3))


def test_answers_about_frames_help_later_ones_and_no_chat() -> None:
    speculator = Speculator(SpeculativeConfig())
    first = decoding(0.0, chat=False, text=[1, 2, 3, 4, 5, 6, 7])
    first.num_prompt_tokens = 3
    speculator.end(first, "stop")
    speculator.end(decoding(0.0, chat=True, text=[1, 2, 8, 8, 8]), "stop")
    speculator.end(decoding(0.0, chat=False, text=[1, 2, 9, 9, 9]), "error")
    for is_chat, proposed in ((True, ()), (False, (4, 5, 6, 7, 1))):
        later = decoding(0.0, chat=is_chat, text=[0, 0, 1, 2])
        later.token_ids[-1] = 3
        assert take(speculator, later) == proposed


def test_a_text_that_runs_in_circles_goes_on_in_them() -> None:
    assert Lookup(2, 4).find([9, 1, 2, 3, 1, 2], 5) == (2, (3, 1, 2, 3, 1))
    assert Lookup(2, 4).find([1, 2, 3, 4], 5) == (0, ())


Answered = dict[tuple[str, int], TokenEvent]


def wishes() -> list[tuple[str, dict[str, object]]]:
    """Everything that a request may want around its tokens."""
    return [
        ("greedy", {}),
        ("drawn", {"temperature": 1.1, "seed": 3}),
        ("narrow", {"temperature": 0.9, "top_k": 20, "top_p": 0.8, "min_p": 0.01, "seed": 5, "logprobs": 2}),
        ("penalties", {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.4}),
        ("drawn penalties", {"temperature": 1.0, "seed": 4, "frequency_penalty": 1.5, "logprobs": 0}),
        ("bias", {"logit_bias": {40: 4.0, 41: -100.0}, "logprobs": 3}),
        ("least", {"min_tokens": 7, "ignore_eos": False, "logit_bias": {2: 30.0}}),
        ("several", {"n": 3, "temperature": 1.3, "seed": 11}),
        ("one token", {"max_tokens": 1}),
        ("form", {"structured": StructuredOutput("regex", "[a-d]{3,30}( [0-9]+){1,4}"), "logprobs": 1}),
        ("choice", {"structured": StructuredOutput.of_choice(["red", "a blue car", "a blue bus"])}),
    ]


def ask_all(engine: Engine, more: dict[str, dict[str, object]]) -> Answered:
    requests = [
        wish(name, "what is it, what is it?", **({"max_tokens": 24} | values | more.get(name, {})))
        for name, values in wishes()
    ]
    requests.append(wish("frame", picture(3), "what is it?", max_tokens=20))
    requests[-1] = replace(requests[-1], priority="background")
    return answers(engine, *requests)


def ends(plain: Answered) -> dict[str, dict[str, object]]:
    """Stop strings and stop tokens that come somewhere in the middle of what is known to be said."""
    greedy, drawn = plain["greedy", 0], plain["drawn", 0]
    return {"greedy": {"stop": (greedy.text[9:12],)}, "drawn": {"stop_token_ids": (drawn.token_ids[11],)}}


@pytest.fixture(scope="module")
def alone(model: VisionLanguageModel) -> tuple[Answered, Answered]:
    """Without proposals: all that would be said, and what is said where some stop in the middle."""
    first = ask_all(make_engine(model), {})
    return first, ask_all(make_engine(model), ends(first))


@pytest.mark.parametrize(
    ("wrong", "limits"),
    [
        (0.0, {}),
        (0.25, {"kv_cache_tokens": 96, "max_num_batched_tokens": 23}),
        (1.0, {"max_num_seqs": 3}),
    ],
)
def test_no_request_is_answered_otherwise(
    model: VisionLanguageModel, alone: tuple[Answered, Answered], limits: dict[str, Any], wrong: float
) -> None:
    """Drawn, penalized, biased, formed, stopped: each token, its logprobs and its end are equal.

    why: a budget of milliseconds would leave proposals away on a machine that is busy.
    """
    first, plain = alone
    engine = make_engine(model, scheduler="static", **limits)
    coming = {
        name if not index else f"{name} answer {index}": event.token_ids
        for (name, index), event in first.items()
    }
    engine.scheduler.speculator = guesses = Guesses(coming, wrong=wrong)
    guessed = ask_all(engine, ends(first))
    assert {key: event.finish_reason for key, event in plain.items()}.keys() == guessed.keys()
    for key, event in plain.items():
        same = ("text", "token_ids", "finish_reason")
        assert [getattr(guessed[key], part) for part in same] == [getattr(event, part) for part in same], key
        assert len(guessed[key].logprobs) == len(event.logprobs), key
        for one, other in zip(guessed[key].logprobs, event.logprobs, strict=True):
            assert one.taken.logprob == pytest.approx(other.taken.logprob, abs=1e-3)
            assert [each.token_id for each in one.top] == [each.token_id for each in other.top]
    assert plain["greedy", 0].finish_reason == plain["drawn", 0].finish_reason == "stop"
    assert guesses.stats.num_accepted_tokens > (60 if wrong < 1 else -1)


def test_lookup_needs_fewer_steps_for_a_text_that_repeats_itself(
    model: VisionLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Costs are fixed, so that what is proposed does not depend on the machine."""
    monkeypatch.setattr(DecodeCosts, "learn", lambda *_: None)
    form = StructuredOutput("regex", "(a red car on the left, ){5}")
    request = wish("r", "what is it?", max_tokens=200, structured=form)
    plain = make_engine(model)
    expected = answers(plain, request)
    config = EngineConfig(
        model.spec.name, kv_cache_tokens=2048, scheduler="static", speculative=SpeculativeConfig()
    )
    engine = Engine(config, model=model)
    assert answers(engine, request)["r", 0].token_ids == expected["r", 0].token_ids
    assert engine.stats().num_steps < 0.6 * plain.stats().num_steps
    stats = engine.stats().speculation
    assert stats.num_draft_tokens >= stats.num_accepted_tokens > 12
    assert stats.num_accepted_tokens == plain.stats().num_steps - engine.stats().num_steps


def test_a_cancel_and_a_fault_leave_no_block_behind(
    model: VisionLanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(model, scheduler="static")
    engine.scheduler.speculator = Guesses({}, wrong=1.0)
    engine.add(wish("a", max_tokens=50))
    engine.add(wish("b", max_tokens=50))
    for _ in range(5):
        engine.step()
    engine.abort("a")
    engine.check_integrity()
    monkeypatch.setattr(engine.model, "logits", lambda hidden: 1 / 0)
    assert [event.finish_reason for event in engine.step()] == ["error"]
    assert engine.scheduler.speculator.stats.num_drafts > 0
    engine.check_integrity()


class Written:
    """What is in which slot of the cache, as the steps of a scheduler write it."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self.slots: dict[tuple[int, int], int] = {}

    def write(self, plan: StepPlan) -> None:
        for chunk in plan.chunks:
            for position, token_id in enumerate(chunk.token_ids, chunk.start):
                self.slots[self._slot(chunk.sequence, position)] = token_id

    def _slot(self, sequence: Sequence, position: int) -> tuple[int, int]:
        index, offset = divmod(position, self.scheduler.pool.block_size)
        return sequence.block_ids[index], offset

    def check(self) -> None:
        """Every computed position of every sequence holds its own token, found ones too."""
        for sequence in self.scheduler.running:
            held = -(-sequence.num_computed_tokens // self.scheduler.pool.block_size)
            assert len(sequence.block_ids) == held, "blocks that nothing was computed for"
            for position in range(sequence.num_computed_tokens):
                assert self.slots[self._slot(sequence, position)] == sequence.token_ids[position]


def verify(scheduler: Scheduler, chunk: Chunk, num_right: int) -> None:
    """Do what the engine does with a chunk of which `num_right` proposed tokens are what the model says."""
    sequence = chunk.sequence
    run = [*chunk.proposed[:num_right], 7000 + sequence.num_tokens]
    reason = next(filter(None, map(sequence.append, run)), None)
    if chunk.proposed:
        scheduler.accept(chunk, num_right)
    if reason:
        scheduler.finish(sequence, reason)


@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(st.tuples(sequences(), st.integers(0, 8)), min_size=1, max_size=8),
    budget=st.integers(2, 40),
    num_blocks=st.integers(24, 40),
    cancels=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 30)), max_size=3),
    data=st.data(),
)
def test_only_right_tokens_stay_in_the_cache(
    arrivals: list[tuple[Sequence, int]],
    budget: int,
    num_blocks: int,
    cancels: list[tuple[int, int]],
    data: st.DataObject,
) -> None:
    """Whatever is taken over, cancelled or preempted: books balance, and blocks hold what they say."""
    scheduler = make_scheduler(num_blocks=num_blocks, budget=budget, max_num_seqs=4, encoder_tokens=64)
    scheduler.speculator = Guesses({})
    written, step, pending = Written(scheduler), 0, sorted(arrivals, key=lambda pair: pair[1])
    while pending or scheduler.has_work:
        assert step < 2000, "no progress"
        while pending and pending[0][1] <= step:
            scheduler.add(pending.pop(0)[0])
        for sequence in (arrivals[i][0] for i, when in cancels if when == step and i < len(arrivals)):
            if sequence in (*scheduler.running, *scheduler.waiting):
                scheduler.finish(sequence, "cancelled")
        plan = scheduler.plan(float(step))
        assert sum(chunk.num_tokens for chunk in plan.chunks if chunk.proposed) <= budget
        written.write(plan)
        sampled = [chunk for chunk in plan.chunks if chunk.samples]
        scheduler.commit(plan)
        for chunk in sampled:
            verify(scheduler, chunk, data.draw(st.integers(0, len(chunk.proposed))))
        scheduler.check_integrity()
        written.check()
        step += 1
    assert scheduler.pool.num_free == num_blocks
    assert all(s.num_output_tokens == s.max_tokens for s, _ in arrivals if s.finish_reason == "length")


def test_a_guess_takes_no_block_that_a_decode_may_need() -> None:
    scheduler = make_scheduler(num_blocks=4, block_size=4)
    scheduler.speculator = Guesses({}, wrong=1.0)
    scheduler.add(make_sequence(7, max_tokens=6))
    scheduler.add(make_sequence(3, max_tokens=6))
    for now in range(3):
        plan = scheduler.plan(float(now))
        assert scheduler.pool.num_free + sum(len(s.block_ids) for s in scheduler.running) == 4
        sampled = [chunk for chunk in plan.chunks if chunk.samples]
        scheduler.commit(plan)
        for chunk in sampled:
            verify(scheduler, chunk, 0)
    assert not scheduler.preemptions


def decoding(scheduler_now: float, *, chat: bool, text: list[int]) -> Sequence:
    """A sequence whose last token is all that is left to compute."""
    sequence = make_sequence(len(text), max_tokens=500, priority="interactive" if chat else "background")
    sequence.token_ids = [*text, text[0]]
    sequence.num_computed_tokens, sequence.status = len(text), Status.RUNNING
    sequence.first_token_s = sequence.last_token_s = scheduler_now
    return sequence


@pytest.mark.parametrize(("itl_ms", "fits"), [(100.0, 4), (10.75, 2), (10.3, 0)])
def test_a_chat_has_proposals_as_far_as_its_allowance_goes(itl_ms: float, fits: int) -> None:
    """A decode takes 10.2 ms and each token more 0.2 ms."""
    costs = CostModel(CHEAP)
    budget = TimeBudget(costs, LatencyTargets(chat_itl_ms=itl_ms), 64)
    chat = decoding(5.0, chat=True, text=[1, 2, 3, 4, 5, 6])
    budget.begin(Moment([chat], [], 5.0))
    budget.spend_tokens(chat, 1)
    assert budget.take_proposed(chat, [0.2, 0.4, 0.6, 0.8]) == fits
    assert budget.predicted_ms == pytest.approx(10.2 + 0.2 * fits)


def take(speculator: Speculator, sequence: Sequence) -> tuple[int, ...]:
    speculator.begin([sequence])
    return speculator.propose(sequence, lambda: 64, len)


def test_proposals_that_are_never_right_cost_a_hundredth_of_the_time() -> None:
    """A token more takes 3 % of a step: one in three steps might propose one, one in four is looked at."""
    speculator = Speculator(SpeculativeConfig())
    chat, num_proposed = decoding(0.0, chat=True, text=[1, 2, 1, 2]), 0
    for step in range(400):
        proposed = take(speculator, chat)
        if proposed:
            num_proposed += len(proposed)
            speculator.book(chat, len(proposed), 0)
        chat.token_ids += [1, 2] if step % 2 else [2, 1]
        chat.num_computed_tokens = chat.num_tokens - 1
    assert 60 < num_proposed < 140
    assert speculator.stats.num_draft_tokens == num_proposed


def test_a_text_that_begins_to_repeat_itself_is_noticed() -> None:
    """After a hundred wrong proposals, right ones bring longer ones back; others profit from the first on."""
    speculator = Speculator(SpeculativeConfig())
    chat = decoding(0.0, chat=True, text=[1, 2, 1, 2])
    for _ in range(100):
        speculator.book(chat, 4, 0)
    lengths = []
    for _ in range(120):
        proposed = take(speculator, chat)
        lengths.append(len(proposed))
        if proposed:
            speculator.book(chat, len(proposed), len(proposed))
    assert lengths[0] <= 1
    assert lengths[-1] == 6
    assert len(take(speculator, decoding(0.0, chat=True, text=[3, 4, 3, 4]))) == 6


def test_a_text_in_which_nothing_is_found_is_looked_at_less_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step at first, every fourth later; one that then repeats itself is found within four steps."""
    looks, find = list[int](), Lookup.find
    chat = decoding(0.0, chat=True, text=[1, 2])

    def counted(lookup: Lookup, token_ids: list[int], most: int) -> tuple[int, tuple[int, ...]]:
        looks.append(len(token_ids) - 3)
        return find(lookup, token_ids, most)

    monkeypatch.setattr(Lookup, "find", counted)
    speculator = Speculator(SpeculativeConfig())
    for token_id in range(100, 160):
        assert not take(speculator, chat)
        chat.token_ids.append(token_id)
    assert looks[:4] == [0, 1, 2, 3]
    assert {late - early for early, late in pairwise(looks[12:])} == {4}
    chat.token_ids += [100, 101]
    assert any(take(speculator, chat) for _ in range(4))


def test_a_place_for_a_picture_is_never_proposed() -> None:
    chat = decoding(0.0, chat=True, text=[5, 1, 2, 3, 9, 9, 1])
    chat.placeholders = (make_image(4, 2, "a"),)
    chat.token_ids = [5, 1, 2, 3, 9, 9, 1, 2]
    chat.num_computed_tokens = 7
    assert take(Speculator(SpeculativeConfig()), chat) == (3,)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"method": "eagle"}, "method"),
        ({"num_speculative_tokens": 0}, "num_speculative_tokens"),
        ({"prompt_lookup_min": 0}, "prompt_lookup_min"),
        ({"prompt_lookup_min": 5, "prompt_lookup_max": 4}, "prompt_lookup_max"),
    ],
)
def test_settings_that_cannot_be_name_their_field(values: dict[str, object], field: str) -> None:
    with pytest.raises(ValueError, match=f"^{field}: must be"):
        SpeculativeConfig(**values)  # type: ignore[arg-type]
