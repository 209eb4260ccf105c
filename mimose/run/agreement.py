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
a hit takes no part in. What follows from a layer's code (it cannot be recomputed, it is
run again for that reason) is taken to show on all ranks in the same unplanned step; in
a planned one it is an error.

After an error in the middle of a forward there is nothing to agree on: whoever waits
for this rank cannot answer. It raises, and runs nothing again.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
from torch import distributed

from mimose.decide.decision import Decision
from mimose.decide.policy import Policy
from mimose.exceptions import (
    InfeasibleBudgetError,
    MimoseError,
    OtherRankError,
    first_line,
)
from mimose.learn.learner import Learner
from mimose.learn.problem import Memory
from mimose.run.unit import Unit
from mimose.types import StepInput

_OTHERS_UNPLANNED = "another rank has no plan for its step, or one for other layers"
_KEPT_ELSEWHERE = "another rank keeps it"
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


class Alone:
    """The identity: nothing is sent."""

    is_on = False

    def meet(self, description: Sequence[str]) -> None:
        """Do nothing."""

    def telling(self) -> contextlib.AbstractContextManager[None]:
        """Return what does nothing."""
        return contextlib.nullcontext()

    def agree(self, decision: Decision, asked: Asked) -> Decision:
        """Return the decision as it is."""
        del asked
        return decision


class _Answer(NamedTuple):
    """The ranks' maxima."""

    error: int = 0
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


class Together:
    """Agrees with the other ranks of a group: see Note: [Agreement].

    Args:
        group: The ranks; carries tensors of the CPU.
        units: The units.
        learner: Knows the actions in use.
        policy: Makes decisions for actions that others have asked for.
        plans: Whether plans are made; a baseline does the same on all ranks.

    Attributes:
        n_exchanges: Exchanges so far.
        seconds: What they took, waiting for other ranks included.
        n_changed: Forwards that did something else than this rank had decided.
    """

    is_on = True

    def __init__(
        self,
        group: Any,
        units: Sequence[Unit],
        learner: Learner,
        policy: Policy,
        *,
        plans: bool,
    ) -> None:
        self._group = group
        self._units = units
        self._policy = policy
        self._plans = plans
        menu = learner.model.menu
        self._names = menu.names
        self._index = {name: index for index, name in enumerate(menu.names)}
        self._most_events = max(_LEAST_EVENTS, _EVENTS_A_UNIT * len(units))
        self._n_body = 0  # until all are known to have as many units
        self._is_due = False
        self.n_exchanges = 0
        self.n_changed = 0
        self.seconds = 0.0

    # ------------------------------------------------------------------ who fails

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of an error, where this rank has not answered yet."""
        self._is_due = True
        try:
            yield
        except Exception as error:
            if self._is_due:
                self._exchange(_Answer(error=1))
                self._gather(error)
            raise

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
            _refuse_unlike(self._gathered(list(description)))
        self._n_body = 2 * len(self._units) + self._most_events

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
        n_units, kept, fresh = len(self._units), *self._by_unit(body)
        for unit, is_kept in zip(self._units, kept, strict=True):
            if is_kept and not unit.is_kept:
                unit.keep(_KEPT_ELSEWHERE)
        agreed = self._agreed(decision, asked, answer, body[2 * n_units :], own or ())
        if agreed.chosen is None:
            recomputed = [not is_kept for is_kept in kept]
        else:
            recomputed = [
                any(action != self._names[0] for action in actions)
                for actions in agreed.chosen.by_unit
            ]
        self.n_changed += self._own_actions(agreed) != own
        meets_fresh = any(map(_both, fresh, recomputed))
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
        made = self._imposed(decision, asked, wanted, own)
        if not answer.has_equal_actions:
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
        answer, _ = self._exchange(_Answer(whole=verdict))
        if answer.whole == _IMPOSSIBLE:
            return None
        return least if answer.whole == _OVER else made

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
        return _Answer(0, 0, whole, events, -events, actions, -actions)

    def _body(self, own: Sequence[int]) -> list[int]:
        kept = [int(unit.is_kept) for unit in self._units]
        fresh = [int(not (unit.is_compared or unit.is_kept)) for unit in self._units]
        return [*kept, *fresh, *own]

    def _by_unit(self, body: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
        n_units = len(self._units)
        return body[:n_units], body[n_units : 2 * n_units]

    def _exchange(
        self, head: _Answer, body: Sequence[int] = ()
    ) -> tuple[_Answer, list[int]]:
        """Return the maxima over all ranks.

        Raises:
            MimoseError: Another rank is gone, or does not answer.
        """
        self._is_due = False
        filler = [0] * (self._n_body - len(body))
        vector = torch.tensor([*head, *body, *filler], dtype=torch.int64)
        began = time.perf_counter()
        try:
            distributed.all_reduce(
                vector, op=distributed.ReduceOp.MAX, group=self._group
            )
        except RuntimeError as error:
            raise _unanswered(error) from error
        self.seconds += time.perf_counter() - began
        self.n_exchanges += 1
        found = vector.tolist()
        n_head = len(head)
        answer = _Answer(*found[:n_head])
        if answer.error and not head.error:
            self._gather(None)
        return answer, found[n_head:]

    # ------------------------------------------------------------------ errors

    def _gather(self, error: Exception | None) -> None:
        """Exchange what went wrong; raise it where it went wrong elsewhere alone."""
        found = self._gathered(None if error is None else _told(error))
        if error is not None:
            return
        rank, told = next((rank, told) for rank, told in enumerate(found) if told)
        _raise_other(distributed.get_global_rank(self._group, rank), told)

    def _gathered(self, own: Any) -> list[Any]:
        found: list[Any] = [None] * distributed.get_world_size(self._group)
        try:
            distributed.all_gather_object(found, own, group=self._group)
        except RuntimeError as error:
            raise _unanswered(error) from error
        return found


def _both(one: object, other: object) -> bool:
    return bool(one) and bool(other)


def _hash(what: object) -> int:
    """Return a number above 0 that is the same in every process."""
    return 1 + zlib.crc32(repr(what).encode())


def _unplanned(reason: str) -> Decision:
    return Decision("fallback", None, reason=reason)


def _told(error: Exception) -> dict[str, Any]:
    told: dict[str, Any] = {"kind": type(error).__name__, "text": str(error)}
    if isinstance(error, InfeasibleBudgetError):
        told["numbers"] = error.budget_bytes, error.least_peak_bytes, error.holders
        told["advice"] = error.advice
    return told


def _raise_other(rank: int, told: dict[str, Any]) -> NoReturn:
    if "numbers" in told:
        budget, least, holders = told["numbers"]
        advice = f"That is so on rank {rank}, and all ranks stop. {told['advice']}"
        raise InfeasibleBudgetError(budget, least, holders, advice.rstrip())
    raise OtherRankError(rank, told["kind"], told["text"])


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


def _unanswered(error: RuntimeError) -> MimoseError:
    return MimoseError(
        f"the ranks could not agree on this step, as another one is gone or did not "
        f"answer in time: {first_line(error)}. See that rank's own error"
    )
