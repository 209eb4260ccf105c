"""Looks ahead: at the next batch of a loader, and at the sizes of an epoch."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from cachetools import LRUCache
from torch.utils.data import DataLoader

from mimose.cost.problem import Memory
from mimose.exceptions import MimoseError
from mimose.inputs.size_table import SizeTable
from mimose.policy.plans import Plans
from mimose.policy.policy import Policy
from mimose.runtime.budget import SessionBudget
from mimose.tensors import tensors_in
from mimose.types import MOST_CONTEXTS, Sizes, StepInput

_log = logging.getLogger(__name__)

_Batch = TypeVar("_Batch")

_MOST_SHAPES = 8
"""The number of an epoch's largest shapes that are checked."""
_CONSTANT = -1
"""Marks a size of a step that is not one of the batch's sizes."""


class PlanPrefetcher:
    """Has plans made for the next batch, while the loop trains on the present one.

    It learns which steps follow a batch: each size of a step is one of the batch's
    sizes, or the same as in the last step. If that is wrong, the plan is not used, and
    the step makes its own.

    Args:
        policy: Makes the plans.
        memory_now: Returns what is held, as if a step began.

    Attributes:
        batch: The sizes of the present batch; () if they are not known.
    """

    def __init__(self, policy: Policy, memory_now: Callable[[], Memory]) -> None:
        self._policy = policy
        self._memory_now: Callable[[], Memory] | None = memory_now
        self.batch: Sizes = ()
        self._n_ran = 0
        self._rules: LRUCache[tuple[int, int, StepInput], tuple[Sizes, Sizes]]
        self._rules = LRUCache(MOST_CONTEXTS)
        """By the number of the batch's sizes, the step's place after the batch, and the
        step without its sizes: the sizes of the last such step, and for each of them
        the place in its batch, or `_CONSTANT`."""

    def on_batch(self, batch: object, then: object) -> None:
        """Record the batch that the loop gets, and have the next one planned.

        Args:
            batch: The batch.
            then: The next batch; None if it is not known.
        """
        self.batch, self._n_ran = _sizes(batch), 0
        to_come = _sizes(then)
        if self._memory_now is None or not to_come:
            return
        memory = self._memory_now()
        for (n_sizes, _, step), (own, places) in self._rules.items():
            if n_sizes == len(to_come):
                sizes = tuple(
                    to_come[place] if place > _CONSTANT else size
                    for place, size in zip(places, own, strict=True)
                )
                self._policy.prepare(step._replace(sizes=sizes), memory)

    def ran(self, step_input: StepInput) -> None:
        """Record a step that the loop has run.

        Args:
            step_input: Its input.
        """
        batch, place = self.batch, self._n_ran
        self._n_ran += 1
        if not batch:
            return
        places = tuple(
            batch.index(size) if size in batch else _CONSTANT
            for size in step_input.sizes
        )
        key = len(batch), place, step_input._replace(sizes=())
        self._rules[key] = step_input.sizes, places

    def close(self) -> None:
        """Stop planning, when the session ends; a loop may keep this object."""
        self._memory_now, self.batch = None, ()


def _sizes(batch: object) -> Sizes:
    return tuple(size for tensor in tensors_in(batch) for size in tensor.shape)


def watched(loader: Iterable[_Batch], prefetcher: PlanPrefetcher) -> Iterable[_Batch]:
    """Return an iterable of the same batches that reads one ahead.

    Only lists, tuples and `DataLoader`s with workers are read ahead. Any other loader
    is returned itself, because reading ahead might change what it draws.

    Args:
        loader: The user's loader.
        prefetcher: Has plans made for the next batch.
    """
    has_workers = type(loader) is DataLoader and loader.num_workers > 0
    if has_workers or isinstance(loader, (list, tuple)):
        return _Watched(loader, prefetcher)
    return loader


class _Watched(Generic[_Batch]):
    """A loader with its length and attributes, whose batches are read one ahead."""

    def __init__(self, loader: Iterable[_Batch], prefetcher: PlanPrefetcher) -> None:
        self._loader = loader
        self._prefetcher = prefetcher

    def __len__(self) -> int:
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[_Batch]:
        batches = iter(self._loader)
        taken: deque[_Batch] = deque()
        failure: Exception | None = None
        while True:
            while failure is None and len(taken) < 2:
                try:
                    taken.append(next(batches))
                except Exception as error:  # raised after the batches before it
                    failure = error
            if not taken:
                break
            try:
                self._prefetcher.on_batch(
                    taken[0], taken[-1] if len(taken) > 1 else None
                )
            except Exception as error:  # the step itself plans, or raises this error
                _log.warning(
                    "mimose: the next batch's plan could not be made ahead, so its "
                    "step makes it: %r",
                    error,
                )
            yield taken.popleft()
        if not isinstance(failure, StopIteration):
            assert failure is not None
            raise failure


class ShapesToCome:
    """Checks the largest expected shapes as soon as their predictions are trusted.

    Args:
        plans: Predicts.
        budget: Raises if no plan keeps a shape within it.

    Attributes:
        unknown: Shapes without a prediction yet.
        largest: The shape with the highest known peak; None without shapes.
        least_peak_bytes: That peak under the safest plan; None if not known yet.
    """

    def __init__(self, plans: Plans, budget: SessionBudget) -> None:
        self._plans = plans
        self._budget = budget
        self.unknown: list[Mapping[str, int]] = []
        self._as_of = -1
        self.largest: Mapping[str, int] | None = None
        self.least_peak_bytes: float | None = None

    def expect(
        self, shapes: Iterable[Mapping[str, int]], table: SizeTable | None
    ) -> None:
        """Set the expected shapes, in place of earlier ones.

        Args:
            shapes: Sizes by name, each at least 1.
            table: The size table of the last step; None before the first.

        Raises:
            MimoseError: A name is not one of the model's.
        """
        distinct = {tuple(sorted(shape.items())): shape for shape in shapes}.values()
        listed = sorted(distinct, key=lambda s: math.prod(s.values()), reverse=True)
        if table is not None:
            for shape in listed:
                table.fill(shape, (0,) * len(table.names))
        self.unknown, self._as_of = listed[:_MOST_SHAPES], -1
        self.largest, self.least_peak_bytes = next(iter(listed), None), None

    def check(self, step_input: StepInput, table: SizeTable, memory: Memory) -> None:
        """Check that the expected shapes can be trained within the budget.

        Args:
            step_input: The next step; gives the sizes that a shape does not name.
            table: Names its sizes.
            memory: What is held, and the budget.

        Raises:
            InfeasibleBudgetError: One cannot.
        """
        n_steps = self._plans.learner.model.n_steps
        if not self.unknown or n_steps in (0, self._as_of):
            return
        self._as_of = n_steps
        for shape in list(self.unknown):
            try:
                sizes = table.fill(shape, step_input.sizes)
            except MimoseError as error:
                _log.warning(
                    "mimose: the shapes of session.expect() are ignored: %s", error
                )
                self.unknown, self.largest = [], None
                return
            peak = self._plans.least_peak_bytes(
                step_input._replace(sizes=sizes), memory
            )
            if peak is not None:
                self.unknown.remove(shape)
                if peak > (self.least_peak_bytes or 0.0):
                    self.largest, self.least_peak_bytes = shape, peak
                self._budget.raise_if_expected(shape, peak, memory)
