"""What has been learned: patterns of events, and series for every quantity.

A step's `Context` says all that changes costs at one shape. For each context the
estimator keeps the pattern of the events (which ran, of what family, how their own
sizes follow from the batch's), and for each family the series of its quantities. From
these it fills a `PlanningProblem` for any shape of the batch.

Note: [Whose series]
A series belongs to what its sizes are sizes of. A family's are a layer's own; the
head's, the loss's and the side tensors' are the root's, of one context. What runs
between layers is told by the root's sizes too, but alike in all contexts of one
structure of arguments, which so teach each other. Where the owner is forgotten, so are
its series.

Note: [Side tensors]
What runs between layers makes tensors that several layers read and none of them makes:
a mask, a position bias. A recomputed reader holds them from its forward to its
backward; a kept one only if it saves them. By convention they count as held in every
plan, from where they are made to the backward of their first reader, and the judge
takes them off where all readers are kept. So gaps and heads are learned from steps in
which some reader of each was recomputed, and the layers' net changes from steps in
which the first reader was. Learned from all steps, T5's peaks were predicted up to 5%
too low.

Note: [Last layer]
A last layer that saves its own output, as a ReLU does, keeps it through the head; one
that does not, or is recomputed, lets it go there. Behind its backward all is alike. So
a head has its numbers by the last layer's action, but a layer's net change in the
backward is that of a recomputed one, in whose head the output went; what a head holds
beyond that is there in the last layer's own backward alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from mimose.learn.copies import evened, gone_bytes
from mimose.learn.patterns import (
    Layout,
    Neighbours,
    Pattern,
    SideTensor,
    as_tuples,
)
from mimose.learn.series import Series
from mimose.planners import PlanningProblem
from mimose.predictors import (
    EnvelopeRegressor,
    PolynomialRegressor,
    make_predictor,
)
from mimose.types import (
    KEEP,
    MOST_CONTEXTS,
    RECOMPUTE,
    Context,
    EventSample,
    Measured,
    SegmentSample,
    Sizes,
    StepFacts,
    StepSample,
    Uncounted,
)

Key: TypeAlias = tuple[Hashable, ...]
"""Names a series; the first part is its owner: Note: [Whose series]."""

_MOST_FAMILIES = 1024
"""Families remembered, if no more are in use."""
_FEW = 8
"""Readings of a head that are looked at where the other action's explain them."""
_ACTIONS = (KEEP, RECOMPUTE)
_OF_KEPT = ("held bytes", "forward", "gradients")
"""What has to be known of a unit that is always kept."""


