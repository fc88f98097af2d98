"""What runs next: pure Python, deterministic, and told the time.

There are no phases. A sequence has tokens and computed tokens, and every step moves the second
count towards the first. The order is Sarathi-Serve's (https://arxiv.org/abs/2403.02310): decodes,
then prefill in chunks, all in one forward pass; interactive work goes before background work.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial

from vlm_engine.block_pool import BlockPool
from vlm_engine.blocks import Blocks
from vlm_engine.budget import Moment, Side, StepBudget, WorkBudget
from vlm_engine.draft import Draft
from vlm_engine.encoder_cache import EncoderCache
from vlm_engine.fair_shares import FairShares
from vlm_engine.images import Images
from vlm_engine.order import gives_way, rank, turn
from vlm_engine.pace import Owed, owed_by
from vlm_engine.plan import Chunk, StepPlan
from vlm_engine.request import FinishReason
from vlm_engine.sequence import Sequence, Status
from vlm_engine.speculation import Speculator
from vlm_engine.turn_queue import TurnQueue


class Scheduler:
    """Decides which tokens of which sequences, and which encoder slices, the next step computes.

    Args:
        pool: KV blocks.
        encoder_cache: Encoded images.
        budget: How much fits into a step.
        max_num_seqs: Sequences that run at once.
        num_chat_blocks: KV blocks that background work leaves to chats, running and kept.
        enable_prefix_caching: Start sequences on blocks that hold the same content already.
        turns: Detectors that share the device, None where none does.
        speculator: Proposes tokens for sequences that decode, None for none.
        side_budget: How much one piece of work for the side thread is, None without such a thread. While
            chats have tokens to compute, it runs encoder slices and background prompts beside the steps.
    """

    def __init__(
        self,
        pool: BlockPool,
        encoder_cache: EncoderCache,
        budget: StepBudget,
        *,
        max_num_seqs: int = 16,
        num_chat_blocks: int = 0,
        enable_prefix_caching: bool = True,
        turns: TurnQueue | None = None,
        speculator: Speculator | None = None,
        side_budget: WorkBudget | None = None,
    ) -> None:
        self.pool = pool
        self.encoder_cache = encoder_cache
        self.budget = budget
        self.max_num_seqs = max_num_seqs
        self._blocks = Blocks(pool, num_chat_blocks, is_shared=enable_prefix_caching)
        self.turns = turns
        self.speculator = speculator
        self.side_budget = side_budget
        self._images = Images(encoder_cache)
        self._set_aside(StepPlan())
        self._leaving: list[Sequence] = []
        self._chats_lack_room = False
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.counts: Counter[str] = Counter()
        self._shares = FairShares()
        self.preemptions: Counter[str] = Counter()

    @property
    def has_work(self) -> bool:
        """Whether any sequence is not finished, or a detector waits for its turn."""
        return bool(self.waiting or self.running or (self.turns and self.turns.is_waiting))

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence that fits the pool (the engine refuses the others)."""
        if not sequence.is_interactive:
            self._shares.enter(sequence)
        self.waiting.append(sequence)

    def _set_aside(self, plan: StepPlan) -> None:
        """What the side thread works on from now on."""
        self.aside = plan
        self._aside_sequences = frozenset(plan.sequences)
        self._images.aside = frozenset(item.image.digest for item in plan.encodes)

    @property
    def is_aside_busy(self) -> bool:
        """Whether a plan for the side thread was made and is not committed."""
        return not self.aside.is_empty

    @property
    def has_chat_tokens(self) -> bool:
        """Whether a chat has tokens to compute and waits for no picture."""
        chats = (s for s in (*self.running, *self.waiting) if s.is_interactive)
        return any(s not in self._aside_sequences and self._images.has_all(s) for s in chats)

    def plan(self, now: float) -> StepPlan:
        """Choose the next step's work; `now` in seconds on the clock of `arrival_s`.

        invariant: the plan moves at least one sequence when any is waiting or running and the side thread
        does nothing, and never computes an image token before its image is encoded.
        """
        expired = self._expire(now)
        draft = Draft(self.budget)
        side: Side = "idle" if self.side_budget and self.has_chat_tokens else "none"
        side = "busy" if self.is_aside_busy else side
        self._fill(draft, now, side)
        if not draft.planned and side == "idle":
            self._fill(draft, now, "none")
        if not draft.planned and self.running and side != "busy":
            # why: all running sequences wait for each other's blocks; only giving some up helps
            self._preempt(max(self.running, key=rank), draft, "deadlock")
            self._fill(draft, now, "none")
        if self.turns and draft.turn:
            self.turns.start(draft.turn)
        return self._planned(draft, now, expired)

    def plan_aside(self, now: float) -> StepPlan:
        """Choose what the side thread does beside the next steps, which leave its sequences alone.

        It encodes first what chats wait for, then works on background prompts, from encoder slices on and
        one after the other. Empty while no chat has tokens to compute: then steps do all, on all threads.
        """
        if self.side_budget is None or self.is_aside_busy or not self.has_chat_tokens:
            return StepPlan()
        draft = Draft(self.side_budget)
        self.side_budget.begin(Moment(self.running, self.waiting, now, owed=self._owed))
        chats = self._in_turn(now, is_interactive=True)
        self._serve((s for s in chats if not self._images.has_all(s)), draft)
        if self._chats_lack_room:
            # why: what runs aside cannot be preempted, so that the next piece would keep them waiting
            return self._begin_aside(draft, now)
        frames = (s for s in self._in_turn(now, is_interactive=False) if not s.is_decoding)
        self._serve((s for s in frames if not self._is_too_late(s, now)), draft)
        return self._begin_aside(draft, now)

    def _begin_aside(self, draft: Draft, now: float) -> StepPlan:
        self._set_aside(self._planned(draft, now, []))
        return self.aside

    def _planned(self, draft: Draft, now: float, expired: list[Sequence]) -> StepPlan:
        self._mark_started(draft.planned, now)
        self.counts.update(draft.stalled)
        return draft.plan(self.encoder_cache.take_evicted(), expired)

    def commit(self, plan: StepPlan) -> None:
        """Book a step that ran: its tokens are computed, its full blocks can be found again."""
        for chunk in plan.chunks:
            sequence = chunk.sequence
            if sequence.status is not Status.RUNNING:
                continue
            sequence.num_computed_tokens = chunk.end
            self._blocks.publish(sequence)
            self._images.release_read(chunk)

    def accept(self, chunk: Chunk, num_accepted: int) -> None:
        """Book what became of proposed tokens, after the sequence took those over that were right.

        invariant: only tokens of the sequence are ever published, and blocks that only rejected ones reached
        are given back.
        """
        sequence = chunk.sequence
        if self.speculator is not None:
            self.speculator.book(sequence, len(chunk.proposed), num_accepted)
        sequence.num_computed_tokens = sequence.num_tokens - 1
        self._blocks.publish(sequence)
        self._blocks.trim(sequence)

    def commit_aside(self, *, is_done: bool = True) -> None:
        """Book that the side thread has its plan behind it; not `is_done`: it failed."""
        plan = self.aside
        self._set_aside(StepPlan())
        if is_done:
            self.commit(plan)
        leaving, self._leaving = self._leaving, []
        for sequence in leaving:
            self._give_back(sequence)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """End a sequence in any state and free all that it holds, once the side thread is done with it.

        After an error nothing that it computed is found again, neither blocks nor images.
        """
        if sequence.first_step_s is None and not sequence.is_interactive:
            self._shares.give_back(sequence)
        for line in (self.waiting, self.running):
            if sequence in line:
                line.remove(sequence)
        if self.speculator is not None:
            self.speculator.end(sequence, reason)
        sequence.status = Status.FINISHED
        sequence.finish_reason = reason
        if sequence in self._aside_sequences:
            self._leaving.append(sequence)
        else:
            self._give_back(sequence)

    def _give_back(self, sequence: Sequence) -> None:
        self._free(sequence)
        if sequence.finish_reason == "error":
            self.encoder_cache.drop_idle(image.digest for image in sequence.placeholders)

    def check_integrity(self) -> None:
        """Check the books of both pools against the running sequences (AssertionError if off)."""
        holders = (*self.running, *self._leaving)
        self.pool.check_integrity(sequence.block_ids for sequence in holders)
        self.encoder_cache.check_integrity({sequence.request_id for sequence in holders})
        assert not any(sequence.block_ids for sequence in self.waiting), "a waiting sequence holds blocks"

    def _mark_started(self, planned: set[str], now: float) -> None:
        for sequence in self.running:
            if sequence.first_step_s is None and sequence.request_id in planned:
                sequence.first_step_s = now

    def _expire(self, now: float) -> list[Sequence]:
        """End what is too old, unless the encoder works on it already, or it began to answer."""
        # why: under load, if all were given up half encoded, no frame would ever be described
        late = [s for s in (*self.waiting, *self.running) if self._is_too_late(s, now)]
        for sequence in late:
            self.finish(sequence, "expired")
        return late

    def _is_too_late(self, sequence: Sequence, now: float) -> bool:
        if not sequence.has_expired(now) or sequence.num_output_tokens:
            return False
        is_begun = self._images.is_reached(sequence) or sequence in self._aside_sequences
        return sequence.status is not Status.RUNNING or not is_begun

    def _fill(self, draft: Draft, now: float, side: Side) -> None:
        """Give out the budget in order of importance; memory follows the same order."""
        draft.stalled.clear()
        longest_ms = self.turns.longest_step_ms(now) if self.turns else math.inf
        self.budget.begin(Moment(self.running, self.waiting, now, longest_ms, self._owed, side))
        if self.speculator is not None:
            self.speculator.begin(self.running)
        self._serve(self._in_turn(now, is_interactive=True), draft)
        self._chats_lack_room = "memory" in draft.stalled
        draft.turn = self.turns.propose(self.budget, now) if self.turns else None
        if draft.turn:
            self.budget.spend_turn(draft.turn.cost_ms)
        self._serve(self._in_turn(now, is_interactive=False), draft)

    def _owed(self) -> Iterator[Owed]:
        """What background prompts have left, in their order."""
        everyone = [s for s in (*self.running, *self.waiting) if not (s.is_interactive or s.is_decoding)]
        for sequence in sorted(everyone, key=rank):
            yield owed_by(sequence, self._images.work_left(sequence))

    def _in_turn(self, now: float, *, is_interactive: bool) -> list[Sequence]:
        """The sequences of a class that the side thread does not have, in the order of their turns."""
        everyone = [s for s in (*self.running, *self.waiting) if s.is_interactive == is_interactive]
        return sorted((s for s in everyone if s not in self._aside_sequences), key=lambda s: turn(s, now))

    def _serve(self, sequences: Iterable[Sequence], draft: Draft) -> None:
        """Give each its part in order; who cannot start holds up only those that wait behind it.

        Of background work a prompt starts when those before it are done, or leave the encoder's thread
        idle: more that are half done would hold more memory, and an urgent one would find no slot.
        """
        is_blocked = False
        for sequence in sequences:
            if sequence.status is Status.RUNNING:
                draft.stalled.update(self._extend(sequence, draft))
            elif not is_blocked and sequence.request_id not in draft.preempted:
                stalls = self._admit(sequence, draft)
                is_blocked = sequence.status is Status.WAITING
                draft.stalled.update(stalls)
            is_behind = draft.completes(sequence) or self._leaves_encoder(sequence)
            is_blocked |= not sequence.is_interactive and not is_behind

    def _leaves_encoder(self, sequence: Sequence) -> bool:
        has_side = self.side_budget is not None
        return has_side and bool(sequence.placeholders) and self._images.has_all(sequence)

    def _extend(self, sequence: Sequence, draft: Draft) -> list[str]:
        """Plan slices and a chunk of a sequence; returns why it got nothing, if so."""
        start = sequence.num_computed_tokens
        reach = min(sequence.num_left, max(draft.budget.max_num_batched_tokens, sequence.num_together))
        stalls = self._images.encode_ahead(sequence, start, start + reach, draft)
        num_tokens = draft.budget.fit_tokens(sequence, reach)
        end = self._images.clip(sequence, start, start + num_tokens)
        if end > start and self._reserve_blocks(sequence, end, draft):
            draft.budget.spend_tokens(sequence, end - start)
            draft.add(Chunk(sequence, start, end, self._propose(sequence)))
        elif end > start:
            stalls.append("memory")
        elif not num_tokens:
            stalls.append("budget")
        return [] if sequence.request_id in draft.planned else stalls

    def _propose(self, sequence: Sequence) -> tuple[int, ...]:
        """Tokens to be computed beside a decode that was just planned, with blocks for them.

        why: a guess is not worth anybody's place, so that it takes only blocks which no decode may need.
        """
        if self.speculator is None or not sequence.is_decoding:
            return ()

        def room() -> int:
            num_kept = len(self.running) + self._blocks.num_withheld(sequence, 1, self.running)
            num_blocks = len(sequence.block_ids) + max(0, self.pool.num_free - num_kept)
            return num_blocks * self.pool.block_size - sequence.num_tokens

        proposed = self.speculator.propose(sequence, room, partial(self.budget.take_proposed, sequence))
        if proposed:
            self._blocks.extend(sequence, sequence.num_tokens + len(proposed))
        return proposed

    def _admit(self, sequence: Sequence, draft: Draft) -> list[str]:
        """Start a waiting sequence on its cached prefix; returns why it cannot start, if so."""
        is_full = len(self.running) >= self.max_num_seqs and not self._victims(sequence, draft)
        if is_full or (sequence.is_interactive and not self._has_chat_slot()):
            return ["slots"]
        self._blocks.hold(sequence)
        stalls = self._extend(sequence, draft)
        if sequence.request_id not in draft.planned:
            self._free(sequence)
            return stalls
        while len(self.running) >= self.max_num_seqs:
            self._preempt(self._victims(sequence, draft)[-1], draft, "slots")
        sequence.status = Status.RUNNING
        if not sequence.is_interactive:
            self._shares.start(sequence)
        self.waiting.remove(sequence)
        self.running.append(sequence)
        return []

    def _has_chat_slot(self) -> bool:
        """Whether one more chat may run: all but one slot, that background work moves as well."""
        is_wanted = any(not s.is_interactive for s in (*self.running, *self.waiting))
        num_kept = int(is_wanted and self.max_num_seqs > 1)
        return sum(s.is_interactive for s in self.running) < self.max_num_seqs - num_kept

    def _reserve_blocks(self, sequence: Sequence, num_tokens: int, draft: Draft) -> bool:
        """Hold blocks for the first `num_tokens` positions, by preemption if need be."""
        num_missing = self._blocks.num_missing(sequence, num_tokens)
        if not num_missing:
            return True
        num_needed = num_missing + self._blocks.num_withheld(sequence, num_missing, self.running)
        victims = self._victims(sequence, draft) if num_needed > self.pool.num_free else []
        reclaimable = sum(self.pool.num_exclusive(victim.block_ids) for victim in victims)
        if num_needed > self.pool.num_free + reclaimable:
            return False
        while num_needed > self.pool.num_free:
            self._preempt(victims.pop(), draft, "memory")
        self._blocks.extend(sequence, num_tokens)
        return True

    def _victims(self, sequence: Sequence, draft: Draft) -> list[Sequence]:
        """Running sequences that may be preempted for `sequence`, the last one first."""
        idle = (
            o for o in self.running if o.request_id not in draft.planned and o not in self._aside_sequences
        )
        return sorted((other for other in idle if gives_way(other, sequence)), key=rank)

    def _preempt(self, sequence: Sequence, draft: Draft, reason: str) -> None:
        """Send a running sequence back to the queue; it keeps its place and its tokens."""
        self._free(sequence)
        sequence.status = Status.WAITING
        sequence.num_preemptions += 1
        self.running.remove(sequence)
        self.waiting.append(sequence)
        draft.preempted.add(sequence.request_id)
        self.preemptions[reason] += 1

    def _free(self, sequence: Sequence) -> None:
        self._blocks.free(sequence)
        self._images.release(sequence)
