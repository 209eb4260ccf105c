"""Who holds the current cost model, and has it taught.

Note: [Who writes]
What steps show is queued as lessons, changes of a model, and taken in by one job
at a time, in their order. In the worker's thread that job also makes all fits that the
lessons call for, and only then is the model the one that everybody reads: so no step
waits for a fit. What has to hold at once (a layer that must be kept, plans that are
worth nothing, a context that is forgotten) is written by the step itself. The two never
write the same fields, so that the job puts together what both have written meanwhile.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from mimose.cost.measured import with_step
from mimose.cost.model import CostModel
from mimose.types import (
    Context,
    Measured,
    StepInput,
    StepSample,
)
from mimose.worker import JobKind, Worker, lock

Lesson: TypeAlias = Callable[[CostModel], CostModel]
"""Returns what a model becomes by what a step has shown."""

_MOST_WAITING = 512
"""Lessons that wait, a dozen steps of a large model; of more the oldest are lost."""


class Learner:
    """The current cost model; only the methods below replace it.

    Readers take `model` once and read that value, from any thread.

    Args:
        model: To begin with.
        worker: Takes lessons in.

    Attributes:
        model: What is known now.
        n_steps: Measured steps queued, those that wait included.
    """

    def __init__(self, model: CostModel, worker: Worker | None = None) -> None:
        self.model = model
        self.worker = worker or Worker(is_inline=True)
        self.n_steps = model.n_steps
        self._last_step: tuple[CostModel, CostModel] | None = None
        """The model before and after it, in the lessons' order."""
        self._lessons: deque[Lesson] = deque(maxlen=_MOST_WAITING)
        self._lock = lock()

    @property
    def n_waiting(self) -> int:
        """Lessons that are not taken in yet."""
        return len(self._lessons)

    # ------------------------------------------------------------------ lessons

    def absorb(
        self,
        step_input: StepInput,
        calls: Sequence[Measured],
        sample: StepSample,
        released_bytes: float,
        counts: tuple[int, ...],
        between: tuple[tuple[int, ...], ...] = (),
        *,
        growth_bytes: float = 0.0,
    ) -> None:
        """Take in one measured step; the arguments are those of `with_step`.

        Args:
            step_input: What was known of the step before it ran.
            calls: The calls, as they ran.
            sample: What their segments say.
            released_bytes: Outputs of an earlier step that were freed meanwhile.
            counts: How often each layer was called.
            between: The same at each boundary between forwards.
            growth_bytes: How large the step is, or could be.
        """

        def learn(model: CostModel) -> CostModel:
            grown = model.grown(growth_bytes)
            taught = with_step(
                grown, step_input, calls, sample, released_bytes, counts, between
            )
            self._last_step = model, taught
            return taught

        self.n_steps += 1
        self._teach(learn)

    def take_back(self) -> None:
        """Forget the last measured step, unless something was taught since."""

        def forget(model: CostModel) -> CostModel:
            if self._last_step is None or self._last_step[1] is not model:
                return model
            return self._last_step[0].renewed(model)

        self._teach(forget)

    def miss(self, step_input: StepInput) -> None:
        """Record a step, not measured, in which more ran than was planned for.

        Args:
            step_input: The step's, with what it called.
        """
        self._teach(lambda model: model.missing(step_input))

    def _teach(self, lesson: Lesson) -> None:
        self._lessons.append(lesson)
        self.worker.submit(JobKind.LEARN, self, self._take_in)

    def _take_in(self) -> Iterator[None]:
        """Take in what waits: Note: [Who writes]."""
        base = taught = self.model
        try:
            while self._lessons:
                taught = self._lessons.popleft()(taught)
                yield
            if not self.worker.is_inline:
                yield from taught.make_fits(base)
        finally:
            self._put(base, taught)

    def _put(self, base: CostModel, taught: CostModel) -> None:
        with self._lock:
            now = self.model
            joined = taught if now is base else taught.joined(base, now)
            if self._last_step is not None and self._last_step[1] is taught:
                self._last_step = self._last_step[0], joined
            self.model = joined

    # ------------------------------------------------------------------ at once

    def use(self, context: Context) -> None:
        """Record that a context is used; the least recently used go first."""
        patterns = self.model.patterns
        if context in patterns and context != next(reversed(patterns)):
            with self._lock:
                self.model = self.model.used(context)

    def forget(self, context: Context) -> None:
        """Drop a context's pattern; what its families taught stays."""
        with self._lock:
            self.model = self.model.forgotten(context)

    def restrict(self, layer: int, actions: Iterable[str]) -> None:
        """Let a layer run under some actions only, from now on."""
        with self._lock:
            self.model = self.model.restricted(layer, actions)

    def distrust_plans(self) -> None:
        """Make every plan made so far invalid, as after a step over the budget."""
        with self._lock:
            self.model = self.model.distrusted()

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was learned as plain JSON data."""
        self.worker.catch_up()
        return self.model.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace everything that was learned.

        Args:
            state: What ``state_dict`` returned.
        """
        self.worker.catch_up()
        with self._lock:
            self.model = self.model.loaded(state)
            self.n_steps = self.model.n_steps
        if not self.worker.is_inline:
            self.worker.submit(JobKind.LEARN, (self, "fits"), self.model.make_fits)
            self.worker.catch_up()
