"""A `PlanningProblem` for any sizes, or why none can be filled that is trusted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mimose.cost.costs import call_cost
from mimose.cost.heads import Heads, actions_of_last, head_series, heads
from mimose.cost.layout import AdjacentFamilies, Layout
from mimose.cost.model import CostModel, backward_key, gap_key, is_turn
from mimose.cost.patterns import Pattern
from mimose.cost.sequences import Event
from mimose.cost.series import Series
from mimose.planners import ActionSpec, PlanningProblem
from mimose.types import Sizes, StepInput

_AND_COPIES = 1.01
"""What recomputes and copies to the host takes at least so many times as long as what
recomputes alone: at equal costs it would always be taken, for the bytes of an input."""


class Memory(NamedTuple):
    """What is held when a step begins, and what is known to come."""

    budget_bytes: float
    start_bytes: float
    released_bytes: float
    """Outputs of the last step that go before the backward."""
    optimizer_excess_bytes: float
    state_to_come_bytes: float = 0.0
    """Optimizer state that is made after this step, and is there from then on."""
    host_budget_bytes: float = math.inf
    """For what actions hold on the host."""
    reserved_ratio: float = 1.0
    """Bytes of the device that the budget counts for each byte of growth."""

    @property
    def with_state(self) -> Memory:
        """The same once that state is there: what plans are made for, to be used on."""
        if not self.state_to_come_bytes:
            return self
        start = self.start_bytes + self.state_to_come_bytes
        return self._replace(start_bytes=start, state_to_come_bytes=0.0)

    @property
    def headroom_bytes(self) -> float:
        """What the step may grow by."""
        return self.budget_bytes - self.start_bytes


# ------------------------------------------------------------------------------- trust


def doubt(model: CostModel, facts: StepInput) -> str:
    """Return why no plan can be trusted at these sizes; "" if one can."""
    if facts.context not in model.patterns:
        return "nothing was measured with such inputs yet"
    if not facts.calls and model.patterns[facts.context].lacks_some(facts.sizes):
        return "more layers run at such sizes than in the steps measured"
    pattern = model.pattern(facts)
    if not pattern.events:
        return (
            "no layer took part in the backward of the steps measured with such inputs"
        )
    if not pattern.is_ordered:
        return "gradients do not arrive in the reverse order of the layers"
    if pattern.reaches_further(facts.sizes):
        return "the layers' sizes were seen at smaller shapes alone"
    if not pattern.follows_rules:
        return "the layers' sizes do not follow from the batch's by a known rule"
    for name, series, sizes in _needed(model, facts, pattern):
        reason = series.doubt(sizes)
        if reason:
            return f"{name}: {reason}"
    return ""


def extrapolation_ratio(model: CostModel, facts: StepInput) -> float:
    """Return how far beyond the measured range a size lies, as a share of it."""
    high = model.pattern(facts).high
    pairs = zip(facts.sizes, high, strict=True)
    return max(0.0, *(size / max(1, most) - 1.0 for size, most in pairs))


def _needed(
    model: CostModel, facts: StepInput, pattern: Pattern
) -> Iterator[tuple[str, Series, Sizes]]:
    """Yield what has to be known at these sizes, with a name for people."""
    own = pattern.own_sizes(facts.sizes)
    for index, neighbours in pattern.layout.classes:
        event = pattern.events[index]
        layer = _Layer(model, facts, event.family, neighbours)
        chosen = _choices(model, event, own[index])
        for what, series, sizes in layer.needed(chosen, own[index]):
            yield f"{what} of {event.name}", series, sizes
    for pair in pattern.layout.gaps:
        key = gap_key(facts, pair)
        for series in (model.net(*key), model.excess(*key)):
            yield "between the layers", series, facts.sizes
    action = actions_of_last(model, pattern)[-1]
    for part, series in head_series(model, facts, action):
        yield f"the {part}", series, facts.sizes


class _Layer:
    """The series of one family between two others.

    Args:
        model: What was learned.
        facts: The step's context.
        family: The layer's.
        neighbours: The families before and after it.
    """

    def __init__(
        self,
        model: CostModel,
        facts: StepInput,
        family: str,
        neighbours: AdjacentFamilies,
    ) -> None:
        self._model = model
        self._menu = model.menu
        self._family = family
        self._around = neighbours
        self._backward = backward_key(facts, family, neighbours)
        self._turn_sizes = facts.sizes if is_turn(neighbours) else None

    def held(self, action: str) -> Series:
        return self._model.exact(self._family, "held", action)

    def forward(self, action: str, sizes: Sizes) -> Series:
        # Who holds everything holds the most at every moment of the forward.
        own = self._model.excess(self._family, "forward", action)
        first = self._model.excess(self._family, "forward", self._menu.first)
        return self._trusted(action, own, first, sizes)

    def _trusted(
        self, action: str, own: Series, stand_in: Series, sizes: Sizes
    ) -> Series:
        """Return an action's own series; another's, as long as few steps ran under it.

        Steps are collected under the least action, which tells of the first as well.
        """
        if action in (self._menu.first, self._menu.least):
            return own
        return own if len(own) and not own.doubt(sizes) else stand_in

    def backward(self, action: str, sizes: Sizes) -> tuple[Series, bool]:
        """Return what is known of an action's backward, and whether it is its own."""
        sizes = self._turn_sizes or sizes
        own, least = self._own_backward(action), self._own_backward(self._menu.least)
        found = self._trusted(action, own, least, sizes)
        return found, found is own

    def _own_backward(self, action: str) -> Series:
        return self._model.excess(*self._backward, action)

    def is_told(self, action: str) -> bool:
        """Whether steps have shown an action's backward, at some sizes at least.

        At others the least stands in, which is the safe side.
        """
        return self._own_backward(action).is_trusted

    def n_told(self, action: str) -> int:
        """Return at how many shapes they have."""
        return len(self._own_backward(action))

    def net(self, action: str, sizes: Sizes) -> Series:
        """Return what is known of an action's net change of the level.

        Actions differ in who frees a layer's output (Note: [Saved outputs]), in which
        those between the ends are like the first. Where nothing is known of those, the
        least stands in, and they for it.
        """
        sizes = self._turn_sizes or sizes
        names, least = self._menu.names, self._menu.least
        order = names[::-1] if action == least else (action, *names[:-1])
        known = (own for own in map(self._own_net, order) if not own.doubt(sizes))
        return next(known, self._own_net(least))

    def _own_net(self, action: str) -> Series:
        return self._model.net(*self._backward, action)

    def needed(
        self, allowed: Sequence[str], sizes: Sizes
    ) -> Iterator[tuple[str, Series, Sizes]]:
        """Yield what a plan rests on, at which sizes, with a name for people.

        How the first action's backward differs from the least's is learned from plans,
        so plans are made without.
        """
        first, behind = self._menu.first, self._turn_sizes or sizes
        for action in allowed:
            yield f"bytes held ({action})", self.held(action), sizes
        for action in allowed:
            yield f"forward ({action})", self.forward(action, sizes), sizes
        for action in allowed:
            if action != first:
                yield f"backward ({action})", self.backward(action, sizes)[0], behind
        for action in allowed:
            yield f"gradients ({action})", self.net(action, sizes), behind

    def numbers(self, sizes: Sizes, beyond: Mapping[str, float]) -> NDArray[np.float64]:
        """Return (6, K), by action: held, both excesses, net, cost, bytes on the host.

        Args:
            sizes: The layer's own.
            beyond: For the last layer, what the head holds beyond the lasting, by the
                layer's action: Note: [Last layer].
        """
        names, first = self._menu.names, self._menu.first
        behind = self._turn_sizes or sizes
        held = [self.held(action).predict(sizes) for action in names]
        held[0] = max(held[0], held[-1])
        for index, spec in enumerate(self._menu.specs[1:], 1):
            if not spec.packs:  # which may hold its input in another form
                held[index] = min(held[index], held[0])
        forward = [self.forward(action, sizes).predict(sizes) for action in names]
        backward = [self._first_backward(sizes, held[-1], beyond.get(first, 0.0))]
        for index, spec in enumerate(self._menu.specs[1:], 1):
            series, is_own = self.backward(spec.name, sizes)
            over = series.predict(behind) + beyond.get(spec.name, 0.0)
            if spec.recomputes or not is_own:
                # What running again brings back was left out of the readings.
                over += max(0.0, held[0] - held[index])
            backward.append(max(forward[0], over) if spec.recomputes else over)
        net = [self.net(action, sizes).predict(behind) for action in names]
        others = map(self._own_net, names[:-1])
        if beyond and not all(own.doubt(behind) for own in others):
            # Behind the head the last output counts as gone.
            net[:-1] = [each + beyond.get(first, 0.0) for each in net[:-1]]
        cost = [0.0]
        for spec, own in zip(self._menu.specs[1:], held[1:], strict=True):
            freed = held[0] - own
            cost.append(call_cost(self._model, self._family, spec, sizes, freed))
        for index, spec in enumerate(self._menu.specs):
            if spec.recomputes and spec.needs_host:
                cost[index] = max(cost[index], _AND_COPIES * cost[-1])
        host = [self._on_host(spec, held[0], sizes) for spec in self._menu.specs]
        return np.array((held, forward, backward, net, cost, host))

    def _on_host(self, spec: ActionSpec, kept_bytes: float, sizes: Sizes) -> float:
        """Return what an action holds on the host; if nobody told, all that is kept."""
        series = self._model.exact(self._family, "host", spec.name)
        if not series.doubt(sizes):
            return series.predict(sizes)
        return kept_bytes if spec.needs_host else 0.0

    def _first_backward(self, sizes: Sizes, least_held: float, beyond: float) -> float:
        """Return the excess of the backward of a layer that kept everything.

        Until such layers have been seen, it is taken to be that of the least action,
        beyond what that brings back: rather more, where an output is saved (by a
        ReLU), which is there twice after a recomputation. Or that of an action between
        the two, which rises by what it rebuilds on top of what keeping rises by.
        """
        sizes = self._turn_sizes or sizes
        kept, least = map(self._own_backward, (self._menu.first, self._menu.least))
        excess, over = least.predict(sizes), kept.predict(sizes) + beyond
        if not excess:
            return over
        if kept.doubt(sizes):
            after = excess + max(0.0, beyond - least_held)  # that is there after one
            return min([after, *(each + beyond for each in self._between(sizes))])
        return over if kept.error < least.error else min(excess, over)

    def _between(self, sizes: Sizes) -> list[float]:
        """Return the backward excess of the actions between the ends, where known."""
        own = map(self._own_backward, self._menu.names[1:-1])
        return [each.predict(sizes) for each in own if not each.doubt(sizes)]


