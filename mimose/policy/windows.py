"""Predicts how a window goes on: all forwards before one backward.

Note: [Windows]
All forwards before one backward are one step for memory, because each holds its memory
until the backward. So a window, these forwards, is one step with all their layer calls.
Its context and its sizes are those of its forwards in order, and everything that is
learned, planned and predicted for steps applies to windows. A window of one forward is
an ordinary step.

When the first forward begins, the later ones are not known. The policy expects the
longest recent window that began in the same way. The sizes of its later forwards follow
from those of the first by a rule, or are the largest seen. If a forward is larger, the
plan stays if it is predicted to fit. Else this forward and those after it are
recomputed, as after a forward of another kind. If several backwards go through a graph,
the whole step is recomputed.
"""

from __future__ import annotations

import operator
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from cachetools import LRUCache

from mimose.cost.pattern import as_tuples
from mimose.predictors import SizeMap
from mimose.types import MOST_CONTEXTS, Context, StepInput

Parts: TypeAlias = tuple[StepInput, ...]
"""The forwards of a window."""
_MOST_FORWARDS = 16
LATELY = 16
"""Windows remembered for each first forward."""
OTHERS = "this step has other forwards or backwards than expected"
OTHER_SIZES = "a later forward of this step has other sizes than expected"
SEVERAL_BACKWARDS = "several backwards go through such steps"


def joined(parts: Sequence[StepInput]) -> StepInput:
    """Return the step input of a window: Note: [Windows].

    Args:
        parts: The step inputs of its forwards.
    """
    if len(parts) == 1:
        return parts[0]
    return StepInput(
        "+".join(part.context for part in parts),
        tuple(size for part in parts for size in part.sizes),
        parts[0].has_gradients,
        "+".join(part.structure for part in parts),
    )


class Windows:
    """Remembers recent windows, and predicts how a new one continues.

    Attributes:
        seen: By the first forward's context, the windows and their numbers of
            backwards. Contexts with only ordinary steps are left out.
    """

    def __init__(self) -> None:
        self.seen: LRUCache[Context, deque[tuple[Parts, int]]]
        self.seen = LRUCache(MOST_CONTEXTS)
        self._to_come: dict[Context, list[tuple[StepInput, list[SizeMap]]]] = {}
        """The forwards after a first one, and the rules of their sizes."""

    def expected(self, first: StepInput) -> StepInput | str:
        """Return the window that a forward begins, or why it cannot be planned.

        Args:
            first: The forward.
        """
        seen = self.seen.get(first.context)
        if seen is None:
            return first
        if any(n_backwards > 1 for _, n_backwards in seen):
            return SEVERAL_BACKWARDS
        if first.context not in self._to_come:
            self._to_come[first.context] = _to_come([parts for parts, _ in seen])
        to_come = self._to_come[first.context]
        if len(to_come) >= _MOST_FORWARDS:
            return f"more than {_MOST_FORWARDS} forwards run before one backward"
        parts = [first]
        for part, rules in to_come:
            sizes = tuple(rule.predict_one(first.sizes) for rule in rules)
            parts.append(part._replace(sizes=sizes))
        return joined(parts)

    def absorb(self, parts: Sequence[StepInput], n_backwards: int) -> None:
        """Record a window that has ended, or has had another backward.

        Args:
            parts: Its forwards.
            n_backwards: How many backwards went through them.
        """
        context = parts[0].context
        if context not in self.seen and len(parts) == n_backwards == 1:
            return
        if self.expected(parts[0]) != joined(parts):
            self._to_come.pop(context, None)
        seen = self.seen.setdefault(context, deque(maxlen=LATELY))
        seen.append((tuple(parts), n_backwards))

    def state_dict(self) -> dict[str, Any]:
        """Return the windows as plain JSON data."""
        return {context: list(seen) for context, seen in self.seen.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the windows.

        Args:
            state: What ``state_dict`` returned.
        """
        self.seen.clear()
        self._to_come.clear()
        for context, seen in state.items():
            self.seen[context] = deque(maxlen=LATELY)
            for parts, n in seen:
                inputs = tuple(StepInput(*as_tuples(part)) for part in parts)
                self.seen[context].append((inputs, int(n)))


def covers(whole: StepInput, parts: Sequence[StepInput]) -> bool:
    """Whether forwards are the first ones of a window, or smaller.

    Args:
        whole: The window.
        parts: The forwards so far.
    """
    own = joined(parts)
    return begins(whole, own) and all(map(operator.le, own.sizes, whole.sizes))


def begins(whole: StepInput, own: StepInput) -> bool:
    """Whether forwards are of the same kinds as the first ones of a window."""
    return f"{whole.context}+".startswith(f"{own.context}+")


def _to_come(seen: Sequence[Parts]) -> list[tuple[StepInput, list[SizeMap]]]:
    """Return the later forwards of the longest windows, with their size rules."""
    longest = max(seen, key=len)
    alike = [p for p in seen if joined(p).context == joined(longest).context]
    roots = [parts[0].sizes for parts in alike]
    found = []
    for at in range(1, len(longest)):
        columns = zip(*(parts[at].sizes for parts in alike), strict=True)
        rules = [SizeMap().fit(roots, column) for column in columns]
        found.append((alike[-1][at], rules))
    return found
