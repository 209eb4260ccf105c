"""Which forwards make up a step, and what is to be expected once the first is there.

Note: [Windows]
What runs before a backward is one step for memory, however many forwards that are:
each holds what it holds until the backward. So a window, the forwards up to a backward,
is one step of all their events. Its context is that of its forwards in order, its sizes
are theirs, one behind the other, and all that is learned, planned and predicted of
steps is of windows too. A window of one forward and one backward is an ordinary step.

When the first forward begins, the later ones are not known. As windows mostly come as
they came before, what followed last time is expected: after any window, or after the
same one, two, four or eight, whichever was right of late. (A generator and its critic
take turns.) Where even that was wrong twice of late, the longest that began so of late
is expected: a first forward that leaves no room for another one passes the budget if it
comes. Sizes to come are told by the rules that they followed (mostly those of the first
forward); where they follow none, they are the largest seen, or likely ones.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any, NamedTuple, TypeAlias

from mimose.cost.patterns import as_tuples
from mimose.cost.size_rules import SizeRule
from mimose.types import MOST_CONTEXTS, Context, Sizes, StepInput

_DEPTHS = (8, 4, 2, 1, 0)
"""How many windows before are looked at."""
_FADING = 0.7
"""By how much it counts less, with each window, how often a depth was right."""
_MOST_KNOWN = 2048
_MOST_ROWS = 32
"""Distinct sizes of a kind of window that are remembered."""
_FEW_ROWS = 16
"""With fewer, the largest size seen may not be near the largest to come."""
_MOST_BEYOND = 1.5
"""It is taken to be no larger than so many times that."""
_TIMES = "*"
"""Stands before the number of backwards in a window's context."""
_LATELY = 32
"""Windows in which what is relied on was wrong once at the most: where the loop has
changed, it is wrong once."""
_STILL = 64
"""Windows after which one that did not come again is not expected any more."""
MOST_FORWARDS = 16
"""Longer windows are not planned."""

Start: TypeAlias = tuple[tuple[Context, ...], tuple[Context, ...]]
"""The windows before, and the forwards of this one so far."""


class Part(NamedTuple):
    """A forward of a window, but for its sizes."""

    context: Context
    structure: str
    n_sizes: int


class Ending(NamedTuple):
    """How a window went on."""

    parts: tuple[Part, ...]
    """The forwards to come."""
    n_backwards: int


def joined(parts: Sequence[StepInput], n_backwards: int = 1) -> StepInput:
    """Return the facts of a window: Note: [Windows].

    Args:
        parts: Those of its forwards.
        n_backwards: How often what they held is gone through.
    """
    if len(parts) == 1 and n_backwards == 1:
        return parts[0]
    times = f"{_TIMES}{n_backwards}" if n_backwards > 1 else ""
    return StepInput(
        "+".join(part.context for part in parts) + times,
        tuple(size for part in parts for size in part.sizes),
        parts[0].has_gradients,
        "+".join(part.structure for part in parts) + times,
    )


def has_several_backwards(context: Context) -> bool:
    """Whether several backwards go through the forwards of a window.

    Args:
        context: Of `joined`.
    """
    return _TIMES in context


def _likely(own: Sizes, rows: Collection[Sizes], at: int, share: float) -> int:
    """Return a size to come that follows no rule.

    The median is that of sizes, or of their ratios to the forwards before, whichever
    scatter less. As long as few were seen the largest may be larger: as large to the
    forwards before as one has been.

    Args:
        own: Sizes of the forwards before.
        rows: All sizes of windows seen.
        at: Which of the sizes behind those.
        share: Of sizes seen, so many are no larger.
    """
    n_own, scale = len(own), sum(own)
    seen = sorted(row[n_own + at] for row in rows)
    ratios = sorted(row[n_own + at] / max(1, sum(row[:n_own])) for row in rows)
    index = int(share * (len(seen) - 1))
    found, by_ratio = seen[index], math.ceil(ratios[index] * scale)
    if share == 1.0 and len(seen) < _FEW_ROWS:
        return max(found, min(int(_MOST_BEYOND * found), by_ratio))
    if 0.0 < share < 1.0 and _scatter(ratios) < _scatter(seen):
        return min(by_ratio, seen[-1])
    return found


