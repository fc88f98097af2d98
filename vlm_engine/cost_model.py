"""How long a step will take, learned from the steps before: pure Python, a few microseconds a call.

Linear models whose weights are learned online by recursive least squares with directional forgetting
(Cao and Schwartz, Automatica 36, 2000). Weights are kept at or above zero: more work never takes less time.
"""

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from operator import add, mul, sub, truediv
from typing import Literal, NamedTuple

from vlm_engine.speed import MachineSpeed

FORGETTING = 0.995
OUTLIER = 3.0
MANY_OUTLIERS = 3
KNOWN = 32
SWEEPS = 8
RIDGE = 1e-9
Road = Literal["narrow", "loaded", "wide", "aside"]
STEP_START: dict[Road, float] = {"narrow": 1.0, "loaded": 1.3, "wide": 0.75, "aside": 1.2}
ASIDE_SLICE = 1.8
"""Where learning starts, on each road and for slices aside, as a multiple of what the narrow road knows."""
LEAST_WEIGHT_MS = 0.1
KEPT_ERRORS = 33
FEW = 8
RESTORED_TRUST = 0.1


class StepWork(NamedTuple):
    """What a step computes, as the model's features.

    Args:
        num_tokens: Tokens in the forward pass.
        num_samples: Rows of the output layer.
        num_context: Keys read by single-token queries, summed over sequences.
        num_pairs: Query-key pairs of the longer chunks, summed over sequences.
    """

    num_tokens: int = 0
    num_samples: int = 0
    num_context: int = 0
    num_pairs: int = 0

    def features(self) -> tuple[float, ...]:
        """Scaled so that typical values are near 1; the first is for the step itself."""
        return (1.0, *map(truediv, self, (64, 8, 4096, 262144)))

    def __add__(self, other: "StepWork") -> "StepWork":  # type: ignore[override]
        return StepWork(*map(add, self, other))


class SliceWork(NamedTuple):
    """What some encoder slices compute.

    Args:
        num_slices: Pieces that are started separately.
        num_edge_rows: Rows that are embedded or merged.
        num_key_rows: Rows whose queries, keys and values are computed.
        num_rows: Rows that go through attention and MLP.
        num_pairs: Query-key pairs of the attention.
    """

    num_slices: int = 0
    num_edge_rows: int = 0
    num_key_rows: int = 0
    num_rows: int = 0
    num_pairs: int = 0

    def features(self) -> tuple[float, ...]:
        """Scaled so that typical values are near 1."""
        return tuple(map(truediv, self, (4, 2048, 2048, 1024, 1048576)))

    def __add__(self, other: "SliceWork") -> "SliceWork":  # type: ignore[override]
        return SliceWork(*map(add, self, other))

    def __sub__(self, other: "SliceWork") -> "SliceWork":
        return SliceWork(*map(sub, self, other))


