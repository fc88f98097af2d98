"""After a step that raised: who made it fail is found and ends, the others lose nothing."""

import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from traceback import clear_frames

from vlm_engine.health import StepHealth, is_lost, told
from vlm_engine.models import VisionLanguageModel
from vlm_engine.plan import Chunk, StepPlan
from vlm_engine.probe import is_sound
from vlm_engine.request import TokenEvent
from vlm_engine.runner import EncodeFault, ModelRunner, StepResult
from vlm_engine.running import RunningRequests
from vlm_engine.scheduler import Scheduler
from vlm_engine.sequence import Sequence

log = logging.getLogger(__name__)

Tell = Callable[[StepPlan, StepResult], list[TokenEvent]]


class Recovery:
    """Goes on after steps that failed, and books them.

    Args:
        model: The model.
        runner: Executes parts of a plan once more.
        scheduler: Whose plan failed.
        requests: Those that run.
        health: Where steps are booked that failed for everybody.
    """

    def __init__(
        self,
        model: VisionLanguageModel,
        runner: ModelRunner,
        scheduler: Scheduler,
        requests: RunningRequests,
        health: StepHealth,
    ) -> None:
        self._model = model
        self._runner = runner
        self._scheduler = scheduler
        self._requests = requests
        self._health = health

    def go_on(self, plan: StepPlan, fault: Exception, tell: Tell) -> list[TokenEvent]:
        """End who made the plan fail, and compute what can be computed without.

        Args:
            plan: What failed.
            fault: What it raised.
            tell: Moves the sequences of a plan on that was executed and committed; what is told of them.

        Raises:
            EngineBroken: Only a new engine may do better.
        """
        if isinstance(fault, EncodeFault):
            # why: the slices behind the one that failed are booked and did not run
            for item in plan.encodes[plan.encodes.index(fault.item) :]:
                self._scheduler.encoder_cache.drop(item.image.digest)
            return self._end({fault.item.sequence: fault.error})
        # why: it refers to all that the step had computed, for which there may be no room a second time
        clear_frames(fault.__traceback__)
        if len(plan.chunks) < 2 or is_lost(fault):
            sequences = [chunk.sequence for chunk in plan.chunks] or plan.sequences
            return self._end(dict.fromkeys(sequences, fault))
        return self._one_by_one(plan.chunks, tell)

    def book(self, error: str, *, is_final: bool = False) -> None:
        """Book a step of which nobody had anything, unless the engine finds that it is not to blame.

        Raises:
            EngineBroken: Only a new engine may do better.
        """
        is_asked = self._health.is_doubtful and not is_final
        if is_asked and is_sound(self._model, self._runner, self._scheduler.pool):
            log.warning("the last steps failed because of what was asked for: %s", error)
            self._health.succeed()
        else:
            self._health.fail(error, is_final=is_final)

    def _one_by_one(self, chunks: Items[Chunk], tell: Tell) -> list[TokenEvent]:
        """Compute chunks that failed together each by itself: those that fail again are the cause."""
        events: list[TokenEvent] = []
        guilty: dict[Sequence, Exception] = {}
        for chunk in chunks:
            if chunk.sequence.finish_reason is not None:
                continue
            part = StepPlan((chunk,))
            self._runner.begin_again(chunk.sequence)
            try:
                result = self._runner.execute(part)
            except Exception as error:
                clear_frames(error.__traceback__)
                guilty[chunk.sequence] = error
            else:
                self._scheduler.commit(part)
                events += tell(part, result)
        return events + self._end(guilty, is_alone=len(guilty) == len(chunks))

    def _end(self, guilty: Mapping[Sequence, Exception], *, is_alone: bool = True) -> list[TokenEvent]:
        """End sequences with what they raised; `is_alone`: nobody else had anything of the step."""
        events: list[TokenEvent] = []
        for sequence, error in guilty.items():
            events += self._requests.give_up([sequence], told(error))
        worst = max(guilty.values(), key=is_lost, default=None)
        if worst is not None and (is_alone or is_lost(worst)):
            self.book(told(worst), is_final=is_lost(worst))
        return events
