"""Learns how the sizes of the model's inputs follow from the samples of a batch.

Note: [Which step trains a batch]
Draws and steps come in turns: some draws, then the steps until the next draw. A loader
with workers draws ahead before the first step. From then on each turn draws as many
batches as the loop trains in a turn: one, or several whose gradients are accumulated.
So the steps of a turn train as many of the waiting batches as the turn draws, the
first ones; those of the first turn, as many as the second turn draws. If there are as
many steps as batches, they are paired in order. Several equal steps of one batch are
one that is repeated. All others teach nothing.

Note: [Rules of sizes]
A size may follow a feature of the batch, such as its samples or the sum of a length: by
a line, rounded up to a multiple, perhaps cut at a most. With g the greatest common
divisor of the sizes, a feature x explains them if there is a line with
``size - g < a x + b <= size``. At first several features do; then the largest of their
predictions counts, or of those without a rest, if some explain so many batches that
this is no chance. If none does, the bound is the largest ``size / x`` of batches about
as large, unless ``size / x`` grows with the batch for every x.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np
from cachetools import LRUCache
from numpy.typing import NDArray

from mimose.exceptions import MimoseError
from mimose.records import RankWaits
from mimose.runtime.last_steps import LastSteps
from mimose.types import MOST_CONTEXTS, Sizes, StepInput

_Part = TypeVar("_Part")
_Numbers: TypeAlias = NDArray[np.float64]
Drawn: TypeAlias = tuple[int, ...]
"""A batch: its number of samples, the sum of each length, and the largest of each."""

_LATELY = 64
"""Rules explain the last pairs."""
_FEWEST, _FEWEST_OF_BOUND, _ENOUGH = 2, 8, 16
"""Different batches without which there is no rule, and no bound. With so many, a size
without a bound is an error."""
_GROWS, _FOLLOWS = 1.5, 0.5
"""A bound's ``size / x`` grows if it follows the order of the batches, by their ranks'
correlation, and its largest value is by this factor larger in their larger half."""
_MOST_STEPS = 64
"""A turn with more steps teaches nothing."""
_SPECIAL = (-1, 1, 2)
"""Elements that collation may add to each sample."""


class _Line(NamedTuple):
    """A line over one feature, rounded up to a multiple, and cut at a most."""

    feature: int
    slope: float
    offset: float = 0.0
    multiple: int = 1
    most: float = math.inf

    def at(self, features: _Numbers) -> _Numbers:
        """Return (n,) sizes; `features` is what `_features` returns."""
        size = self.slope * features[self.feature] + self.offset
        size = self.multiple * np.ceil(size / self.multiple - 1e-9)
        found: _Numbers = np.minimum(size, self.most)
        return found


class _Bound(NamedTuple):
    """The largest ratio of a size to a feature, of batches about as large or larger."""

    feature: int
    known: _Numbers
    """(n,) The feature of known batches, the largest first."""
    ratios: _Numbers
    """(n,) Their sizes divided by it."""

    def at(self, features: _Numbers) -> _Numbers:
        """Return (1,) sizes; `features` is that of one batch."""
        x = features[self.feature]
        n = max(_FEWEST_OF_BOUND, int(np.sum(self.known >= x[0] / 2.0)))
        found: _Numbers = np.ceil(self.ratios[:n].max() * x - 1e-9)
        return found


class Collation:
    """Pairs the batches that a sampler draws with steps, and predicts sizes from them.

    Args:
        last_steps: The steps that a shape refers to.

    Attributes:
        n_steps: Training forwards that have begun a backward's window.
        most: The most samples of a batch that was trained, and the most elements (the
            sum of all lengths); 0 until a step is paired with a batch.
        waits: How long ranks waited for each other, as predicted; None if not known.
        least_rows_share: The share of the tokens a second that ``min_rows`` costs, as
            predicted, in the mean over lengths; 0 if not known.
    """

    def __init__(self, last_steps: LastSteps) -> None:
        self._last = last_steps
        last_steps.listen(self.stepped)
        self._pairs: LRUCache[str, deque[tuple[Drawn, Sizes]]]
        self._pairs = LRUCache(MOST_CONTEXTS)
        """Batches and the sizes of their steps, by structure and number of lengths."""
        self._loaded: set[str] = set()
        """The keys whose pairs are all from a loaded state."""
        self._rules: dict[tuple[str, int], Sequence[_Line | _Bound]] = {}
        self.most, self.n_steps = (0, 0), 0
        self.waits: RankWaits | None = None
        self.least_rows_share = 0.0
        self._waiting: deque[Drawn] = deque()
        self._steps: list[tuple[str, Sizes]] = []
        self._is_split = False
        self._n_open = 0
        self.begin()

    def begin(self) -> None:
        """Begin to draw anew: batches that still wait are not trained any more."""
        n_over = len(self._waiting) - self._n_open
        self._pair(n_over, [] if self._is_split else self._steps)
        self._steps, self._n_drawn, self._is_split = [], self._n_open, False
        self._n_open = 0
        self._is_first = True
        self._of_first: list[tuple[str, Sizes]] | None = None
        """The steps of the first turn, while the second one draws."""

    def keep(self, n_open: int) -> None:
        """Say that the last batches that wait are trained after the next `begin`.

        Args:
            n_open: How many; their gradients are accumulated with those of batches that
                are drawn then.
        """
        self._n_open = n_open

    def drew(self, batch: Drawn) -> None:
        """Record a batch that is drawn: Note: [Which step trains a batch]."""
        self.end_turn()
        self._waiting.append(batch)
        self._n_drawn += 1

    def predicted(self, seconds: Sequence[float]) -> None:
        """Record the predicted seconds of each rank in a step that is drawn."""
        waits = self.waits or RankWaits(0, 0.0, 0.0, (0,) * len(seconds))
        slowest = [own == max(seconds) for own in seconds].index(True)
        self.waits = RankWaits(
            waits.n_steps + 1,
            waits.seconds + max(seconds),
            waits.waited + max(seconds) - sum(seconds) / len(seconds),
            tuple(n + (r == slowest) for r, n in enumerate(waits.slowest)),
        )

    def end_turn(self) -> None:
        """Pair the steps since the last draw, if there were any."""
        if not self._steps:
            return
        steps = [] if self._is_split else self._steps
        if self._is_first and self._n_drawn > 1:
            self._of_first = steps
        else:
            self._pair(self._n_drawn, steps)
        self._steps, self._n_drawn, self._is_split = [], 0, False
        self._is_first = False

    def stepped(self, step_input: StepInput) -> None:
        """Record a training forward that begins, the first one before a backward."""
        self.n_steps += 1
        if not self._waiting:
            return
        if self._of_first is not None:
            self._pair(self._n_drawn, self._of_first)
            self._of_first = None
        if len(self._steps) <= _MOST_STEPS:
            self._steps.append((step_input.structure, step_input.sizes))

    def split(self, parts: Iterable[_Part]) -> Iterator[_Part]:
        """Yield the parts of a batch; if there are several, its steps teach nothing."""
        for n_before, part in enumerate(parts):
            self._is_split |= n_before > 0
            yield part

    def _pair(self, n: int, steps: Sequence[tuple[str, Sizes]]) -> None:
        """Pair the first waiting batches with the steps of a turn."""
        batches = [self._waiting.popleft() for _ in range(min(n, len(self._waiting)))]
        for structure in {structure for structure, _ in steps}:
            own = [sizes for other, sizes in steps if other == structure]
            if n == 1 and len(set(own)) == 1:
                own = own[:1]
            if len(own) == n:
                for pair in zip(batches, own, strict=True):
                    self._learn(f"{structure}/{len(pair[0])}", *pair)

    def _learn(self, key: str, batch: Drawn, sizes: Sizes) -> None:
        if key in self._loaded:
            self._loaded.discard(key)
            foretold = [self._predict(key, at, batch) for at in range(len(sizes))]
            if any(n and size > n for n, size in zip(foretold, sizes, strict=True)):
                del self._pairs[key]  # other data, or another collation
        known = self._pairs.setdefault(key, deque(maxlen=_LATELY))
        known.append((batch, sizes))
        self._rules.clear()
        samples, elements = self.most
        n_elements = sum(batch[1 : 1 + len(batch) // 2])
        self.most = max(samples, batch[0]), max(elements, n_elements)

    def shape(self, batch: Drawn) -> Mapping[str, int] | None:
        """Return the sizes of a batch by name, or upper bounds of them.

        Args:
            batch: Its samples, the sum of each length, and the largest of each.

        Returns:
            The sizes that vary; None if too few steps could be paired with batches.

        Raises:
            MimoseError: A size has no bound; or no step was run and no state loaded.
        """
        step_input, table = self._last.asked({})
        structure, _, _ = step_input.structure.partition("+")
        key, found = f"{structure}/{len(batch)}", {}
        for name in table.named(step_input.sizes[: len(table.names)]):
            column = table.column(name)
            assert column is not None  # it is a name of the table
            size = self._predict(key, column, batch)
            if size is None:
                self._raise_if_unbounded(key, name, column)
                return None
            found[name] = size
        return found

    def pads(self, n_lengths: int) -> bool:
        """Whether a size follows from the longest sample, so that others are padded."""
        whole, half = n_lengths * (1000,), n_lengths * (500,)
        return self.shape((2, *whole, *whole)) != self.shape((2, *whole, *half))

    def _predict(self, key: str, column: int, batch: Drawn) -> int | None:
        if key not in self._pairs:
            return None
        rules = self._rules.get((key, column))
        if rules is None:
            batches, sizes = self._known(key, column)
            may_be_chance = len(self._pairs[key]) < _FEWEST_OF_BOUND
            rules = _rules(batches, sizes, may_be_chance)
            self._rules[key, column] = rules
        features = _features(np.array([batch]))
        found = [int(line.at(features)[0]) for line in rules]
        return max(1, *found) if found else None

    def _known(self, key: str, column: int) -> tuple[NDArray[np.int64], _Numbers]:
        """Return the different batches, and the largest size of each."""
        known: dict[Drawn, int] = {}
        for batch, sizes in self._pairs[key]:
            known[batch] = max(known.get(batch, 0), sizes[column])
        return np.array(list(known)), np.array(list(known.values()), dtype=float)

    def _raise_if_unbounded(self, key: str, name: str, column: int) -> None:
        if key in self._loaded or len(self._pairs.get(key, ())) < _ENOUGH:
            return
        batches, sizes = self._known(key, column)
        if len(batches) < _ENOUGH:
            return
        at = int(sizes.argmax())
        msg = (
            f"mimose cannot tell how large {name} of the model's inputs "
            f"becomes in a larger batch: so far it was {sizes.min():.0f} to "
            f"{sizes[at]:.0f} (with {batches[at][0]} samples), and it grows faster "
            f"than the number of samples, the sum and the largest of their lengths. "
            f"Give lengths that it follows from, as {{{name!r}: lengths}}, or train "
            f"with a fixed number of samples"
        )
        raise MimoseError(msg)

    def state_dict(self) -> dict[str, Any]:
        """Return the pairs as JSON values."""
        return {
            "pairs": {k: list(v) for k, v in self._pairs.items()},
            "most": self.most,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the pairs.

        Args:
            state: What ``state_dict`` returned; empty in an older state.
        """
        self._pairs.clear()
        self._rules.clear()
        for key, pairs in state.get("pairs", {}).items():
            read = ((tuple(map(int, a)), tuple(map(int, b))) for a, b in pairs)
            self._pairs[key] = deque(read, maxlen=_LATELY)
        self._loaded = set(self._pairs)
        samples, elements = state.get("most", (0, 0))
        self.most = int(samples), int(elements)


