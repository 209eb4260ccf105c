"""Batches that are waiting: what they will run is foretold, and planned for.

Note: [Waiting]
Shapes come from where batches are made, in whatever order that happens, so all that is
known of them is that they are to come: each stays until a batch of its sizes has come.
Whoever hands a batch to the loop says so, and by what runs until the next one it is
learned which steps follow such batches.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from mimose.cost.learner import Learner
from mimose.cost.problem import Memory
from mimose.inputs.batches import BatchShape, batch_shape
from mimose.inputs.describe import Describer
from mimose.policy.forecast import Forecasts
from mimose.policy.policy import Policy
from mimose.types import StepInput

_MOST_WAITING = 256
"""Distinct shapes of one loader; then the oldest is taken to come no more."""
_MOST_STEPS = 64
"""Of one batch that teach; a loop with more runs them behind one that was not seen."""


class Waiting:
    """Shapes of one loader's batches that are to come: Note: [Waiting]."""

    def __init__(self) -> None:
        self._counts: dict[BatchShape, int] = {}

    def __iter__(self) -> Iterator[BatchShape]:
        """Iterate over the distinct shapes, the oldest first."""
        return iter(list(self._counts))

    def __len__(self) -> int:
        """Return the number of distinct shapes."""
        return len(self._counts)

    def add(self, shape: BatchShape) -> None:
        """Take in a shape that is to come."""
        self._counts[shape] = self._counts.get(shape, 0) + 1
        if len(self._counts) > _MOST_WAITING:
            del self._counts[next(iter(self._counts))]

    def came(self, shape: BatchShape) -> BatchShape:
        """Take out the shape of a batch that has come; return it with its masks.

        On an accelerator the masks are known from where the batch was made alone.
        """
        found = shape if shape in self._counts else self._alike(shape)
        if found in self._counts:
            self._counts[found] -= 1
            if not self._counts[found]:
                del self._counts[found]
        return found

    def _alike(self, shape: BatchShape) -> BatchShape:
        if shape.masks is not None:
            return shape
        alike = (s for s in self._counts if s._replace(masks=None) == shape)
        return next(alike, shape)

    def clear(self) -> None:
        """Forget all, as another pass over the loader begins."""
        self._counts.clear()


class Ahead:
    """Has plans made for batches that are waiting.

    Args:
        policy: Makes the plans.
        learner: Knows whether there is anything new since a plan could not be made.
        describer: Names the sizes.
        memory_now: Tells what is held, as if a step began.
    """

    def __init__(
        self,
        policy: Policy,
        learner: Learner,
        describer: Describer,
        memory_now: Callable[[], Memory],
    ) -> None:
        self._policy = policy
        self._learner = learner
        self._describer = describer
        self._memory_now = memory_now
        self._forecasts = Forecasts()
        self._last: BatchShape | None = None
        """Of the batch that the loop has."""
        self._ran: list[StepInput] = []
        self._tried: dict[StepInput, tuple[bool, int]] = {}
        """Whether there was a plan, and as of which version of what."""
        self.is_closed = False

    def hand(self, batch: object, waiting: Waiting) -> None:
        """Take note that the loop gets a batch, and plan for those behind it.

        Args:
            batch: The batch.
            waiting: The shapes of its loader's.
        """
        if self.is_closed:
            return
        self._learn()
        self._last = waiting.came(batch_shape(batch))
        self._plan_for(waiting)

    def ran(self, facts: StepInput) -> None:
        """Take note of a step that the loop has run.

        Args:
            facts: As they turned out to be.
        """
        if self._last is not None and len(self._ran) < _MOST_STEPS:
            self._ran.append(facts)

    def end(self, is_exiting: Callable[[], bool] = sys.is_finalizing) -> None:
        """Take note that the loop has the last batch no more.

        Args:
            is_exiting: Whether the interpreter ends: a loop left before its end may
                live until then, when modules have lost their names.
        """
        if is_exiting():
            return
        self._learn()
        self._last = None

    def close(self) -> None:
        """Plan for nothing any more, as the session ends. Harmless twice."""
        if self.is_closed:
            return
        self.is_closed = True
        self._last, self._ran = None, []
        del self._describer, self._memory_now  # a loop may keep this, but no model

    def _learn(self) -> None:
        if self._last is not None and self._ran:
            self._forecasts.learn(self._last.key, self._last.sizes, self._ran)
        self._ran = []

    def _plan_for(self, waiting: Waiting) -> None:
        memory, tried = None, {}
        for facts in self._foretold(waiting):
            tried[facts] = self._tried.get(facts, (False, -1))
            if tried[facts] == self._as_of(has_plan=tried[facts][0]):
                continue  # nothing is new since
            memory = memory or self._memory_now()
            table = self._describer.table(facts.structure)
            has_plan = table is not None and self._policy.prepare(facts, table, memory)
            tried[facts] = self._as_of(has_plan=has_plan)
        self._tried = tried

    def _foretold(self, waiting: Waiting) -> dict[StepInput, None]:
        return {
            facts: None
            for shape in waiting
            for facts in self._forecasts.of(shape.key, shape.sizes)
        }

    def _as_of(self, *, has_plan: bool) -> tuple[bool, int]:
        model = self._learner.model
        return has_plan, model.valid_since if has_plan else model.version