def _scatter(values: Sequence[float]) -> float:
    """Return the standard deviation as a share of the mean."""
    return pstdev(values) / max(1e-9, fmean(values))


def _length(ending: Ending) -> tuple[int, int]:
    return len(ending.parts), ending.n_backwards


class Windows:
    """Remembers which windows came, and foretells how the one that begins goes on."""

    def __init__(self) -> None:
        self._endings: dict[Start, Ending] = {}
        self._rows: dict[tuple[Context, ...], dict[Sizes, None]] = {}
        self._scores = dict.fromkeys(_DEPTHS, 0.0)
        self._n_noted = 0
        self._wrong = {depth: deque([-_LATELY] * 2, maxlen=2) for depth in _DEPTHS}
        """When each depth was wrong, the last two times."""
        self._came: dict[tuple[Context, ...], dict[Ending, int]] = {}
        """When windows that began so went on as they did, last."""
        self._past: deque[Context] = deque(maxlen=max(_DEPTHS))
        self._rules: dict[tuple[tuple[Context, ...], int], list[SizeRule]] = {}

    def ending(self, parts: Sequence[StepInput]) -> Ending:
        """Return how the window that begins so is expected to go on.

        Args:
            parts: The forwards so far.
        """
        contexts = tuple(part.context for part in parts)
        found = self._told(contexts)
        if not found:
            return Ending((), 1)
        best = max(found, key=lambda depth: (self._scores[depth], depth))
        if self._n_noted - self._wrong[best][0] >= _LATELY:
            return found[best]
        return max(self._late(contexts), key=_length, default=found[best])

    def _late(self, so_far: tuple[Context, ...]) -> list[Ending]:
        """Return how windows that began so went on of late."""
        return [
            ending
            for ending, at in self._came.get(so_far, {}).items()
            if self._n_noted - at < _STILL and self._knows(so_far, ending)
        ]

    def _told(self, so_far: tuple[Context, ...]) -> dict[int, Ending]:
        """Return what each depth foretells."""
        told = {}
        for past in self._pasts():
            ending = self._endings.get((past, so_far))
            if ending is not None and self._knows(so_far, ending):
                told[len(past)] = ending
        return told

    def _knows(self, so_far: tuple[Context, ...], ending: Ending) -> bool:
        """Whether sizes of such a window are remembered."""
        return so_far + tuple(p.context for p in ending.parts) in self._rows

    @property
    def are_told(self) -> bool:
        """Whether any window was not of one forward and one backward."""
        return bool(self._endings)

    def to_come(
        self,
        parts: Sequence[StepInput],
        ending: Ending,
        *,
        share: float = 1.0,
    ) -> tuple[list[StepInput], bool]:
        """Return the forwards to come, and whether all their sizes follow a rule.

        Those that follow none are the largest seen, or smaller.

        Args:
            parts: The forwards so far.
            ending: How the window is expected to go on.
            share: Of sizes seen, so many are no larger.
        """
        if not ending.parts:
            return [], True
        own = tuple(size for part in parts for size in part.sizes)
        so_far = tuple(part.context for part in parts)
        contexts = so_far + tuple(part.context for part in ending.parts)
        rows = self._rows[contexts]
        key = contexts, len(own)
        if key not in self._rules:
            columns = list(zip(*rows, strict=True))
            roots = list(zip(*columns[: len(own)], strict=True))
            self._rules[key] = [SizeRule(roots, c) for c in columns[len(own) :]]
        sizes = [
            rule(own) if rule.is_found else _likely(own, rows, at, share)
            for at, rule in enumerate(self._rules[key])
        ]
        found = []
        for part in ending.parts:
            mine, sizes = tuple(sizes[: part.n_sizes]), sizes[part.n_sizes :]
            is_with = parts[0].has_gradients
            found.append(StepInput(part.context, mine, is_with, part.structure))
        return found, all(rule.is_found for rule in self._rules[key])

    def absorb(self, parts: Sequence[StepInput], n_backwards: int = 1) -> None:
        """Take in a window that has come to its end.

        Args:
            parts: Its forwards.
            n_backwards: How many backwards went through them.
        """
        own = joined(parts, n_backwards)
        if self._endings or len(parts) > 1 or n_backwards > 1:
            self._note(parts, n_backwards)
        self._past.append(own.context)

    def correct(self, parts: Sequence[StepInput], n_backwards: int) -> None:
        """Take note that the last window had more backwards than was told.

        Args:
            parts: Its forwards.
            n_backwards: How many it had.
        """
        if self._past:
            self._past.pop()
        self.absorb(parts, n_backwards)

    def _note(self, parts: Sequence[StepInput], n_backwards: int) -> None:
        contexts = tuple(part.context for part in parts)
        kinds = tuple(Part(p.context, p.structure, len(p.sizes)) for p in parts)
        came = Ending(kinds[1:], n_backwards)
        self._n_noted += 1
        for depth, told in self._told(contexts[:1]).items():
            score = _FADING * self._scores[depth]
            self._scores[depth] = score + (1.0 - _FADING) * (told == came)
            if told != came:
                self._wrong[depth].append(self._n_noted)
        for past in self._pasts():
            for n_parts in range(1, len(parts) + 1):
                start = past, contexts[:n_parts]
                self._endings.pop(start, None)
                self._endings[start] = Ending(kinds[n_parts:], n_backwards)
        for n_parts in range(1, len(parts) + 1):
            self._note_end(contexts[:n_parts], Ending(kinds[n_parts:], n_backwards))
        while len(self._endings) > _MOST_KNOWN:
            del self._endings[next(iter(self._endings))]
        self._note_sizes(contexts, tuple(s for part in parts for s in part.sizes))

    def _note_end(self, so_far: tuple[Context, ...], ending: Ending) -> None:
        came = self._came.setdefault(so_far, {})
        came[ending] = self._n_noted
        if len(came) > MOST_FORWARDS:
            del came[min(came, key=lambda each: came[each])]
        if len(self._came) > _MOST_KNOWN:
            del self._came[next(iter(self._came))]

    def _note_sizes(self, contexts: tuple[Context, ...], sizes: Sizes) -> None:
        rows = self._rows.setdefault(contexts, {})
        if len(self._rows) > MOST_CONTEXTS:
            del self._rows[next(iter(self._rows))]
        if rows and len(next(iter(rows))) != len(sizes):
            rows.clear()
        if sizes in rows:
            return
        rows[sizes] = None
        if len(rows) > _MOST_ROWS:
            most = tuple(map(max, *rows))
            least = (r for r in rows if not any(map(int.__eq__, r, most)))
            del rows[next(least, next(iter(rows)))]
        for key in [key for key in self._rules if key[0] == contexts]:
            del self._rules[key]

    def _pasts(self) -> Iterator[tuple[Context, ...]]:
        past = tuple(self._past)
        for depth in _DEPTHS:
            if depth <= len(past):
                yield past[len(past) - depth :]

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return what was seen, ready for JSON."""
        return {
            "endings": [[*start, ending] for start, ending in self._endings.items()],
            "rows": [[contexts, list(rows)] for contexts, rows in self._rows.items()],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another one has seen.

        Args:
            state: What ``state_dict`` returned.
        """
        self._past.clear()
        self._rules.clear()
        self._endings = {
            (as_tuples(past), as_tuples(so_far)): Ending(
                tuple(Part(*part) for part in parts), int(n_backwards)
            )
            for past, so_far, (parts, n_backwards) in state.get("endings", ())
        }
        self._rows = {
            as_tuples(contexts): dict.fromkeys(as_tuples(rows))
            for contexts, rows in state.get("rows", ())
        }