def _features(batches: NDArray[np.int64]) -> _Numbers:
    """Return (n_features, n_batches): what a size may follow from, and ones.

    Args:
        batches: (n_batches, 1 + 2 * n_lengths) As `Drawn`.
    """
    ends = [1, 1 + batches.shape[1] // 2]
    samples, sums, largest = np.split(batches.T.astype(float), ends)
    special = [sums + n * samples for n in _SPECIAL]
    padded, ones = samples * largest, np.ones_like(samples)
    return np.vstack([samples, sums, largest, padded, padded * largest, *special, ones])


def _rules(
    batches: NDArray[np.int64], sizes: _Numbers, may_be_chance: bool
) -> Sequence[_Line | _Bound]:
    """Return the lines that explain sizes, else a bound; none if there is none.

    Args:
        batches: As for `_features`; no two are equal.
        sizes: (n_batches,) One size of each.
        may_be_chance: Whether lines without a rest may be so by chance.
    """
    if len(sizes) < _FEWEST:
        return []
    features = _features(batches)
    if np.ptp(sizes) == 0:
        return [_Line(-1, sizes[0])]
    found = _lines(features, sizes, may_be_chance)
    is_most = sizes == sizes.max()
    if not found and np.sum(is_most) > 1 and np.sum(~is_most) >= _FEWEST:
        most = sizes.max()
        for line in _lines(features[:, ~is_most], sizes[~is_most], True):
            above = line.at(features[:, is_most])
            if above.min() >= most and np.sum(above > most) > 1:
                found.append(line._replace(most=most))
    if found or len(sizes) < _FEWEST_OF_BOUND:
        return found
    n_lengths = batches.shape[1] // 2
    return _bound(features, sizes, [batches[:, 0], batches[:, 1:-n_lengths].sum(1)])


def _lines(features: _Numbers, sizes: _Numbers, may_be_chance: bool) -> list[_Line]:
    """Return lines for each feature that explains the sizes: [Rules of sizes]."""
    found, exact = [], []
    multiple = int(np.gcd.reduce(sizes.astype(np.int64)))
    rise = sizes[:, None] - sizes
    for at, x in enumerate(features):
        run = x[:, None] - x
        is_ahead = run > 0.0
        if not is_ahead.any() or (np.abs(rise[run == 0.0]) >= multiple).any():
            continue
        low = max(0.0, ((rise - multiple)[is_ahead] / run[is_ahead]).max())
        high = ((rise + multiple)[is_ahead] / run[is_ahead]).min()
        if low < high:  # the largest whole slope, or else the least and the largest
            whole, near = math.ceil(high) - 1.0, 1e-3 * (high - low)
            for slope in (whole,) if whole > low else (low + near, high - near):
                offset = float((sizes - slope * x).min())
                found.append(_Line(at, slope, offset, multiple))
            slope = float(rise[x.argmax(), x.argmin()] / np.ptp(x))
            line = _Line(at, slope, float(sizes.max() - slope * x.max()))
            if (line.at(features) == sizes).all() and not may_be_chance:
                exact.append(line)
    return exact or found


def _correlation(*columns: _Numbers | NDArray[np.int64]) -> float:
    """Return the correlation of the ranks of two columns; 0 if one is constant."""
    ranks = [np.unique(column, return_inverse=True)[1] for column in columns]
    if not all(map(np.ptp, ranks)):
        return 0.0
    return float(np.corrcoef(np.stack(ranks)).ravel()[1])


def _bound(
    features: _Numbers, sizes: _Numbers, orders: Sequence[NDArray[np.int64]]
) -> list[_Bound]:
    """Return the tightest bound of ``size / x`` as a list of one; none if all grow.

    Args:
        features: (n_features, n_batches)
        sizes: (n_batches,)
        orders: Measures of a batch, with any of which ``size / x`` may grow.
    """
    best: tuple[float, _Bound] | None = None
    for at, x in enumerate(features):
        if x.min() <= 0.0:
            continue
        ratio = sizes / x
        tightness = ratio.max() / ratio.mean()
        halves = [(ratio[o > np.median(o)], ratio[o <= np.median(o)]) for o in orders]
        grows = any(
            len(large)
            and _correlation(ratio, order) > _FOLLOWS
            and np.median(large) > _GROWS * np.median(small)
            and large.max() > _GROWS * small.max()
            for order, (large, small) in zip(orders, halves, strict=True)
        )
        if not grows and (best is None or tightness < best[0]):
            order = np.argsort(-x, kind="stable")
            best = tightness, _Bound(at, x[order], ratio[order])
    return [] if best is None else [best[1]]
