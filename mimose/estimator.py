"""What has been learned: patterns of events, and series for every quantity.

A step's `Context` says all that changes costs at one shape. For each context the
estimator keeps the pattern of the events (which ran, of what family, how their own
sizes follow from the batch's), and for each family the series of its quantities. From
these it fills a `PlanningProblem` for any shape of the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mimose.collector import (
    KEEP,
    RECOMPUTE,
    EventSample,
    Measured,
    SegmentSample,
    StepSample,
)
from mimose.planners import PlanningProblem
from mimose.predictors import (
    EnvelopeRegressor,
    PolynomialRegressor,
    SizeMap,
    make_predictor,
)
from mimose.series import Series, Sizes, Uncounted

Context: TypeAlias = str
"""Names, in every process alike, all that changes costs at one shape."""
NO_FAMILY = -1
Neighbours: TypeAlias = tuple[int, int]
"""The families before and after an event: the first takes the gradient it makes, and
the second made the gradient that it takes. Of the last event that is the head, and
what is held in between is another (a MiB in T5)."""

_ACTIONS = (KEEP, RECOMPUTE)
_OF_KEPT = ("held bytes", "forward", "gradients")
"""What has to be known of a unit that is always kept."""


class StepFacts(NamedTuple):
    """What is known of a step before it runs."""

    context: Context
    """All that changes costs at one shape, but whether gradients are there."""
    sizes: Sizes
    """Every dimension of the root's tensors."""
    has_gradients: bool
    """Whether parameters hold gradients already (accumulation)."""


@dataclass(slots=True)
class Pattern:
    """The events of one context, in the order in which they ran."""

    events: tuple[tuple[str, int, int, int], ...]
    """(``name#call``, unit, call, family)."""
    rows: list[tuple[Sizes, tuple[Sizes, ...]]] = field(default_factory=list)
    """Root sizes and every event's own, of the steps measured."""
    maps: list[tuple[SizeRule, ...]] | None = None
    """For each event, the rule of each of its own sizes."""
    sides: tuple[tuple[int, ...], ...] = ()
    """The readers of each `SideTensor`."""
    is_ordered: bool = True
    high: Sizes = ()
    """The largest of each root size measured."""
    calls: tuple[int, ...] = ()
    """How often each unit is called, calls without a gradient included."""
    layout: Layout | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return what was measured, ready for JSON; maps and layout follow from it."""
        return {
            "events": self.events,
            "rows": self.rows,
            "sides": self.sides,
            "is_ordered": self.is_ordered,
            "high": self.high,
            "calls": self.calls,
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Pattern:
        """Make the pattern that ``state_dict`` told of.

        Args:
            state: What it returned.
        """
        return cls(
            events=as_tuples(state["events"]),
            rows=[as_tuples(row) for row in state["rows"]],
            sides=as_tuples(state["sides"]),
            is_ordered=bool(state["is_ordered"]),
            high=as_tuples(state["high"]),
            calls=as_tuples(state["calls"]),
        )


@dataclass(slots=True)
class Layout:
    """Where in the series' values each event's numbers stand."""

    classes: list[tuple[int, Neighbours]]
    """(an event of the class, the families of its neighbours)."""
    of_event: NDArray[np.intp]
    gaps: list[tuple[int, int]]
    """(family before, family after)."""
    of_gap: NDArray[np.intp]


class SideTensor(NamedTuple):
    """A tensor that events read and would not hold if they were kept.

    The measured steps recompute everything, and hold it for the recomputations. Under
    a plan that keeps all its readers it goes after the last of them.
    """

    readers: tuple[int, ...]
    """Positions of the events that read it."""
    n_bytes: float


class SizeRule:
    """How one of an event's own sizes follows from the root's."""

    def __init__(self, roots: Sequence[Sizes], own: Sequence[int]) -> None:
        self._constant = own[0] if all(v == own[0] for v in own) else None
        self._column: int | None = None
        self._map: SizeMap | None = None
        self.is_found = True
        if self._constant is not None:
            return
        for column in range(len(roots[0])):
            if all(row[column] == v for row, v in zip(roots, own, strict=True)):
                self._column = column
                return
        self._map = SizeMap().fit(np.array(roots), np.array(own))
        self.is_found = bool(self._map.found_)

    def __call__(self, root: Sizes) -> int:
        """Return the own size at the root's sizes."""
        if self._constant is not None:
            return self._constant
        if self._column is not None:
            return root[self._column]
        assert self._map is not None
        return int(self._map.predict_one(root))


