"""Which forwards make up a step.

Note: [Windows]
What runs before a backward is one step for memory, however many forwards that are:
each holds what it holds until the backward. So a window, the forwards up to a backward,
is one step of all their layer calls. Its context is that of its forwards in order, its
sizes are theirs, one behind the other, and all that is learned, planned and predicted
of steps is of windows too. A window of one forward is an ordinary step.

When the first forward begins, the later ones are not known. The longest window that
began so of late is expected again, its sizes to come by the rule that they followed, of
the first forward's, else the largest seen. A forward that comes otherwise, and is not
smaller, is recomputed. So is all of a step whose graph several backwards go
through.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, TypeAlias

from mimose.cost.pattern import SizeRule, as_tuples
from mimose.types import MOST_CONTEXTS, Context, StepInput

Parts: TypeAlias = tuple[StepInput, ...]
"""The forwards of a window."""

_MOST_FORWARDS = 16
_LATELY = 16
"""Windows that began alike and are remembered."""
SEVERAL_BACKWARDS = "several backwards go through such steps"
OTHERS = "other forwards or backwards make up this step than before"


def joined(parts: Sequence[StepInput]) -> StepInput:
    """Return the facts of a window: Note: [Windows].

    Args:
        parts: Those of its forwards.
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
    """Remembers which windows came, and tells how one that begins goes on.

    Attributes:
        seen: By the first forward's context, windows and their backwards; of contexts
            alone in which some was not of one forward and one backward.
    """

    def __init__(self) -> None:
        self.seen: dict[Context, deque[tuple[Parts, int]]] = {}
        self._to_come: dict[Context, list[tuple[StepInput, list[SizeRule]]]] = {}
        """The forwards behind such a first one, and how their sizes follow from its."""

    def expected(self, first: StepInput) -> StepInput | str:
        """Return the window that a forward begins, or why it is not to be planned.

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
            sizes = tuple(rule(first.sizes) for rule in rules)
            parts.append(part._replace(sizes=sizes))
        return joined(parts)

    def absorb(self, parts: Sequence[StepInput], n_backwards: int) -> None:
        """Take in a window that has come to its end, or has had another backward.

        Args:
            parts: Its forwards.
            n_backwards: How many backwards went through them.
        """
        context = parts[0].context
        if context not in self.seen and len(parts) == n_backwards == 1:
            return
        if self.expected(parts[0]) != joined(parts):
            self._to_come.pop(context, None)
        seen = self.seen.pop(context, None) or deque(maxlen=_LATELY)
        seen.append((tuple(parts), n_backwards))
        self.seen[context] = seen
        if len(self.seen) > MOST_CONTEXTS:
            del self.seen[next(iter(self.seen))]

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, ready for JSON."""
        return {context: list(seen) for context, seen in self.seen.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what another one has seen.

        Args:
            state: What ``state_dict`` returned.
        """
        self.seen = {
            context: deque(
                (
                    (tuple(StepInput(*as_tuples(part)) for part in parts), int(n))
                    for parts, n in seen
                ),
                maxlen=_LATELY,
            )
            for context, seen in state.items()
        }


def covers(whole: StepInput, parts: Sequence[StepInput]) -> bool:
    """Whether forwards are those that a window began to be expected with, or smaller.

    Args:
        whole: The window.
        parts: The forwards so far.
    """
    own = joined(parts)
    is_alike = f"{whole.context}+".startswith(f"{own.context}+")
    return is_alike and all(
        s <= w for s, w in zip(own.sizes, whole.sizes, strict=False)
    )


def _to_come(seen: Sequence[Parts]) -> list[tuple[StepInput, list[SizeRule]]]:
    """Return how the longest windows went on, and the rules of their sizes."""
    longest = max(seen, key=len)
    alike = [p for p in seen if joined(p).context == joined(longest).context]
    roots = [parts[0].sizes for parts in alike]
    found = []
    for at in range(1, len(longest)):
        columns = zip(*(parts[at].sizes for parts in alike), strict=True)
        found.append((alike[-1][at], [SizeRule(roots, column) for column in columns]))
    return found
