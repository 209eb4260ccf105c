"""Which steps follow a batch, and at which sizes: learned from those that did.

A loop may call the model with a batch's tensors as they are, with some of them, padded,
cut, or in parts. So what ran after each batch is remembered: a call is told apart from
others by its place behind the batch and by all but its sizes, and each of its sizes
follows from the batch's by the simplest rule that all batches show.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np

from mimose.predictors import SizeMap
from mimose.types import MOST_CONTEXTS, Sizes, StepInput

_MOST_CALLS = 32
"""Calls of one kind of batch that are told apart."""
_MOST_ROWS = 16
"""Batches remembered of each."""
_RECENT = 32
"""Batches after which a call that did not come again is not expected any more."""
_MOST_FAILURES = 8
"""Times that no rule was found; then a call is not foretold any more."""


class Forecasts:
    """Foretells the steps of batches that are waiting."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, _Kind] = {}

    def learn(self, key: Hashable, sizes: Sizes, steps: Sequence[StepInput]) -> None:
        """Take in which steps followed a batch.

        Args:
            key: The kind of batch.
            sizes: Its sizes.
            steps: Those that ran before the next batch, in order.
        """
        if not sizes:
            return  # texts, say, which the loop makes tensors of
        kind = self._kinds.pop(key, None) or _Kind()
        self._kinds[key] = kind
        if len(self._kinds) > MOST_CONTEXTS:
            del self._kinds[next(iter(self._kinds))]
        kind.learn(sizes, steps)

    def of(self, key: Hashable, sizes: Sizes) -> list[StepInput]:
        """Return the steps that a batch may be followed by; [] where none is known.

        Where gradients accumulate, batches alike are followed by unlike steps by
        turns: all of them are told.

        Args:
            key: The kind of batch.
            sizes: Its sizes.
        """
        kind = self._kinds.get(key)
        return [] if kind is None else kind.steps(sizes)


class _Kind:
    """Batches of one kind."""

    def __init__(self) -> None:
        self._n_batches = 0
        self._calls: dict[tuple[int, StepInput], _Call] = {}
        """By place and all but the sizes."""

    def learn(self, sizes: Sizes, steps: Sequence[StepInput]) -> None:
        self._n_batches += 1
        for place, step in enumerate(steps):
            key = place, step._replace(sizes=())
            call = self._calls.pop(key, None)
            if call is None or len(call.rows[-1][1]) != len(step.sizes):
                call = _Call()
            self._calls[key] = call
            call.learn(sizes, step.sizes, self._n_batches)
            if len(self._calls) > _MOST_CALLS:
                del self._calls[next(iter(self._calls))]

    def steps(self, sizes: Sizes) -> list[StepInput]:
        found = []
        for (_, step), call in self._calls.items():
            if call.last > self._n_batches - _RECENT:
                own = call.sizes(sizes)
                if own is not None:
                    found.append(step._replace(sizes=own))
        return list(dict.fromkeys(found))


class _Call:
    """One call behind batches of one kind."""

    def __init__(self) -> None:
        self.rows: list[tuple[Sizes, Sizes]] = []
        """The batch's sizes and the call's."""
        self.last = 0
        """The batch that it came with last, counted from 1."""
        self._rules: list[SizeMap] | None = None
        self._n_failed = 0

    def learn(self, batch: Sizes, own: Sizes, number: int) -> None:
        self.last = number
        row = batch, own
        if row in self.rows:
            return
        if self.sizes(batch) != own:
            self._rules = None
        self.rows = [*self.rows, row][-_MOST_ROWS:]

    def sizes(self, batch: Sizes) -> Sizes | None:
        """Return the call's sizes behind a batch; None where no rule tells them."""
        for seen, own in reversed(self.rows):
            if seen == batch:
                return own
        if len(self.rows) < 2 or self._n_failed >= _MOST_FAILURES:
            return None
        if self._rules is None:
            self._rules = self._fitted()
        if not all(rule.found_ for rule in self._rules):
            return None
        return tuple(int(rule.predict_one(batch)) for rule in self._rules)

    def _fitted(self) -> list[SizeMap]:
        batches = np.array([batch for batch, _ in self.rows])
        columns = np.array([own for _, own in self.rows]).T
        rules = [SizeMap().fit(batches, column) for column in columns]
        if not all(rule.found_ for rule in rules):
            self._n_failed += 1
        return rules