class LinearModel:
    """Non-negative linear prediction in milliseconds, learned online.

    Args:
        weights: Where learning starts, one a feature.
        trust: How much the start is worth, in steps that consist of one feature alone; less learns
            faster at first.
    """

    def __init__(self, weights: Sequence[float], *, trust: float = 0.01) -> None:
        self.weights = list(weights)
        self.num_learned = 0
        self._free = list(weights)
        self._num_far_above = 0
        self._information = [
            [trust / max(weight, LEAST_WEIGHT_MS) ** 2 * (i == j) for j in range(len(weights))]
            for i, weight in enumerate(weights)
        ]
        self._errors: deque[float] = deque(maxlen=256)
        self._lengths: deque[float] = deque(maxlen=256)
        self._residual_ms: float | None = None
        self._relative: deque[float] = deque(maxlen=256)

    def predict(self, features: Sequence[float]) -> float:
        """Milliseconds."""
        return _dot(self.weights, features)

    @property
    def residual_ms(self) -> float:
        """By how much steps were longer than predicted, at the 90th percentile; at least 0."""
        residual_ms = self._residual_ms
        if residual_ms is None:
            ordered = sorted(self._errors) or [0.0]
            # why: told from here, as another thread may ask while this one learns
            residual_ms = self._residual_ms = max(0.0, ordered[int(0.9 * (len(ordered) - 1))])
        return residual_ms

    def residual_of(self, length_ms: float) -> float:
        """The same of steps about as long as `length_ms`, of all where there are few of these.

        why: longer ones count in proportion: 20 ms of error in slices of 200 ms say nothing of a step of 30.
        """
        if length_ms <= 0:
            return self.residual_ms
        errors = sorted(
            error if length <= length_ms else error * length_ms / length
            for error, length in zip(self._errors, self._lengths, strict=True)
            if length >= length_ms / 2
        )
        return max(0.0, errors[int(0.9 * (len(errors) - 1))]) if len(errors) >= FEW else self.residual_ms

    @property
    def recent_errors(self) -> Sequence[float]:
        """``|measured - predicted| / measured`` of the last 256 steps, as they are now."""
        return tuple(self._relative)

    @property
    def relative_error(self) -> float:
        """Median of `recent_errors`, 0 before the first."""
        return median_error(self)

    def state(self) -> dict[str, list[float]]:
        """What was learned, to go on with after a restart: weights, and some errors, the least first."""
        errors_ms, relative = _spread(self._errors, KEPT_ERRORS), _spread(self._relative, KEPT_ERRORS)
        return {"weights": list(self.weights), "errors_ms": errors_ms, "relative_errors": relative}

    @classmethod
    def restored(
        cls, weights: Sequence[float], errors_ms: Sequence[float] = (), relative_errors: Sequence[float] = ()
    ) -> "LinearModel":
        """The model of a `state`, which soon gives way to what is measured.

        Raises:
            ValueError: A number cannot be.
        """
        if not all(map(isfinite, (*weights, *errors_ms, *relative_errors))):
            raise ValueError("not a finite number")
        if min((*weights, *relative_errors), default=0.0) < 0.0:
            raise ValueError("a negative weight or error")
        model = cls(weights, trust=RESTORED_TRUST)
        model._errors.extend(errors_ms)
        model._lengths.extend(0.0 for _ in errors_ms)
        model._relative.extend(relative_errors)
        return model

    def learn(self, features: Sequence[float], measured_ms: float) -> None:
        """Book a measured step and move the weights towards it.

        why: a step that the machine held up (another process, a page fault) says nothing of the
        work, so what lies far above the prediction counts as an error but hardly moves a weight;
        unless it goes on, then the prediction is what is wrong.
        """
        predicted = self.predict(features)
        error = measured_ms - predicted
        self._errors.append(error)
        self._lengths.append(predicted)
        self._residual_ms = None
        self._relative.append(abs(error) / max(measured_ms, 1e-3))
        self.num_learned += 1
        is_far_above = self.num_learned > KNOWN and measured_ms > OUTLIER * max(predicted, 1.0)
        self._num_far_above = self._num_far_above + 1 if is_far_above else 0
        is_held_up = 0 < self._num_far_above < MANY_OUTLIERS
        taken_ms = predicted + (OUTLIER - 1) * max(predicted, 1.0) * 0.1 if is_held_up else measured_ms
        # why: weighted so that relative errors count
        weight = 1.0 / max(measured_ms, 1.0)
        self._update([value * weight for value in features], taken_ms * weight)

    def _update(self, x: Sequence[float], target: float) -> None:
        """One step of recursive least squares that forgets only what `x` tells anew.

        invariant: the information stays positive definite: what is taken away is a part of what was
        known in the direction of `x`, and as much comes in. Steps of one kind, however many, leave what is
        known of the others as it is. The ridge keeps rounding from adding up.
        """
        size = range(len(x))
        known = [_dot(row, x) for row in self._information]
        scale = (1.0 - FORGETTING) / max(_dot(known, x), 1e-12)
        for i in size:
            row, x_i, known_i = self._information[i], x[i], scale * known[i]
            for j in size:
                row[j] += x_i * x[j] - known_i * known[j]
            row[i] += RIDGE
        error = target - _dot(self._free, x)
        step = _solve(self._information, x)
        self._free = [weight + error * s for weight, s in zip(self._free, step, strict=True)]
        self.weights = _nonnegative(self._information, self._free, self.weights)