class Estimator:
    """Learns from measured steps; fills planning problems.

    Args:
        predictor: The name of the predictor for held bytes, or a function that makes
            one.
        noise_bytes: How far two readings of the meter differ.
    """

    def __init__(self, predictor: str | Callable[[], Any], noise_bytes: float) -> None:
        self._predictor = predictor
        self._noise_bytes = noise_bytes
        self._patterns: dict[Context, Pattern] = {}
        self._series: dict[tuple[Hashable, ...], Series] = {}
        self._families: dict[str, int] = {}
        self.scale = 0.0
        """How large steps are, in bytes of growth: errors are small against that."""
        self.unrecomputable: set[int] = set()
        """Units that are always kept."""
        self.n_steps = 0
        """Measured steps taken in."""

    # ------------------------------------------------------------------ learning

    def forget(self, context: Context) -> None:
        """Drop a context's pattern; what its families taught stays."""
        self._patterns.pop(context, None)

    def family(self, key: str) -> int:
        """Return a small number for a family's key."""
        return self._families.setdefault(key, len(self._families))

    def pattern(self, context: Context) -> Pattern | None:
        """Return the events known for a context, or None."""
        return self._patterns.get(context)

    def learn(
        self,
        facts: StepFacts,
        events: Sequence[Measured],
        sample: StepSample,
        released_bytes: float,
        calls: tuple[int, ...],
    ) -> None:
        """Take in one measured step.

        Args:
            facts: What was known before it ran.
            events: The events, as they ran.
            sample: What their segments say.
            released_bytes: Outputs of an earlier step that were freed between the
                root's exit and the first gradient; not this step's doing.
            calls: How often each unit was called.
        """
        self.n_steps += 1
        pattern = self._learn_pattern(facts, events, calls)
        pattern.is_ordered = sample.is_ordered
        self._learn_sides(facts, pattern, events)
        layout = self._layout(pattern)
        for index, (event, measured) in enumerate(
            zip(events, sample.events, strict=True)
        ):
            neighbours = layout.classes[layout.of_event[index]][1]
            self._learn_event(facts, event, measured)
            if self._is_alike(event, events[index - 1] if index else None):
                self._learn_backward(facts, event, measured, neighbours)
        for gap, measured_gap in zip(layout.of_gap, sample.gaps, strict=True):
            key = self._gap_key(facts, layout.gaps[gap])
            self._learn_segment(key, facts.sizes, measured_gap)
        self._learn_segment(self._head_key(facts, "head"), facts.sizes, sample.head)
        if sample.loss is not None and sample.loss.net_bytes is not None:
            loss = SegmentSample(
                sample.loss.net_bytes + released_bytes, sample.loss.excess_bytes
            )
            self._learn_segment(self._head_key(facts, "loss"), facts.sizes, loss)

    def note_growth(self, growth_bytes: float) -> None:
        """Tell how large a step is, or could be."""
        self.scale = max(self.scale, growth_bytes)

    def learn_flops(self, family: int, sizes: Sizes, flops: int) -> None:
        """Take in the FLOPs of one recomputation that stopped early."""
        self._exact("flops", family).add(sizes, float(flops))

    def _learn_pattern(
        self, facts: StepFacts, events: Sequence[Measured], calls: tuple[int, ...]
    ) -> Pattern:
        names = tuple((e.name, e.unit, e.call, e.family) for e in events)
        pattern = self._patterns.get(facts.context)
        if pattern is None or pattern.events != names:
            pattern = Pattern(names, calls=calls)
            self._patterns[facts.context] = pattern
        pattern.high = tuple(map(max, facts.sizes, pattern.high or facts.sizes))
        row = (facts.sizes, tuple(event.sizes for event in events))
        if row not in pattern.rows and not self._follows(pattern, *row):
            pattern.rows.append(row)
            pattern.maps = None
        return pattern

    def _follows(self, pattern: Pattern, root: Sizes, own: tuple[Sizes, ...]) -> bool:
        """Whether the maps already say this, so that the row teaches nothing."""
        if pattern.maps is None or len(pattern.rows) < 16:
            return False
        return self.own_sizes(pattern, root) == list(own)

    def _learn_sides(
        self, facts: StepFacts, pattern: Pattern, events: Sequence[Measured]
    ) -> None:
        """Sum up, by readers, the storages that none of the readers would hold."""
        n_bytes: dict[int, int] = {}
        readers: dict[int, list[int]] = {}
        for index, event in enumerate(events):
            for key, size in event.inputs.items():
                n_bytes[key] = size
                readers.setdefault(key, []).append(index)
        if any(not event.held_bytes for event in events):
            return  # a kept event's forward was not watched
        saved = set().union(*(event.saved_inputs for event in events))
        totals: dict[tuple[int, ...], int] = dict.fromkeys(pattern.sides, 0)
        for key, read_by in readers.items():
            if key not in saved:
                group = tuple(read_by)
                totals[group] = totals.get(group, 0) + n_bytes[key]
        pattern.sides = tuple(totals)
        for group, total in totals.items():
            self._exact("side", facts.context, group).add(facts.sizes, float(total))

    def side_tensors(self, facts: StepFacts) -> list[SideTensor]:
        """Return what a plan that keeps all the readers does not hold."""
        found = []
        for group in self._patterns[facts.context].sides:
            series = self._exact("side", facts.context, group)
            if not series.doubt(facts.sizes):
                found.append(SideTensor(group, series.predict(facts.sizes)))
        return found

    def _learn_event(
        self, facts: StepFacts, event: Measured, sample: EventSample
    ) -> None:
        family, sizes = event.family, event.sizes
        for action, held in sample.held_bytes.items():
            self._exact(f"held {action}", family).add(sizes, held)
        for action, excess in sample.forward_excess_bytes.items():
            self._excess(f"forward {action}", family).add(sizes, excess)
        if event.flops or sample.held_bytes:
            self._exact("all flops", family).add(sizes, float(event.flops))

    def _is_alike(self, event: Measured, behind: Measured | None) -> bool:
        """Whether a pair is like those that plans are made of.

        What lies behind decides which of the two frees the tensor between them.
        """
        if behind is None or behind.action == event.action:
            return True
        return event.unit in self.unrecomputable or behind.unit in self.unrecomputable

    def _learn_backward(
        self,
        facts: StepFacts,
        event: Measured,
        sample: EventSample,
        neighbours: Neighbours,
    ) -> None:
        key = (event.family, neighbours, facts.has_gradients)
        if sample.backward_excess_bytes is not None:
            excess = self._excess("backward", event.action, *key)
            excess.add(event.sizes, sample.backward_excess_bytes)
        if sample.backward_net_bytes is not None:
            net = self._net("backward net", *key)
            net.add(event.sizes, sample.backward_net_bytes)

    def _learn_segment(
        self, key: tuple[Hashable, ...], sizes: Sizes, sample: SegmentSample
    ) -> None:
        if sample.net_bytes is not None:
            self._net("net", *key).add(sizes, sample.net_bytes)
        if sample.excess_bytes is not None:
            self._excess("excess", *key).add(sizes, sample.excess_bytes)

    @staticmethod
    def _gap_key(facts: StepFacts, pair: tuple[int, int]) -> tuple[Hashable, ...]:
        """Name a gap's series; where gradients went, their memory is used again."""
        return "gap", *pair, facts.has_gradients

    @staticmethod
    def _head_key(facts: StepFacts, part: str) -> tuple[Hashable, ...]:
        return part, facts.context, facts.has_gradients

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return all that was learned, ready for JSON."""
        return {
            "scale": self.scale,
            "n_steps": self.n_steps,
            "unrecomputable": sorted(self.unrecomputable),
            "families": list(self._families),
            "patterns": {
                context: pattern.state_dict()
                for context, pattern in self._patterns.items()
            },
            "series": [
                [key, series.state_dict()] for key, series in self._series.items()
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over all that another estimator learned, in place of what is here.

        Args:
            state: What ``state_dict`` returned.
        """
        self._series.clear()
        self.scale = float(state["scale"])
        self.n_steps = int(state["n_steps"])
        self.unrecomputable = set(map(int, state["unrecomputable"]))
        self._families = {str(key): n for n, key in enumerate(state["families"])}
        self._patterns = {
            str(context): Pattern.from_state(said)
            for context, said in state["patterns"].items()
        }
        for key, said in state["series"]:
            self._by_key(as_tuples(key)).load_state_dict(said)

    # ------------------------------------------------------------------ predicting

    def doubt(self, facts: StepFacts) -> str:
        """Return why no plan can be trusted at these sizes; "" if one can."""
        pattern = self._patterns.get(facts.context)
        if pattern is None:
            return "nothing was measured with such inputs yet"
        if not pattern.is_ordered:
            return "gradients do not arrive in the reverse order of the layers"
        if not all(rule.is_found for rules in self._maps(pattern) for rule in rules):
            return "the layers' sizes do not follow from the batch's by a known rule"
        own = self.own_sizes(pattern, facts.sizes)
        layout = self._layout(pattern)
        for name, series, sizes in self._needed(facts, pattern, layout, own):
            reason = series.doubt(sizes)
            if reason:
                return f"{name}: {reason}"
        return ""

    def is_beyond(self, facts: StepFacts) -> bool:
        """Whether a size is larger than any measured, so that a step would teach."""
        high = self._patterns[facts.context].high
        return any(s > most for s, most in zip(facts.sizes, high, strict=True))

    def problem(
        self,
        facts: StepFacts,
        *,
        start_bytes: float,
        budget_bytes: float,
        released_bytes: float = 0.0,
        optimizer_state_bytes: float = 0.0,
        step_excess_bytes: float = 0.0,
    ) -> PlanningProblem:
        """Fill the planning problem of one shape.

        Args:
            facts: The step's context and exact sizes.
            start_bytes: Held when it begins.
            budget_bytes: The most it may hold.
            released_bytes: Of what is held, outputs of the last step that will be
                freed before the backward.
            optimizer_state_bytes: Still to come with the first optimizer step.
            step_excess_bytes: The optimizer step's working memory.

        Raises:
            KeyError: Nothing was measured in this context.
        """
        pattern = self._patterns[facts.context]
        own = self.own_sizes(pattern, facts.sizes)
        layout = self._layout(pattern)
        table = self._class_table(facts, layout, pattern, own)[layout.of_event]
        gaps = self._gap_table(facts, layout)
        gaps = np.vstack((gaps[layout.of_gap], self._head(facts, released_bytes)))
        allowed = np.ones((len(own), 2), dtype=np.bool_)
        for index, (_, unit, _, _) in enumerate(pattern.events):
            allowed[index, 1] = unit not in self.unrecomputable
        zeros = np.zeros((len(own), 2))
        return PlanningProblem(
            events=tuple(event[0] for event in pattern.events),
            actions=_ACTIONS,
            allowed=allowed,
            held_bytes=table[:, 0:2],
            forward_excess_bytes=table[:, 2:4],
            backward_excess_bytes=table[:, 4:6],
            backward_net_bytes=table[:, 6],
            cost=np.column_stack((zeros[:, 0], table[:, 7])),
            gap_bytes=gaps[:, 0],
            gap_excess_bytes=gaps[:, 1],
            start_bytes=max(0.0, start_bytes),
            optimizer_state_bytes=optimizer_state_bytes,
            step_excess_bytes=step_excess_bytes,
            budget_bytes=max(0.0, budget_bytes),
            host_bytes=zeros,
            host_budget_bytes=float("inf"),
        )

    def recomputed_flops(
        self, facts: StepFacts, actions: Sequence[str]
    ) -> tuple[int, Uncounted]:
        """Return the FLOPs of a plan's recomputations, and which are not known yet.

        Returns:
            The sum over what is known, and what is still to count.
        """
        pattern = self._patterns[facts.context]
        own = self.own_sizes(pattern, facts.sizes)
        total = 0
        unknown: dict[tuple[int, int], tuple[int, Sizes]] = {}
        known: dict[tuple[int, Sizes], int | None] = {}  # equal layers cost the same
        for (_, unit, call, family), sizes, action in zip(
            pattern.events, own, actions, strict=True
        ):
            if action == KEEP:
                continue
            key = family, sizes
            if key not in known:
                known[key] = self._flops(family, sizes)
            flops = known[key]
            if flops is None:
                unknown[unit, call] = key
            else:
                total += flops
        return total, unknown

    def _flops(self, family: int, sizes: Sizes) -> int | None:
        """Return the FLOPs of one recomputation; None if they are not known."""
        series = self._exact("flops", family)
        return None if series.doubt(sizes) else round(series.predict(sizes))

    def own_sizes(self, pattern: Pattern, root: Sizes) -> list[Sizes]:
        """Return every event's own sizes at the root's sizes."""
        done: dict[int, Sizes] = {}
        sizes = []
        for rules in self._maps(pattern):
            key = id(rules)
            if key not in done:
                done[key] = tuple(rule(root) for rule in rules)
            sizes.append(done[key])
        return sizes

    def _maps(self, pattern: Pattern) -> list[tuple[SizeRule, ...]]:
        """Fit the rules; events with the same history share them."""
        if pattern.maps is not None:
            return pattern.maps
        roots = [root for root, _ in pattern.rows]
        rules: dict[tuple[int, ...], SizeRule] = {}
        shared: dict[tuple[Sizes, ...], tuple[SizeRule, ...]] = {}
        maps = []
        for index in range(len(pattern.events)):
            history = tuple(own[index] for _, own in pattern.rows)
            if history not in shared:
                columns = [tuple(column) for column in zip(*history, strict=True)]
                for column in columns:
                    if column not in rules:
                        rules[column] = SizeRule(roots, column)
                shared[history] = tuple(rules[column] for column in columns)
            maps.append(shared[history])
        pattern.maps = maps
        pattern.layout = None
        return maps

    def _layout(self, pattern: Pattern) -> Layout:
        """Group the events and gaps that share all their numbers."""
        maps = self._maps(pattern)
        if pattern.layout is not None:
            return pattern.layout
        families = [event[3] for event in pattern.events]
        around = [NO_FAMILY, *families, NO_FAMILY]
        classes: dict[tuple[int, Neighbours, int], int] = {}
        members: list[tuple[int, Neighbours]] = []
        of_event = []
        for index, family in enumerate(families):
            neighbours = (around[index], around[index + 2])
            key = (family, neighbours, id(maps[index]))
            if key not in classes:
                classes[key] = len(members)
                members.append((index, neighbours))
            of_event.append(classes[key])
        pairs = list(zip([NO_FAMILY, *families], families, strict=False))
        gaps = list(dict.fromkeys(pairs))
        layout = Layout(
            members,
            np.array(of_event, dtype=np.intp),
            gaps,
            np.array([gaps.index(pair) for pair in pairs], dtype=np.intp),
        )
        pattern.layout = layout
        return layout

    def _class_series(
        self, facts: StepFacts, family: int, neighbours: Neighbours
    ) -> tuple[tuple[str, Series], ...]:
        key = (family, neighbours, facts.has_gradients)
        return (
            ("held bytes", self._exact("held keep", family)),
            ("output bytes", self._exact("held recompute", family)),
            ("forward", self._excess("forward keep", family)),
            ("checkpointed forward", self._excess("forward recompute", family)),
            ("backward", self._excess("backward", RECOMPUTE, *key)),
            ("gradients", self._net("backward net", *key)),
        )

    def _needed(
        self,
        facts: StepFacts,
        pattern: Pattern,
        layout: Layout,
        own: list[Sizes],
    ) -> list[tuple[str, Series, Sizes]]:
        needed = []
        for index, neighbours in layout.classes:
            name, unit, _, family = pattern.events[index]
            for what, series in self._class_series(facts, family, neighbours):
                if unit in self.unrecomputable and what not in _OF_KEPT:
                    continue
                needed.append((f"{what} of {name}", series, own[index]))
        for pair in layout.gaps:
            key = self._gap_key(facts, pair)
            for kind in (self._net("net", *key), self._excess("excess", *key)):
                needed.append(("between the layers", kind, facts.sizes))
        for part in ("head", "loss"):
            key = self._head_key(facts, part)
            needed.append((f"the {part}", self._net("net", *key), facts.sizes))
            needed.append((f"the {part}", self._excess("excess", *key), facts.sizes))
        return needed

    def _class_table(
        self,
        facts: StepFacts,
        layout: Layout,
        pattern: Pattern,
        own: list[Sizes],
    ) -> NDArray[np.float64]:
        """Return (n_classes, 8) numbers.

        Held bytes, forward and backward excess (each kept and recomputed), net, cost.
        Until kept layers have been seen, their backward is taken to need what a
        recomputed one's does: rather more, where an output is saved (by a ReLU), which
        is there twice after a recomputation.
        """
        rows = []
        for index, neighbours in layout.classes:
            family, sizes = pattern.events[index][3], own[index]
            held, output, forward, light, excess, net = (
                series.predict(sizes) if len(series) else 0.0
                for _, series in self._class_series(facts, family, neighbours)
            )
            held = max(held, output)
            again = max(forward, excess + held - output)
            key = (family, neighbours, facts.has_gradients)
            kept = self._excess("backward", KEEP, *key)
            if not excess:
                excess = kept.predict(sizes)
            elif not kept.doubt(sizes):
                excess = min(excess, kept.predict(sizes))
            flops = self._exact("flops", family)
            flops = flops if len(flops) else self._exact("all flops", family)
            cost = flops.predict(sizes) if len(flops) else 0.0
            rows.append((held, output, forward, light, excess, again, net, cost or 1.0))
        return np.array(rows).reshape(-1, 8)

    def _gap_table(self, facts: StepFacts, layout: Layout) -> NDArray[np.float64]:
        rows = []
        for pair in layout.gaps:
            key = self._gap_key(facts, pair)
            net, excess = self._net("net", *key), self._excess("excess", *key)
            rows.append((net.predict(facts.sizes), excess.predict(facts.sizes)))
        return np.array(rows).reshape(-1, 2)

    def head_peaks(self, facts: StepFacts) -> tuple[float, float]:
        """Return how far the head rises over its start: before and after the release.

        The outputs of the last step, where they are still held, go between the two.
        """
        head, loss = (self._head_key(facts, part) for part in ("head", "loss"))
        first = self._excess("excess", *head).predict(facts.sizes)
        net = self._net("net", *head).predict(facts.sizes)
        return first, net + self._excess("excess", *loss).predict(facts.sizes)

    def _head(self, facts: StepFacts, released_bytes: float) -> tuple[float, float]:
        """Join the head's two parts into one segment's net and excess."""
        first, second = self.head_peaks(facts)
        net = sum(
            self._net("net", *self._head_key(facts, part)).predict(facts.sizes)
            for part in ("head", "loss")
        )
        return net - released_bytes, max(first, second - released_bytes)

    # ------------------------------------------------------------------ series

    def _by_key(self, key: tuple[Hashable, ...]) -> Series:
        """Return the series of a whole key, as `_get` was given it."""
        kind, *rest = key
        if kind == "excess of":
            return self._excess(*rest)
        return self._net(*rest) if kind == "net of" else self._exact(*key)

    def _exact(self, *key: Hashable) -> Series:
        def make() -> Any:
            if callable(self._predictor):
                return self._predictor()
            return make_predictor(self._predictor, noise=0.0, nonnegative=True)

        return self._get(key, make, 0.0, nonnegative=True)

    def _excess(self, *key: Hashable) -> Series:
        def make() -> Any:
            return EnvelopeRegressor(noise=self._noise_bytes)

        return self._get(("excess of", *key), make, self._noise_bytes, nonnegative=True)

    def _net(self, *key: Hashable) -> Series:
        def make() -> Any:
            return PolynomialRegressor(noise=self._noise_bytes)

        return self._get(("net of", *key), make, self._noise_bytes, nonnegative=False)

    def _get(
        self,
        key: tuple[Hashable, ...],
        make: Callable[[], Any],
        noise: float,
        *,
        nonnegative: bool,
    ) -> Series:
        series = self._series.get(key)
        if series is None:
            series = Series(make, noise, nonnegative)
            self._series[key] = series
        series.scale = self.scale
        return series


def as_tuples(value: Any) -> Any:
    """Turn lists, as JSON brings them back, into tuples, however nested."""
    return tuple(map(as_tuples, value)) if isinstance(value, (list, tuple)) else value


def actions_by_unit(
    pattern: Pattern, actions: Sequence[str]
) -> tuple[tuple[str, ...], ...]:
    """Sort a plan's actions by unit and call; other calls are recomputed."""
    by_unit = [[RECOMPUTE] * n_calls for n_calls in pattern.calls]
    for (_, unit, call, _), action in zip(pattern.events, actions, strict=True):
        by_unit[unit][call] = action
    return tuple(tuple(calls) for calls in by_unit)
