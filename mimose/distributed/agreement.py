"""What ranks agree on before a forward, where a unit's forward waits for other ranks.

Note: [Agreement]
A recomputation runs a unit's forward again, and with it what that sends to other ranks.
So all ranks have to recompute the same calls, and each as far: up to the last tensor
that is needed, or to its end, as measured ones and those that are compared do. Lengths,
readings and what was learned differ by rank, so plans do, and they come at other times.
Before each forward the ranks exchange one small vector, of which each element's maximum
is taken: whether a rank has failed, has no plan, measures; a hash of its events and one
of its actions, each with its negative, so that the maxima tell whether all are equal;
which units it keeps whatever is planned, and has never compared; and its actions.

- One has failed: all raise.
- One has no plan, or its plan is for other events: all recompute everything.
- Else each event gets the action of all ranks' that holds least. Where the ranks' plans
  were equal, that is it. Where they were not, each judges the result on its own
  timeline, and a second exchange tells whether it is over one's budget: then all
  recompute everything, under a plan.

Every forward exchanges: an exchange on cache misses alone would be one that a rank with
a hit takes no part in. That a layer cannot be recomputed may show on one rank alone; in
the first forward all are told and run again, later it is an error: see Note: [The first
forward].

After an error in the middle of a forward there is nothing to agree on: whoever waits
for this rank cannot answer. It raises, and runs nothing again.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress
from typing import NamedTuple, NoReturn, Protocol

from mimose.cost.problem import Memory
from mimose.distributed.exchange import Exchange
from mimose.exactness.unit import Unit
from mimose.exceptions import MimoseError
from mimose.planners import Menu
from mimose.policy.decision import Decision
from mimose.policy.policy import Policy
from mimose.records import AgreementUse
from mimose.types import StepInput

_OTHERS_UNPLANNED = "another rank has no plan for its step, or one for other layers"
KEPT_ELSEWHERE = "another rank keeps it"
"""Why a unit is kept that this rank might recompute."""
_LEAST_EVENTS = 256
_EVENTS_A_UNIT = 8
"""A plan for more calls of units than that is not agreed on."""
_FITS, _OVER, _IMPOSSIBLE = 0, 1, 2
"""What a rank says of actions that others have asked for."""


class Asked(NamedTuple):
    """What a rank knows of a forward besides its decision."""

    facts: StepInput
    """What its plan is for."""
    memory: Memory
    """What is held, and the budget."""
    part: int
    """Which forward of its window it is."""
    is_measured: bool
    """Whether its boundaries will be read."""


class Agreement(Protocol):
    """Makes a decision that of all ranks."""

    is_on: bool
    """Whether there are others to agree with."""

    @property
    def exchange(self) -> Exchange | None:
        """With them."""
        ...

    def meet(self, description: Sequence[str]) -> None:
        """Make sure, as the session begins, that all ranks plan the same.

        Args:
            description: Of what they plan, line by line.
        """
        ...

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Return what tells the others of an error before this rank has answered."""
        ...

    def agree(self, decision: Decision, asked: Asked) -> Decision:
        """Return what this rank does, given what the others would.

        Args:
            decision: What it would do by itself.
            asked: What else it knows of the forward.
        """
        ...

    def use(self) -> AgreementUse | None:
        """Return what was exchanged; None where there is nobody."""
        ...


class Alone:
    """The identity: nothing is sent."""

    is_on = False
    exchange: Exchange | None = None

    def meet(self, description: Sequence[str]) -> None:
        """Do nothing."""

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Return what does nothing."""
        return contextlib.nullcontext()

    def agree(self, decision: Decision, asked: Asked) -> Decision:
        """Return the decision as it is."""
        del asked
        return decision

    def use(self) -> None:
        """Return nothing."""


class _Answer(NamedTuple):
    """The ranks' maxima."""

    unplanned: int = 0
    whole: int = 0
    events: int = 0
    minus_events: int = 0
    actions: int = 0
    minus_actions: int = 0

    @property
    def has_equal_events(self) -> bool:
        return self.events == -self.minus_events

    @property
    def has_equal_actions(self) -> bool:
        return self.actions == -self.minus_actions