def _spread(values: Iterable[float], number: int) -> list[float]:
    """At most `number` of the values, evenly from the least to the largest."""
    ranked = sorted(values)
    last, steps = len(ranked) - 1, number - 1
    return ranked if last < number else [ranked[i * last // steps] for i in range(number)]


def _dot(a: Sequence[float], b: Sequence[float]) -> float:
    total: float = sum(map(mul, a, b))
    return total


def _solve(matrix: Sequence[Sequence[float]], right: Sequence[float]) -> list[float]:
    """``matrix @ result = right`` for a positive definite matrix, by elimination."""
    size = len(right)
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    for i in range(size):
        pivot = rows[i]
        for below in rows[i + 1 :]:
            factor = below[i] / pivot[i]
            for j in range(i, size + 1):
                below[j] -= factor * pivot[j]
    result = [0.0] * size
    for i in reversed(range(size)):
        row = rows[i]
        rest = sum(row[j] * result[j] for j in range(i + 1, size))
        result[i] = (row[size] - rest) / row[i]
    return result


def _nonnegative(
    information: Sequence[Sequence[float]], free: Sequence[float], start: Sequence[float]
) -> list[float]:
    """The weights at or above zero that fit nearly as well as `free`: coordinate descent from `start`."""
    if min(free) >= 0.0:
        return list(free)
    weights = list(start)
    wanted = [_dot(row, free) for row in information]
    for _ in range(SWEEPS):
        for i, row in enumerate(information):
            weights[i] = max(0.0, weights[i] + (wanted[i] - _dot(row, weights)) / row[i])
    return weights


class CostModel:
    """Predicts steps and encoder slices of one model on one device.

    What a forward pass takes depends on its *road*, and each has a model of its own, which starts from what
    is known of the first: ``narrow`` leaves one thread to others, ``loaded`` is the same while the side
    thread works, ``wide`` takes all threads, ``aside`` is the side thread's. Slices run on all threads, or
    aside.

    Args:
        step: Weights to start from, as `StepWork.features`; by default a slow device, so that the
            first steps are short rather than late.
        encoder: The same for `SliceWork.features`.
        has_side: Whether there is a side thread.
    """

    def __init__(
        self,
        step: Sequence[float] = (10.0, 40.0, 4.0, 4.0, 10.0),
        encoder: Sequence[float] = (0.5, 10.0, 10.0, 30.0, 10.0),
        *,
        has_side: bool = False,
    ) -> None:
        self.has_side = has_side
        self._start = tuple(step), tuple(encoder)
        self.reset()

    def reset(self, step: LinearModel | None = None, encoder: LinearModel | None = None) -> None:
        """Start anew, from what an earlier engine learned or (None) from the beginning."""
        self.step = step or LinearModel(self._start[0])
        self.encoder = encoder or LinearModel(self._start[1])
        self.speed = MachineSpeed()
        self._steps: dict[Road, LinearModel] = {"narrow": self.step}
        self._slices: dict[Road, LinearModel] = {"narrow": self.encoder}

    def step_ms(self, work: StepWork, road: Road = "narrow") -> float:
        """Predicted milliseconds of a forward pass."""
        return self.speed.factor * self._step_model(road).predict(work.features())

    def slice_ms(self, work: SliceWork, *, aside: bool = False) -> float:
        """Predicted milliseconds of some encoder slices."""
        return self.speed.factor * self._slice_model(aside).predict(work.features())

    def learn_step(self, work: StepWork, measured_ms: float, road: Road = "narrow") -> None:
        """Learn from a forward pass that was measured."""
        model = self._steps[road] = self._step_model(road)
        self._learn(model, work.features(), measured_ms)

    def learn_slices(self, work: SliceWork, measured_ms: float, *, aside: bool = False) -> None:
        """Learn from encoder slices that were measured."""
        model = self._slices["aside" if aside else "narrow"] = self._slice_model(aside)
        self._learn(model, work.features(), measured_ms)

    def _step_model(self, road: Road) -> LinearModel:
        return _on_road(self._steps, road, STEP_START[road])

    def _slice_model(self, aside: bool) -> LinearModel:
        return _on_road(self._slices, "aside" if aside else "narrow", ASIDE_SLICE)

    def _learn(self, model: LinearModel, features: Sequence[float], measured_ms: float) -> None:
        # why: what a model does not know yet says nothing of the machine
        if model.num_learned >= KNOWN:
            self.speed.see(measured_ms, self.speed.factor * model.predict(features))
        model.learn(features, measured_ms / self.speed.factor)

    def residual_ms(self, length_ms: float = 0.0) -> float:
        """What a plan of `length_ms` keeps free because predictions err."""
        factor = self.speed.factor
        length_ms /= factor
        if self.has_side:
            roads: tuple[Road, ...] = ("narrow", "loaded")
            return factor * max(self._step_model(road).residual_of(length_ms) for road in roads)
        return factor * (self.step.residual_of(length_ms) + self.encoder.residual_of(length_ms))

    @property
    def step_error(self) -> float:
        """Median relative error of the last predictions of steps, on all roads."""
        return median_error(*self._steps.values())

    @property
    def slice_error(self) -> float:
        """Median relative error of the last predictions of slices, on all threads and aside."""
        return median_error(*self._slices.values())


def _on_road(models: Mapping[Road, LinearModel], road: Road, start: float) -> LinearModel:
    """The model of a road; one that was not measured is `start` times the narrow one."""
    known = models.get(road)
    return known or LinearModel([start * weight for weight in models["narrow"].weights])


def median_error(*models: LinearModel) -> float:
    """Median relative error of the last predictions of some models together, 0 before the first."""
    errors = sorted(error for model in models for error in model.recent_errors)
    return errors[len(errors) // 2] if errors else 0.0