# ----------------------------------------------------------------------------- filling


def fill_problem(
    model: CostModel,
    facts: StepInput,
    memory: Memory,
    budget_bytes: float | None = None,
) -> PlanningProblem:
    """Fill the planning problem of one shape.

    Args:
        model: What was learned.
        facts: The step's context and exact sizes.
        memory: What is held, and the budget.
        budget_bytes: Another budget, such as one with the margin taken off.

    Raises:
        KeyError: Nothing was measured in this context.
    """
    pattern, menu = model.pattern(facts), model.menu
    layout = pattern.layout
    released = memory.released_bytes
    found = heads(model, facts, pattern, released)
    table = _class_table(model, facts, pattern, found)[layout.of_event]
    held, forward, backward, net, cost, host = table.transpose(1, 0, 2)
    gaps = _gap_table(model, facts, layout)[layout.of_gap]
    budget = memory.budget_bytes if budget_bytes is None else budget_bytes
    gaps = np.vstack((gaps, (found.net_bytes - released, found.excess_bytes)))
    own = pattern.own_sizes(facts.sizes)
    choices = []
    for event, sizes in zip(pattern.events, own, strict=True):
        choices.append(_choices(model, event, sizes))
    rows = [[name in chosen for name in menu.names] for chosen in choices]
    shape = len(pattern.events), len(menu.names)
    allowed = np.array(rows, dtype=np.bool_).reshape(shape)
    return PlanningProblem(
        events=tuple(event.name for event in pattern.events),
        actions=menu.names,
        allowed=allowed,
        held_bytes=held,
        forward_excess_bytes=forward,
        backward_excess_bytes=backward,
        backward_net_bytes=net[:, -1],
        cost=cost,
        gap_bytes=gaps[:, 0],
        gap_excess_bytes=gaps[:, 1],
        start_bytes=max(0.0, memory.start_bytes),
        optimizer_state_bytes=memory.state_to_come_bytes,
        step_excess_bytes=memory.optimizer_excess_bytes,
        budget_bytes=max(0.0, budget),
        host_bytes=host,
        host_budget_bytes=memory.host_budget_bytes,
        lossy=menu.lossy,
    )