class Head(NamedTuple):
    """What happens between the last layer's forward and its backward."""

    net_bytes: float
    before_release_bytes: float
    """How far it rises over its start before the last step's outputs go."""
    after_release_bytes: float
    """The same after that, as if none of them went."""
    after_copies_bytes: float
    """The same once the copies of all layers are gone: see `mimose.learn.copies`."""


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
        self._series: dict[Key, Series] = {}
        self._families: dict[str, int] = {}
        self._copied: dict[int, float] = {}
        """By family, the copies of weights in what a call holds: Note: [Copies]."""
        self._n_families = 0
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
        known = self._families.get(key)
        if known is None:
            known = self._families[key] = self._n_families
            self._n_families += 1
        return known

    @property
    def is_exact(self) -> bool:
        """Whether two readings of the same thing are equal."""
        return self._noise_bytes == 0.0

    @property
    def has_room(self) -> bool:
        """Whether more families can be told apart without forgetting any."""
        return len(self._families) < _MOST_FAMILIES

    def touch(self, context: Context) -> bool:
        """Count a context as used; return whether it is known."""
        pattern = self._patterns.pop(context, None)
        if pattern is None:
            return False
        self._patterns[context] = pattern
        return True

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
        for event in events:
            event.sizes = _numbers(event.sizes)
        pattern = self._learn_pattern(facts, events, calls)
        pattern.is_ordered = sample.is_ordered
        pattern.copies_end = sample.copies_end
        sample = _with_released(sample, released_bytes, self._noise_bytes)
        sample = self._evened(facts, events, sample)
        self._learn_sides(facts, pattern, events)
        layout = pattern.grouped()
        has_nets = _holds_sides_to_the_end(pattern, events)
        for index, (event, measured) in enumerate(
            zip(events, sample.events, strict=True)
        ):
            neighbours = layout.classes[layout.of_event[index]][1]
            self._learn_event(facts, event, measured)
            if self._is_alike(event, events[index - 1] if index else None):
                self._learn_backward(
                    facts, event, measured, neighbours, has_net=has_nets
                )
        self._learn_outside(facts, pattern, events, sample)
        self._forget_unused()

    def _learn_outside(
        self,
        facts: StepFacts,
        pattern: Pattern,
        events: Sequence[Measured],
        sample: StepSample,
    ) -> None:
        """Learn what runs between and behind the events: Note: [Side tensors]."""
        last = events[-1].action if events else RECOMPUTE
        loss = self._head_key(facts, "loss", last)
        is_told = not _releases_sides(pattern, events)
        if sample.loss is not None and sample.loss.excess_bytes is not None:
            if self._gone_bytes(facts):  # R0 or R1: see `mimose.learn.copies`
                kept = {event.unit for event in events if event.action == KEEP}
                is_least = kept <= self.unrecomputable
                key = self._head_key(facts, "loss", RECOMPUTE if is_least else KEEP)
                self._excess(*key).add(facts.sizes, sample.loss.excess_bytes)
            elif is_told:
                self._excess(*loss).add(facts.sizes, sample.loss.excess_bytes)
        if not is_told:
            return
        if sample.loss is not None and sample.loss.net_bytes is not None:
            self._net(*loss).add(facts.sizes, sample.loss.net_bytes)
        layout = pattern.grouped()
        for gap, measured in zip(layout.of_gap, sample.gaps, strict=True):
            key = self._gap_key(facts, layout.gaps[gap])
            self._learn_segment(key, facts.sizes, measured)
        head = self._head_key(facts, "head", last)
        self._learn_segment(head, facts.sizes, sample.head)

    def note_growth(self, growth_bytes: float) -> None:
        """Tell how large a step is, or could be."""
        self.scale = max(self.scale, growth_bytes)

    def learn_flops(self, family: int, sizes: Sizes, flops: int) -> None:
        """Take in the FLOPs of one recomputation that stopped early."""
        self._exact(family, "flops").add(_numbers(sizes), float(flops))

    def _learn_pattern(
        self, facts: StepFacts, events: Sequence[Measured], calls: tuple[int, ...]
    ) -> Pattern:
        names = tuple((e.name, e.unit, e.call, e.family) for e in events)
        pattern = self._patterns.get(facts.context)
        if pattern is None or pattern.events != names:
            pattern = Pattern(names, calls=calls, structure=facts.structure)
            self._patterns[facts.context] = pattern
        self.touch(facts.context)
        pattern.take_in(facts.sizes, tuple(event.sizes for event in events))
        return pattern

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
            self._exact(facts.context, "side", group).add(facts.sizes, float(total))

    def _evened(
        self, facts: StepFacts, events: Sequence[Measured], sample: StepSample
    ) -> StepSample:
        """Learn what autocast copies; even out what follows for kept layers."""
        for event in events:
            if event.copied_bytes:
                self._copied[event.family] = event.copied_bytes
        kept = [
            self._copied_bytes(event.unit, event.family)
            if event.action == KEEP and not event.call
            else 0.0
            for event in events
        ]
        if not sum(kept):
            return sample
        gone = gone_bytes(
            [(e.unit, self._copied_bytes(e.unit, e.family)) for e in events],
            {event.unit for event in events if event.action == KEEP},
        )
        least = self._excess(*self._head_key(facts, "loss", RECOMPUTE))
        most = math.inf  # where R0 is not known, nothing is told of R1
        if not least.doubt(facts.sizes):
            most = least.predict(facts.sizes) + 5 * self._noise_bytes + 1.0
        return evened(sample, kept, gone, most)

    def _copied_bytes(self, unit: int, family: int) -> float:
        """Return a call's copies of weights; a unit that is always kept is alike."""
        return 0.0 if unit in self.unrecomputable else self._copied.get(family, 0.0)

    def copies(self, facts: StepFacts) -> list[float]:
        """Return each event's copies of weights.

        Those that outlive the forward are left out: see `mimose.learn.copies`.
        """
        pattern = self._patterns[facts.context]
        if not pattern.copies_end:
            return [0.0] * len(pattern.events)
        return [self._copied_bytes(unit, f) for _, unit, _, f in pattern.events]

    def _gone_bytes(self, facts: StepFacts) -> float:
        """Return the copies that go before the loss's peak: Note: [Copies]."""
        pattern = self._patterns[facts.context]
        if pattern.copies_end != "loss":
            return 0.0
        units = [unit for _, unit, _, _ in pattern.events]
        return gone_bytes(list(zip(units, self.copies(facts), strict=True)), ())

    def side_tensors(self, facts: StepFacts) -> list[SideTensor]:
        """Return what a plan that keeps all the readers does not hold."""
        found = []
        for group in self._patterns[facts.context].sides:
            series = self._exact(facts.context, "side", group)
            if not series.doubt(facts.sizes):
                found.append(SideTensor(group, series.predict(facts.sizes)))
        return found

    def _learn_event(
        self, facts: StepFacts, event: Measured, sample: EventSample
    ) -> None:
        family, sizes = event.family, event.sizes
        for action, held in sample.held_bytes.items():
            self._exact(family, f"held {action}").add(sizes, held)
        for action, excess in sample.forward_excess_bytes.items():
            self._excess(family, f"forward {action}").add(sizes, excess)
        if event.flops or sample.held_bytes:
            self._exact(family, "all flops").add(sizes, float(event.flops))

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
        *,
        has_net: bool,
    ) -> None:
        key = self._backward_key(facts, event.family, neighbours)
        if sample.backward_excess_bytes is not None:
            excess = self._excess(*key, event.action)
            excess.add(event.sizes, sample.backward_excess_bytes)
        if has_net and sample.backward_net_bytes is not None:
            self._net(*key).add(event.sizes, sample.backward_net_bytes)

    def _learn_segment(self, key: Key, sizes: Sizes, sample: SegmentSample) -> None:
        if sample.net_bytes is not None:
            self._net(*key).add(sizes, sample.net_bytes)
        if sample.excess_bytes is not None:
            self._excess(*key).add(sizes, sample.excess_bytes)

    def _forget_unused(self) -> None:
        """Keep what is remembered bounded: Note: [Whose series]."""
        is_full = len(self._patterns) > MOST_CONTEXTS
        if not is_full and len(self._families) <= _MOST_FAMILIES:
            return
        while len(self._patterns) > MOST_CONTEXTS:
            self.forget(next(iter(self._patterns)))
        patterns = self._patterns.values()
        families = {family for p in patterns for *_, family in p.events}
        self._families = {k: n for k, n in self._families.items() if n in families}
        self._copied = {f: n for f, n in self._copied.items() if f in families}
        owners = {*self._patterns, *(p.structure for p in patterns), *families}
        self._series = {k: s for k, s in self._series.items() if k[1] in owners}

    @staticmethod
    def _backward_key(facts: StepFacts, family: int, neighbours: Neighbours) -> Key:
        return family, "backward", neighbours, facts.has_gradients

    @staticmethod
    def _gap_key(facts: StepFacts, pair: tuple[int, int]) -> Key:
        """Name a gap's series; where gradients went, their memory is used again."""
        return facts.structure, "gap", *pair, facts.has_gradients

    @staticmethod
    def _head_key(facts: StepFacts, part: str, action: str) -> Key:
        return facts.context, part, facts.has_gradients, action

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return all that was learned, ready for JSON."""
        return {
            "scale": self.scale,
            "n_steps": self.n_steps,
            "unrecomputable": sorted(self.unrecomputable),
            "families": dict(self._families),
            "copied": {str(f): n for f, n in self._copied.items()},
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
        self._families = {str(key): int(n) for key, n in state["families"].items()}
        copied = state.get("copied", {})
        self._copied = {int(family): float(n) for family, n in copied.items()}
        self._n_families = 1 + max(self._families.values(), default=-1)
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
        if pattern.reaches_further(facts.sizes):
            return "the layers' sizes were seen at smaller shapes alone"
        if not pattern.follows_rules:
            return "the layers' sizes do not follow from the batch's by a known rule"
        own = pattern.own_sizes(facts.sizes)
        layout = pattern.grouped()
        for name, series, sizes in self._needed(facts, pattern, layout, own):
            reason = series.doubt(sizes)
            if reason:
                return f"{name}: {reason}"
        return ""

    def stretch(self, facts: StepFacts) -> float:
        """Return by what share a size is larger than any measured; 0 if none is."""
        high = self._patterns[facts.context].high
        pairs = zip(facts.sizes, high, strict=True)
        return max(0.0, *(size / max(1, most) - 1.0 for size, most in pairs))

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
        own = pattern.own_sizes(facts.sizes)
        layout = pattern.grouped()
        lasting, excess, beyond = self._heads(facts, pattern, released_bytes)
        table = self._class_table(facts, layout, pattern, own, beyond)
        table = table[layout.of_event]
        gaps = self._gap_table(facts, layout)[layout.of_gap]
        gaps = np.vstack((gaps, (lasting - released_bytes, excess)))
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
        own = pattern.own_sizes(facts.sizes)
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
                known[key] = self.flops(family, sizes)
            flops = known[key]
            if flops is None:
                unknown[unit, call] = key
            else:
                total += flops
        return total, unknown

    def flops(self, family: int, sizes: Sizes) -> int | None:
        """Return the FLOPs of one recomputation; None if they are not known."""
        return self._exact(family, "flops").exact(_numbers(sizes))

    def _class_series(
        self, facts: StepFacts, family: int, neighbours: Neighbours
    ) -> tuple[tuple[str, Series], ...]:
        key = self._backward_key(facts, family, neighbours)
        return (
            ("held bytes", self._exact(family, "held keep")),
            ("output bytes", self._exact(family, "held recompute")),
            ("forward", self._excess(family, "forward keep")),
            ("checkpointed forward", self._excess(family, "forward recompute")),
            ("backward", self._excess(*key, RECOMPUTE)),
            ("gradients", self._net(*key)),
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
            for kind in (self._net(*key), self._excess(*key)):
                needed.append(("between the layers", kind, facts.sizes))
        action = self._actions_of_last(pattern)[-1]
        for part, series in self._head_series(facts, action):
            needed.append((f"the {part}", series, facts.sizes))
        return needed

    def _class_table(
        self,
        facts: StepFacts,
        layout: Layout,
        pattern: Pattern,
        own: list[Sizes],
        beyond: float,
    ) -> NDArray[np.float64]:
        """Return (n_classes, 8) numbers.

        Held bytes, forward and backward excess (each kept and recomputed), net, cost.
        Until kept layers have been seen, their backward is taken to need what a
        recomputed one's does: rather more, where an output is saved (by a ReLU), which
        is there twice after a recomputation. A kept last layer's begins with what its
        head holds `beyond` the lasting: Note: [Last layer].
        """
        rows = []
        for number, (index, neighbours) in enumerate(layout.classes):
            family, sizes = pattern.events[index][3], own[index]
            held, output, forward, light, excess, net = (
                series.predict(sizes) if len(series) else 0.0
                for _, series in self._class_series(facts, family, neighbours)
            )
            held = max(held, output)
            again = max(forward, excess + held - output)
            more = beyond if number == layout.of_event[-1] else 0.0
            key = self._backward_key(facts, family, neighbours)
            kept = self._excess(*key, KEEP)
            over = kept.predict(sizes) + more
            if not excess:
                excess = over
            elif kept.doubt(sizes):
                excess += max(0.0, more - output)  # that is there in a recomputed one's
            elif kept.error < self._excess(*key, RECOMPUTE).error:
                excess = over
            else:
                excess = min(excess, over)
            flops = self._exact(family, "flops")
            flops = flops if len(flops) else self._exact(family, "all flops")
            cost = flops.predict(sizes) if len(flops) else 0.0
            rows.append((held, output, forward, light, excess, again, net, cost or 1.0))
        return np.array(rows).reshape(-1, 8)

    def _gap_table(self, facts: StepFacts, layout: Layout) -> NDArray[np.float64]:
        rows = []
        for pair in layout.gaps:
            key = self._gap_key(facts, pair)
            net, excess = self._net(*key), self._excess(*key)
            rows.append((net.predict(facts.sizes), excess.predict(facts.sizes)))
        return np.array(rows).reshape(-1, 2)

    def head(self, facts: StepFacts, action: str) -> Head:
        """Return what the head needs behind a last layer that is kept or recomputed."""
        net, first, loss_net, loss_excess = self._head_parts(facts, action)
        after = after_copies = net + loss_excess
        copies = self._gone_bytes(facts)
        if copies:
            least, most = (
                self._excess(*self._head_key(facts, "loss", action))
                for action in (RECOMPUTE, KEEP)
            )
            is_known = not most.doubt(facts.sizes)
            excess = (
                most.predict(facts.sizes)
                if is_known
                else self._head_by_other(facts, most, least, KEEP)
            )
            excess = min(max(excess, loss_excess), loss_excess + copies)
            after_copies = net + excess - copies
        return Head(net + loss_net, first, after, after_copies)

    def _head_parts(self, facts: StepFacts, action: str) -> list[float]:
        """Predict net and excess of the head, then of the loss."""
        other = KEEP if action == RECOMPUTE else RECOMPUTE
        pairs = zip(
            self._head_series(facts, action),
            self._head_series(facts, other),
            strict=True,
        )
        return [
            self._head_by_other(facts, mine, theirs, action)
            if _is_told_by_other(facts.sizes, mine, theirs)
            else mine.predict(facts.sizes)
            for (_, mine), (_, theirs) in pairs
        ]

    def _head_by_other(
        self, facts: StepFacts, mine: Series, theirs: Series, action: str
    ) -> float:
        """Predict what few steps tell of an action by what many tell of the other.

        Plans seldom recompute the last layer, and steps that only collect never keep
        it. What happens behind it is the same but for a constant, and but for a layer
        that saves its own output: kept, that stays beyond the head, where else it goes.
        Whether it does is what explains the few best. An excess is no less than any of
        them says, in proportion to the size that grew most or shrank least.
        """
        readings = mine.readings()[-_FEW:]
        if mine.is_excess:
            more = [
                (value - theirs.predict(sizes)) * _share(facts.sizes, sizes)
                for sizes, value in readings
            ]
            return theirs.predict(facts.sizes) + max([0.0, *more])
        pattern = self._patterns[facts.context]
        rules = pattern.rules()[-1]
        outputs = self._exact(pattern.events[-1][3], "held recompute")

        def explained(sizes: Sizes, n_outputs: int) -> float:
            own = tuple(rule(sizes) for rule in rules)
            return theirs.predict(sizes) + n_outputs * outputs.predict(own)

        found = []
        for n_outputs in (0, 1 if action == KEEP else -1):
            rest = [value - explained(sizes, n_outputs) for sizes, value in readings]
            constant = float(np.median(rest)) if rest else 0.0
            spread = round(max(rest) - min(rest)) if rest else 0
            found.append((spread, abs(constant), n_outputs, constant))
        _, _, n_outputs, constant = min(found)
        return explained(facts.sizes, n_outputs) + constant

    def _head_series(
        self, facts: StepFacts, action: str
    ) -> tuple[tuple[str, Series], ...]:
        """Return net and excess of the head, then of the loss, with their names."""
        head, loss = (self._head_key(facts, part, action) for part in ("head", "loss"))
        least = self._head_key(facts, "loss", RECOMPUTE)
        return (
            ("head", self._net(*head)),
            ("head", self._excess(*head)),
            ("loss", self._net(*loss)),
            ("loss", self._excess(*(least if self._gone_bytes(facts) else loss))),
        )

    def _actions_of_last(self, pattern: Pattern) -> tuple[str, ...]:
        """Return what may happen to the last layer; what it was measured under last."""
        if not pattern.events:
            return (RECOMPUTE,)
        is_kept = pattern.events[-1][1] in self.unrecomputable
        return (KEEP,) if is_kept else (KEEP, RECOMPUTE)

    def _heads(
        self, facts: StepFacts, pattern: Pattern, released_bytes: float
    ) -> tuple[float, float, float]:
        """Return what all heads come to, however the last layer was run.

        Returns:
            The net behind which the layers' backward begins: Note: [Last layer]; the
            excess, of the head that takes more; what is held beyond that net during the
            backward of a last layer that is kept.
        """
        heads = [self.head(facts, a) for a in self._actions_of_last(pattern)]
        excess = max(
            max(
                h.before_release_bytes,
                h.after_release_bytes - released_bytes,
                h.after_copies_bytes - released_bytes,
            )
            for h in heads
        )
        lasting = heads[-1].net_bytes
        return lasting, excess, max(0.0, heads[0].net_bytes - lasting)

    # ------------------------------------------------------------------ series

    def _by_key(self, key: Key) -> Series:
        """Return the series of a whole key, as `_get` was given it."""
        kind, *rest = key
        made_by = {"exact": self._exact, "excess": self._excess, "net": self._net}
        return made_by[str(kind)](*rest)

    def _exact(self, *key: Hashable) -> Series:
        def make(noise: float) -> Any:
            if callable(self._predictor):
                return self._predictor()
            return make_predictor(self._predictor, noise=noise, nonnegative=True)

        return self._get(("exact", *key), make, 0.0, nonnegative=True)

    def _excess(self, *key: Hashable) -> Series:
        def make(noise: float) -> Any:
            return EnvelopeRegressor(noise=noise)

        return self._get(
            ("excess", *key),
            make,
            self._noise_bytes,
            nonnegative=True,
            is_excess=True,
        )

    def _net(self, *key: Hashable) -> Series:
        def make(noise: float) -> Any:
            return PolynomialRegressor(noise=noise)

        return self._get(("net", *key), make, self._noise_bytes, nonnegative=False)

    def _get(
        self,
        key: Key,
        make: Callable[[float], Any],
        noise: float,
        *,
        nonnegative: bool,
        is_excess: bool = False,
    ) -> Series:
        series = self._series.get(key)
        if series is None:
            series = Series(make, noise, nonnegative=nonnegative, is_excess=is_excess)
            self._series[key] = series
        series.scale = self.scale
        return series


def _with_released(
    sample: StepSample, released_bytes: float, noise_bytes: float
) -> StepSample:
    """Put the loss on the footing of a step in which no earlier outputs went.

    They go as the root's new outputs take their names, before the loss's peak, if it
    rises at all. Learned as it was read, a loss outside of the model was predicted 22%
    too low, and differed from batch to batch by what the one before had returned.
    """
    loss = sample.loss
    if loss is None or not released_bytes:
        return sample
    net, excess = loss.net_bytes, loss.excess_bytes
    if net is not None:
        net += released_bytes
    if excess is not None and excess > noise_bytes:
        excess += released_bytes
    return replace(sample, loss=SegmentSample(net, excess))


def _releases_sides(pattern: Pattern, events: Sequence[Measured]) -> bool:
    """Whether side tensors went in the forward: Note: [Side tensors]."""
    return any(
        all(events[reader].action == KEEP for reader in readers)
        for readers in pattern.sides
    )


def _holds_sides_to_the_end(pattern: Pattern, events: Sequence[Measured]) -> bool:
    """Whether side tensors were held up to their first readers' backward."""
    return all(events[readers[0]].action != KEEP for readers in pattern.sides)


def _is_told_by_other(sizes: Sizes, mine: Series, theirs: Series) -> bool:
    """Whether another action's readings of a head tell more than the action's own."""
    if not len(theirs):
        return False
    if not len(mine):
        return True
    if mine.doubt(sizes):
        return theirs.is_trusted or not theirs.doubt(sizes)
    is_rough = mine.noise == 0.0 and not mine.is_exact and not mine.has(sizes)
    return is_rough and not mine.is_excess and theirs.is_exact


def _share(sizes: Sizes, of: Sizes) -> float:
    """Return the largest ratio of a size to another shape's, of those that differ."""
    ratios = [a / max(1, b) for a, b in zip(sizes, of, strict=True) if a != b]
    return max(ratios, default=1.0)


def _numbers(sizes: Sizes) -> Sizes:
    """Put 0 for the symbol that a jagged output has for a size: its input tells it."""
    return tuple([size if isinstance(size, int) else 0 for size in sizes])
