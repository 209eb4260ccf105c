"""Holds the current cost model, and lets it learn.

Note: [Who writes]
Steps queue lessons, which are changes of a model. One job at a time applies them in
their order. In the worker thread this job also makes all fits that the lessons need,
and only then publishes the new model, so no step waits for a fit. Some changes must
hold at once (a layer must be kept, all plans are invalid, a context is forgotten): the
step itself writes them. Both never write the same fields, so the job can join what both
have written.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from mimose.cost.measured import MeasuredStep, with_step
from mimose.cost.model import CostModel
from mimose.types import Context, StepInput
from mimose.worker import JobKind, Worker

Lesson: TypeAlias = Callable[[CostModel], CostModel]
"""Returns a model that has learned from a step."""

_MOST_WAITING = 512
"""The most lessons that wait, a dozen steps of a large model. Beyond it, the oldest are
lost."""


class Learner:
    """The current cost model; only the methods below replace it.

    Readers of any thread read `model` once and use that value.

    Args:
        model: The first model.
        worker: Applies lessons.

    Attributes:
        model: The current model.
        n_steps: Number of measured steps, with those in the queue.
        lessons: The queue.
    """

    def __init__(self, model: CostModel, worker: Worker | None = None) -> None:
        self.model = model
        self.worker = worker or Worker(is_inline=True)
        self.n_steps = model.n_steps
        self._last_step: tuple[CostModel, CostModel] | None = None
        """The model before and after the last measured step."""
        self.lessons: deque[Lesson] = deque(maxlen=_MOST_WAITING)
        self._lock = threading.RLock()

    def absorb(self, step: MeasuredStep) -> None:
        """Learn from one measured step."""

        def learn(model: CostModel) -> CostModel:
            taught = with_step(model, step)
            self._last_step = model, taught
            return taught

        self.n_steps += 1
        self._teach(learn)

    def take_back(self) -> None:
        """Forget the last measured step, unless another lesson followed."""

        def forget(model: CostModel) -> CostModel:
            if self._last_step is None or self._last_step[1] is not model:
                return model
            return self._last_step[0].renewed(model)

        self._teach(forget)

    def miss(self, step_input: StepInput) -> None:
        """Record a step without measurement in which more ran than was planned.

        Args:
            step_input: Its input, with its counts of calls.
        """
        self._teach(lambda model: model.missing(step_input))

    def _teach(self, lesson: Lesson) -> None:
        self.lessons.append(lesson)
        self.worker.submit(JobKind.LEARN, self, self._take_in)

    def _take_in(self) -> Iterator[None]:
        """Apply the queued lessons: Note: [Who writes]."""
        base = taught = self.model
        try:
            while self.lessons:
                taught = self.lessons.popleft()(taught)
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

    def use(self, context: Context) -> None:
        """Record that a context is used; the least recently used are dropped first."""
        with self._lock:
            patterns = self.model.patterns
            if context in patterns and context != next(reversed(patterns)):
                self.model = self.model.used(context)

    def forget(self, context: Context) -> None:
        """Drop a context's pattern; what was learned about its families stays."""
        with self._lock:
            self.model = self.model.forgotten(context)

    def restrict(self, layer: int, actions: Iterable[str]) -> None:
        """Allow only some actions for a layer from now on."""
        with self._lock:
            self.model = self.model.restricted(layer, actions)

    def distrust_plans(self) -> None:
        """Make all earlier plans invalid, for example after a step over the budget."""
        with self._lock:
            self.model = self.model.distrusted()

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was learned, as JSON values."""
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
