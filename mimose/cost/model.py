"""The cost model: everything learned from measured steps, as one immutable value.

A step's `Context` contains everything that changes costs at one shape. For each context
the model has the pattern of the calls: which ran, their families, and how their sizes
follow from the batch's sizes. For each family it has samples of its quantities. Each
change makes a new model with a higher version, which shares all unchanged parts.

Note: [Valid since]
Each plan has the version of its model. An event that invalidates all earlier plans,
such as a step over the budget or a layer that must be kept, raises the version since
which plans are valid. So no cache must be cleared.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from mimose.cost.pattern import Pattern, as_tuples
from mimose.cost.prices import HALF, Prices, prices_of
from mimose.cost.quantity import Quantity
from mimose.cost.series import NEVER, Kind, Series
from mimose.planners import Menu
from mimose.planners.actions import EXACT_MENU
from mimose.types import MOST_CONTEXTS, Context, Measured, Sizes, StepInput

Readings: TypeAlias = Mapping[Quantity, Iterable[tuple[Sizes, float]]]
"""Sizes and values, by series."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Everything known of costs at one moment; immutable."""

    kinds: Mapping[str, Kind]
    """How each kind of quantity is fitted."""
    menu: Menu = EXACT_MENU
    version: int = 0
    """Number of changes so far."""
    valid_since: int = 0
    """Note: [Valid since]."""
    scale: float = 0.0
    """The largest growth of a step in bytes; small errors are relative to it."""
    n_steps: int = 0
    """Number of measured steps."""
    patterns: dict[Context, Pattern] = field(default_factory=dict)
    """Patterns by context, the least recently used first."""
    series: Mapping[Quantity, Series] = field(default_factory=dict)
    copied: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Bytes of copies of weights in what a call holds, by family and action: see
    `mimose.cost.copies`."""
    prices: Prices = field(default_factory=lambda: prices_of("cpu", ""))
    """What moving a byte costs, in FLOPs."""
    precisions: Mapping[str, str] = field(default_factory=dict)
    """Of most FLOPs of a layer's products, by family: see `mimose.cost.prices`."""
    limits: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The allowed actions of layers that do not allow all."""

    def allowed(self, layer: int) -> tuple[str, ...]:
        """Return the allowed actions of a layer, in the menu's order."""
        return self.limits.get(layer, self.menu.names)

    def is_read_again(self, call: Measured) -> bool:
        """Whether recomputations show what a call holds that does not recompute.

        Autocast casts an input once in a recomputation, where it is a leaf, and for
        each reader in a forward. The readings would not agree.
        """
        may_recompute = self.menu.least in self.allowed(call.layer)
        return may_recompute and not self.menu.spec(call.action).recomputes

    @property
    def byte_flops(self) -> float:
        """FLOPs that take as long as moving a byte, in the fastest products seen."""
        seen = set(self.precisions.values()) or {HALF}
        return max(map(self.prices.of, seen))

    def byte_price(self) -> tuple[float, str, str] | None:
        """Return `byte_flops`, its precision and its source; None without products."""
        for precision in sorted({*self.precisions.values()}, key=self.prices.of)[-1:]:
            return self.byte_flops, precision, self.prices.source
        return None

    def slowness(self, family: str) -> float:
        """Return how much longer a FLOP of a family takes than one of `byte_flops`."""
        return self.byte_flops / self.prices.of(self.precisions.get(family, HALF))

    def pattern(self, step_input: StepInput) -> Pattern:
        """Return the pattern of the calls that ran in a step, or may run in it.

        Args:
            step_input: The step's input; its context is known.
        """
        pattern = self.patterns[step_input.context]
        if step_input.counts:
            return pattern.ran(step_input.counts)
        return pattern.expected(step_input.sizes)

    def predict(self, quantity: Quantity, sizes: Sizes) -> float:
        """Return what a series predicts at some sizes; 0 if it was never measured."""
        series = self.series.get(quantity)
        return 0.0 if series is None else series.predict(sizes, self.scale)

    def why_unknown(self, quantity: Quantity, sizes: Sizes) -> str:
        """Return why this prediction is not trusted; "" if it is."""
        series = self.series.get(quantity)
        return NEVER if series is None else series.why_unknown(sizes, self.scale)

    def changed(self, **fields: Any) -> CostModel:
        """Return the next version, with other values of some fields."""
        return replace(self, version=self.version + 1, **fields)

    def with_readings(self, readings: Readings, **fields: Any) -> CostModel:
        """Return the next version, with more readings.

        Args:
            readings: The readings, by series.
            fields: Other fields that change.
        """
        series = dict(self.series)
        for key, more in readings.items():
            old = series.get(key) or Series(self.kinds[key.kind])
            series[key] = old.with_readings(more)
        return self.changed(series=series, **fields).bounded()

    def used(self, context: Context) -> CostModel:
        """Return the model in which a known context was used last."""
        patterns = dict(self.patterns)
        patterns[context] = patterns.pop(context)
        return replace(self, patterns=patterns)

    def missing(self, step_input: StepInput) -> CostModel:
        """Return the next version, which knows that more ran than it predicted.

        Args:
            step_input: The step's input, with its counts of calls.
        """
        pattern = self.patterns.get(step_input.context)
        if pattern is None:
            return self
        pattern = pattern.missing(step_input.counts)
        return self.distrusted(patterns={**self.patterns, step_input.context: pattern})

    def forgotten(self, context: Context) -> CostModel:
        """Return the next version without a context, but with its families' series."""
        patterns = {c: p for c, p in self.patterns.items() if c != context}
        return self.distrusted(patterns=patterns)

    def restricted(self, layer: int, actions: Iterable[str]) -> CostModel:
        """Return the next version, in which a layer allows only some actions."""
        allowed = {*actions} & {*self.allowed(layer)}
        kept = tuple(name for name in self.menu.names if name in allowed)
        return self.distrusted(limits={**self.limits, layer: kept})

    def distrusted(self, **fields: Any) -> CostModel:
        """Return the next version, in which all earlier plans are invalid."""
        return self.changed(valid_since=self.version + 1, **fields)

    def renewed(self, since: CostModel) -> CostModel:
        """Return this model as the version after a later one, which is forgotten.

        Args:
            since: The later model.
        """
        version = since.version + 1
        return replace(self, version=version, valid_since=version)

    def bounded(self) -> CostModel:
        """Return the model without contexts over the limit: Note: [Whose series]."""
        if len(self.patterns) <= MOST_CONTEXTS:
            return self
        patterns = dict(list(self.patterns.items())[-MOST_CONTEXTS:])
        families = {e.family for p in patterns.values() for e in p.calls}
        owners = {*patterns, *(p.structure for p in patterns.values()), *families}
        series = {key: s for key, s in self.series.items() if key.owner in owners}
        copied = {family: n for family, n in self.copied.items() if family in owners}
        precisions = {f: p for f, p in self.precisions.items() if f in owners}
        return replace(
            self,
            patterns=patterns,
            series=series,
            copied=copied,
            precisions=precisions,
        )

    def make_fits(self, base: CostModel | None = None) -> Iterator[None]:
        """Make and store the fits that readers will need, one by one.

        Args:
            base: An earlier model whose fits exist; None for none.
        """
        known: Mapping[Quantity, Series] = {} if base is None else base.series
        for key, series in self.series.items():
            if series is not known.get(key) and not series.has_fit:
                series.fit()
                yield
        for context, pattern in self.patterns.items():
            if base is None or pattern is not base.patterns.get(context):
                pattern.make_rules()
                yield

    def joined(self, base: CostModel, now: CostModel) -> CostModel:
        """Return this model, made by lessons, with changes that steps made meanwhile.

        Args:
            base: The model with which the lessons began.
            now: That model with the steps' changes: see `mimose.cost.learner`.
        """
        gone = base.patterns.keys() - now.patterns.keys()
        version = max(self.version, now.version) + 1
        has_distrusted = self.valid_since > base.valid_since
        return replace(
            self,
            version=version,
            valid_since=version if has_distrusted else now.valid_since,
            patterns={c: p for c, p in self.patterns.items() if c not in gone},
            limits=now.limits,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return everything that was learned, as JSON values."""
        return {
            "scale": self.scale,
            "n_steps": self.n_steps,
            "limits": {str(layer): list(names) for layer, names in self.limits.items()},
            "copied": {family: dict(held) for family, held in self.copied.items()},
            "precisions": dict(self.precisions),
            "patterns": {
                context: pattern.state_dict()
                for context, pattern in self.patterns.items()
            },
            "series": [[key, s.state_dict()] for key, s in self.series.items()],
        }

    def loaded(self, state: Mapping[str, Any]) -> CostModel:
        """Return the next version, with everything replaced by a saved state.

        Args:
            state: What ``state_dict`` of a model with the same menu returned.
        """
        series = {}
        for said_key, said in state["series"]:
            quantity = Quantity(*as_tuples(said_key))
            series[quantity] = Series.from_state(self.kinds[quantity.kind], said)
        return self.distrusted(
            scale=float(state["scale"]),
            n_steps=int(state["n_steps"]),
            limits={int(u): as_tuples(names) for u, names in state["limits"].items()},
            copied=state["copied"],
            precisions=state["precisions"],
            patterns={c: Pattern.from_state(p) for c, p in state["patterns"].items()},
            series=series,
        )


def numbers(sizes: Sizes) -> Sizes:
    """Replace symbolic sizes of jagged outputs by 0; the input has the same sizes."""
    return tuple([size if isinstance(size, int) else 0 for size in sizes])