def _choices(model: CostModel, event: Event, sizes: Sizes) -> tuple[str, ...]:
    """Return what an event may run under: of actions between the ends, those known."""
    ends = model.menu.first, model.menu.least
    return tuple(
        action
        for action in model.allowed(event.unit)
        if action in ends or not model.exact(event.family, "held", action).doubt(sizes)
    )


def untold(model: CostModel, facts: StepInput) -> tuple[tuple[str, ...], ...]:
    """Return, by event, actions of which too little is known, the least known first.

    They lie between the ends of the menu: what is kept may run under them instead,
    which holds no more, and shows what they do. Events of one class have the same.
    """
    pattern = model.pattern(facts)
    between = model.menu.names[1:-1]
    if not between:
        return ((),) * len(pattern.events)
    own = pattern.own_sizes(facts.sizes)
    found = []
    for index, neighbours in pattern.layout.classes:
        event = pattern.events[index]
        known = _choices(model, event, own[index])
        layer = _Layer(model, facts, event.family, neighbours)
        allowed = set(model.allowed(event.unit)).intersection(between)
        unknown = {a for a in allowed if a not in known or not layer.is_told(a)}
        found.append(tuple(sorted(unknown, key=layer.n_told)))
    return tuple(found[number] for number in pattern.layout.of_event)


def _class_table(
    model: CostModel, facts: StepInput, pattern: Pattern, found: Heads
) -> NDArray[np.float64]:
    """Return (n_classes, 6, K) numbers: see `_Layer.numbers`."""
    own, layout = pattern.own_sizes(facts.sizes), pattern.layout
    table = np.zeros((len(layout.classes), 6, len(model.menu.names)))
    for number, (index, neighbours) in enumerate(layout.classes):
        layer = _Layer(model, facts, pattern.events[index].family, neighbours)
        is_last = number == layout.of_event[-1]
        beyond = found.beyond_bytes if is_last else {}
        table[number] = layer.numbers(own[index], beyond)
    return table


def _gap_table(
    model: CostModel, facts: StepInput, layout: Layout
) -> NDArray[np.float64]:
    """Return (n_gaps, 2): net and excess."""
    rows = []
    for pair in layout.gaps:
        key = gap_key(facts, pair)
        net, excess = model.net(*key), model.excess(*key)
        rows.append((net.predict(facts.sizes), excess.predict(facts.sizes)))
    return np.array(rows).reshape(-1, 2)
