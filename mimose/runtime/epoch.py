"""The sizes of a whole epoch, told beforehand: can the largest be trained at all?"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

from mimose.cost.learner import Learner
from mimose.cost.problem import Memory
from mimose.exceptions import MimoseError
from mimose.inputs.sizes import SizeTable
from mimose.policy.policy import Policy
from mimose.runtime.checks import BudgetChecks
from mimose.types import StepInput

_log = logging.getLogger(__name__)

Shape: TypeAlias = tuple[tuple[str, int], ...]
"""Names and sizes, in the order of the names."""

_MOST_LARGEST = 64
"""Shapes, none of which covers another, that are looked at."""


class Epoch:
    """Looks at the largest shapes to come as soon as predictions for them are trusted.

    Args:
        policy: Predicts.
        learner: Knows whether there is anything new.
        checks: Raise for what no plan can keep within the budget.
    """

    def __init__(self, policy: Policy, learner: Learner, checks: BudgetChecks) -> None:
        self._policy = policy
        self._learner = learner
        self._checks = checks
        self._largest: list[Shape] = []
        self._open: list[Shape] = []
        """Those of them that nothing is known of yet."""
        self._least: dict[Shape, float] = {}
        """The least peak of each, of the others."""
        self._as_of = -1
        self._has_names = False
        """Whether all names were found to be sizes of the model."""

    def expect(
        self, shapes: Iterable[Mapping[str, int]], table: SizeTable | None
    ) -> None:
        """Take shapes in place of those told before.

        Args:
            shapes: Sizes by name, each at least 1.
            table: Of the last step's arguments; None before the first.

        Raises:
            MimoseError: A name is not one of the model's.
        """
        told = largest([*dict.fromkeys(map(_shape, shapes))])
        if table is not None:
            _check_names(told, table)
        self._largest = self._open = told
        self._least, self._as_of, self._has_names = {}, -1, table is not None

    def check(self, facts: StepInput, table: SizeTable, memory: Memory) -> None:
        """Make sure that the budget can hold for the shapes to come.

        Args:
            facts: Of a step that is about to run; sizes without a name are as here.
            table: Names its sizes.
            memory: What is held, and the budget.

        Raises:
            InfeasibleBudgetError: It cannot.
        """
        if not self._open or self._as_of == self._learner.model.n_steps:
            return
        self._as_of = self._learner.model.n_steps
        if not self._as_of or not self._knows(table):
            return
        for shape in self._open:
            sizes = table.fill(dict(shape), facts.sizes)
            peak = self._policy.least_peak_bytes(facts._replace(sizes=sizes), memory)
            if peak is None:
                continue
            self._least[shape] = peak
            self._open = [each for each in self._open if each != shape]
            self._checks.raise_if_expected(dict(shape), peak, memory)

    def _knows(self, table: SizeTable) -> bool:
        """Whether the names are known; if not, that is said, and nothing expected."""
        if not self._has_names:
            try:
                _check_names(self._largest, table)
                self._has_names = True
            except MimoseError as error:
                _log.warning("mimose: expect: %s; nothing is expected", error)
                self._largest = self._open = []
        return self._has_names

    @property
    def largest(self) -> Mapping[str, int] | None:
        """The shape to come that takes most, as far as is known; None of none."""
        known = max(self._least, key=lambda shape: self._least[shape], default=None)
        if known is None or self._open:
            known = max(self._largest, key=_volume, default=None)
        return None if known is None else dict(known)

    @property
    def least_peak_bytes(self) -> float | None:
        """What that takes at the least; None where it is not known yet."""
        return None if self.largest is None else self._least.get(_shape(self.largest))


def _check_names(shapes: Sequence[Shape], table: SizeTable) -> None:
    """Make sure that all names are sizes of the model.

    Raises:
        MimoseError: One is not.
    """
    for shape in shapes:
        table.fill(dict(shape), (0,) * len(table.names))


def _shape(named: Mapping[str, int]) -> Shape:
    return tuple(sorted(named.items()))


def _volume(shape: Shape) -> int:
    return math.prod(size for _, size in shape)


def largest(shapes: Sequence[Shape]) -> list[Shape]:
    """Return the shapes that no other one covers, of each set of names, largest first.

    Args:
        shapes: Distinct ones.
    """
    found: list[Shape] = []
    for shape in sorted(shapes, key=_volume, reverse=True):
        if len(found) == _MOST_LARGEST:
            break
        if not any(_covers(other, shape) for other in found):
            found.append(shape)
    return found


def _covers(larger: Shape, shape: Shape) -> bool:
    return _names(larger) == _names(shape) and all(
        most >= size for (_, most), (_, size) in zip(larger, shape, strict=True)
    )


def _names(shape: Shape) -> tuple[str, ...]:
    return tuple(name for name, _ in shape)