def _most_events(n_units: int) -> int:
    return max(_LEAST_EVENTS, _EVENTS_A_UNIT * n_units)


def _n_values(n_units: int) -> int:
    """Return how many numbers ranks agree by: a head, two a unit, one an event."""
    return len(_Answer._fields) + 2 * n_units + _most_events(n_units)


class Together:
    """Agrees with the other ranks of a group: see Note: [Agreement].

    Args:
        exchange: With the other ranks.
        units: The units.
        menu: The actions in use.
        policy: Makes decisions for actions that others have asked for.
        plans: Whether plans are made; a baseline does the same on all ranks.

    Attributes:
        exchange: With the other ranks.
        n_changed: Forwards that did something else than this rank had decided.
    """

    is_on = True

    def __init__(
        self,
        exchange: Exchange,
        units: Sequence[Unit],
        menu: Menu,
        policy: Policy,
        *,
        plans: bool,
    ) -> None:
        self.exchange: Exchange = exchange
        self._units = units
        self._policy = policy
        self._plans = plans
        self._names = menu.names
        self._index = {name: index for index, name in enumerate(menu.names)}
        self._most_events = _most_events(len(units))
        self.n_changed = 0

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Tell the others of an error, where this rank has not answered yet."""
        return self.exchange.telling()

    def meet(self, description: Sequence[str]) -> None:
        """Make sure, as the session begins, that all ranks plan the same.

        Args:
            description: Of what they plan, line by line.

        Raises:
            MimoseError: They do not.
            OtherRankError: Another rank could not attach.
        """
        own = _hash(tuple(description))
        answer, _ = self._exchange(_Answer(events=own, minus_events=-own))
        if not answer.has_equal_events:
            _refuse_unlike(self.exchange.gathered(list(description)))
        self.exchange.n_values = _n_values(len(self._units))

    def use(self) -> AgreementUse:
        """Return what was exchanged."""
        n_ranks, found = self.exchange.n_ranks, self.exchange
        return AgreementUse(n_ranks, found.n_exchanges, found.seconds, self.n_changed)

    # ------------------------------------------------------------------ forwards

    def agree(self, decision: Decision, asked: Asked) -> Decision:
        """Return what this rank does, given what the others would.

        Args:
            decision: What it would do by itself.
            asked: What else it knows of the forward.

        Raises:
            InfeasibleBudgetError: Another rank's budget cannot be kept.
            OtherRankError: Another rank has failed otherwise.
        """
        own = self._own_actions(decision)
        if own is None and decision.chosen is not None:
            decision = _unplanned(
                f"more than {self._most_events} calls of layers make up a step"
            )
        answer, body = self._exchange(
            self._head(decision, asked, own), self._body(own or ())
        )
        n_units = len(self._units)
        kept, fresh = body[:n_units], body[n_units : 2 * n_units]
        for unit, is_kept in zip(self._units, kept, strict=True):
            if is_kept and not unit.is_kept:
                unit.keep(KEPT_ELSEWHERE)
        agreed = self._agreed(decision, asked, answer, body[2 * n_units :], own or ())
        if agreed.chosen is None:
            recomputed = [not is_kept for is_kept in kept]
        else:
            recomputed = [
                any(action != self._names[0] for action in actions)
                for actions in agreed.chosen.by_unit
            ]
        self.n_changed += self._own_actions(agreed) != own
        meets_fresh = any(compress(fresh, recomputed))
        return replace(agreed, is_whole=bool(answer.whole) or meets_fresh)

    def _agreed(
        self,
        decision: Decision,
        asked: Asked,
        answer: _Answer,
        actions: Sequence[int],
        own: tuple[int, ...],
    ) -> Decision:
        if not self._plans:
            return decision
        if answer.unplanned or not answer.has_equal_events:
            if decision.chosen is None:
                return decision
            return _unplanned(_OTHERS_UNPLANNED)
        wanted = self._without_kept(decision, actions)
        if answer.has_equal_actions:
            made = self._imposed(decision, asked, wanted, own)
        else:
            self.exchange.expect()
            made = self._imposed(decision, asked, wanted, own)
            made = self._judged(decision, asked, made, own)
        return _unplanned(_OTHERS_UNPLANNED) if made is None else made

    def _judged(
        self,
        decision: Decision,
        asked: Asked,
        made: Decision | None,
        own: tuple[int, ...],
    ) -> Decision | None:
        """Return what all do, once each has said whether the first choice fits."""
        verdict = _IMPOSSIBLE
        least: Decision | None = None
        if made is not None:
            is_over = made is not decision and not self._policy.fits(made, asked.memory)
            verdict = _OVER if is_over else _FITS
            everything = [len(self._names) - 1] * len(own)
            wanted = self._without_kept(decision, everything)
            least = self._imposed(decision, asked, wanted, own)
            verdict = _IMPOSSIBLE if least is None else verdict
        [worst, *_] = self.exchange.maxima([verdict])
        if worst == _IMPOSSIBLE:
            return None
        return least if worst == _OVER else made

    def _imposed(
        self,
        decision: Decision,
        asked: Asked,
        wanted: tuple[int, ...],
        own: tuple[int, ...],
    ) -> Decision | None:
        if wanted == own:
            return decision
        names = tuple(self._names[index] for index in wanted)
        return self._policy.imposed(asked.facts, decision, asked.memory, names)

    def _without_kept(
        self, decision: Decision, actions: Sequence[int]
    ) -> tuple[int, ...]:
        """Return actions of events, those of units that are kept set to that."""
        assert decision.chosen is not None
        kept = {unit.name for unit in self._units if unit.is_kept}
        return tuple(
            0 if event.rpartition("#")[0] in kept else index
            for event, index in zip(decision.chosen.events, actions, strict=False)
        )

    # ------------------------------------------------------------------ the vector

    def _own_actions(self, decision: Decision) -> tuple[int, ...] | None:
        chosen = decision.chosen
        if chosen is None or len(chosen.events) > self._most_events:
            return None
        return tuple(self._index[action] for action in chosen.plan.actions)

    def _head(
        self, decision: Decision, asked: Asked, own: tuple[int, ...] | None
    ) -> _Answer:
        chosen = decision.chosen
        if chosen is None or own is None:
            return _Answer(unplanned=1, whole=int(asked.is_measured))
        events = _hash((chosen.events, chosen.between, asked.part))
        actions = _hash(own)
        whole = int(asked.is_measured)
        return _Answer(0, whole, events, -events, actions, -actions)

    def _body(self, own: Sequence[int]) -> list[int]:
        kept = [int(unit.is_kept) for unit in self._units]
        fresh = [int(not (unit.is_compared or unit.is_kept)) for unit in self._units]
        return [*kept, *fresh, *own]

    def _exchange(
        self, head: _Answer, body: Sequence[int] = ()
    ) -> tuple[_Answer, list[int]]:
        found = self.exchange.maxima((*head, *body))
        return _Answer(*found[: len(head)]), found[len(head) :]


def _hash(what: object) -> int:
    """Return a number above 0 that is the same in every process."""
    return 1 + zlib.crc32(repr(what).encode())


def _unplanned(reason: str) -> Decision:
    return Decision("fallback", None, reason=reason)


def _refuse_unlike(found: Sequence[list[str]]) -> NoReturn:
    """Say where two ranks plan different things.

    Raises:
        MimoseError: Always.
    """
    first = found[0]
    rank = next(rank for rank, lines in enumerate(found) if lines != first)
    other = found[rank]
    pairs = ((a, b) for a, b in zip(first, other, strict=False) if a != b)
    one, another = next(pairs, (f"{len(first)} lines", f"{len(other)} lines"))
    msg = (
        f"the ranks cannot agree, for they plan different things: one has {one}, "
        f"another (place {rank} of the group) has {another}. Attach with the same "
        f"arguments to the same model on all ranks; where ranks run different parts "
        f"of a model, give attach(agree=...) the group of those that run the same"
    )
    raise MimoseError(msg)
