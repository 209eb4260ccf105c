"""Measures the seconds of steps on the device, and predicts those of later steps.

Note: [A step's seconds]
A step lasts from the begin of its first forward to the end of its backward. All steps
before an optimizer step share its time. On an accelerator, events measure both; they
are read only on request, so the host does not wait. On a CPU the host's clock measures.
What predicts: `mimose.predictors.rates`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, TypeAlias

import numpy as np
import torch
from cachetools import LRUCache
from numpy.typing import NDArray

from mimose.cost.learner import Learner
from mimose.cost.problem import step_work
from mimose.predictors.rates import COST, IS_NEW, SECONDS, Rates, fit_rates
from mimose.records import FEWER_SHAPES, MUCH, FirstTimes
from mimose.runtime.optimizers import OptimizerKind
from mimose.types import MOST_CONTEXTS, Context, StepInput, without_rows

_log = logging.getLogger(__name__)

_Floats: TypeAlias = NDArray[np.float64]
_Flags: TypeAlias = NDArray[np.bool_]

Mark: TypeAlias = "torch.Event | float"
"""A moment on the device or on the host."""

_Timed: TypeAlias = tuple[StepInput, Sequence[str], bool]
"""A step, the actions of its layer calls, and whether its shape was new."""

_LATELY, _FEW = 64, 16
"""Rates are fitted to the last 64 steps of a context and 16 optimizer steps."""
_FEW_NEW = 32
"""New shapes until it is asked again how much they take, which may fit rates."""
_MORE = "~more"
"""Marks a context's steps whose plans have an extra cost: only these show its rate."""
_REFIT = 8
"""Rates are fitted anew after so many steps: with a floor that takes 0.1 s of the host.
"""


class StepSeconds:
    """Times steps, and fits rates to them on request.

    Args:
        device: The model's device.
        learner: Predicts what steps compute and save.
    """

    def __init__(self, device: torch.device, learner: Learner) -> None:
        self._device = device
        self._learner = learner
        self.mark: Callable[[], Mark]
        self.mark = self._event if _has_events(device) else time.perf_counter
        """Returns this moment."""
        self._timed: deque[tuple[Mark, Mark, _Timed | int]]
        self._timed = deque(maxlen=2 * _LATELY)
        """Begin, end, and the step; for an optimizer step, the number of steps before.
        """
        self._new: deque[tuple[_Timed, float]] = deque(maxlen=_LATELY)
        """Steps and their seconds."""
        self._met: set[int] = set()
        """The shapes of all steps, by their hashes."""
        self._known: LRUCache[Context, deque[tuple[float, ...]]]
        self._known = LRUCache(MOST_CONTEXTS)
        """The work and seconds of steps by context, with and without `_MORE`."""
        self._rates: dict[Context, Rates] = {}
        """The rates fitted to them."""
        self._n_since_fit: Counter[Context] = Counter()
        self._optimizer: deque[tuple[float, int]] = deque(maxlen=_FEW)
        """Seconds of optimizer steps, and the number of the model's steps before."""
        self._n_since = 0
        self._n_new, self._has_said = 0, False
        self._optimizer_began: Mark | None = None

    def _event(self) -> Mark:
        event = torch.Event(device=self._device, enable_timing=True)
        event.record()
        return event

    def step_ended(
        self, began: Mark, step_input: StepInput, actions: Sequence[str]
    ) -> None:
        """Record that a step's backward ends now.

        Args:
            began: When its first forward began.
            step_input: Its context and sizes.
            actions: The actions of its layer calls.
        """
        ended = self.mark()
        if self._optimizer_began is not None:  # the optimizer's closure ran this step
            self._optimizer_began = ended
        self._n_since += 1
        is_new = self.is_new(step_input)
        self._met.add(_shape(step_input))
        self._say_first_times(step_input.context, is_new)
        self._timed.append((began, ended, (step_input, actions, is_new)))

    def _say_first_times(self, context: Context, is_new: bool) -> None:
        """Say once if shapes' first times take much; asked after 32 new shapes each."""
        self._n_new += is_new
        if self._has_said or not is_new or self._n_new % _FEW_NEW:
            return
        found = self.first_times(context)
        if found is not None and found.share > MUCH:
            self._has_said = True
            _log.warning(
                "mimose: %d of the last %d steps met a shape for the first time, which "
                "took %.0f%% of their time. %s",
                found.n_new, found.n_steps, 100 * found.share, FEWER_SHAPES,
            )  # fmt: skip

    def is_new(self, step_input: StepInput) -> bool:
        """Return whether no step of the process had such a shape, on an accelerator.

        On a CPU no library was seen to take much the first time.
        """
        return self._device.type != "cpu" and _shape(step_input) not in self._met

    def optimizer_begins(self) -> None:
        """Record that an optimizer's step begins."""
        self._optimizer_began = self.mark()

    def optimizer_ended(self, kind: OptimizerKind) -> None:
        """Record that an optimizer's step has ended.

        Args:
            kind: Whose parameters it holds.
        """
        # None: as part of a backward.
        if kind != "own" or self._optimizer_began is None:
            return
        self._timed.append((self._optimizer_began, self.mark(), self._n_since))
        self._n_since, self._optimizer_began = 0, None

    def _read(self) -> None:
        """Read all timings that the device has finished."""
        while self._timed:
            began, ended, which = self._timed[0]
            if isinstance(began, float):
                assert isinstance(ended, float)
                seconds = ended - began
            else:
                assert isinstance(ended, torch.Event)
                if not ended.query():
                    return
                seconds = began.elapsed_time(ended) / 1e3
            self._timed.popleft()
            if isinstance(which, int):
                self._optimizer.append((seconds, which))
            else:
                self._new.append((which, seconds))

    def rates(self, context: Context) -> Rates | None:
        """Return the rates of a context.

        Args:
            context: The context of the steps.

        Returns:
            None if too few steps or shapes were timed.
        """
        self._take_in()
        own = without_rows(context)
        rates = self._rates.get(own)
        if rates is None:
            rates = fit_rates(self._rows(context))
            if rates is None:
                return None
            self._rates[own] = rates
            self._n_since_fit[own] = 0
        if not self._optimizer:
            return rates
        seconds, n_steps = zip(*self._optimizer, strict=True)
        per_step = len(n_steps) / max(1, sum(n_steps))
        return rates._replace(optimizer=per_step * median(seconds))

    def first_times(self, context: Context) -> FirstTimes | None:
        """Return what shapes take the first time; None if that is not known."""
        rates, known = self.rates(context), self._rows(context)
        if rates is None or not any(rates.first):
            return None
        new = [rates.first[row[COST] > 0.0] for row in known if row[IS_NEW]]
        whole = sum(row[SECONDS] for row in known) + rates.optimizer * len(known)
        n, seconds = len(known), sum(new)
        return FirstTimes(len(new), n, seconds / whole, seconds / n)

    def _rows(self, context: Context) -> list[tuple[float, ...]]:
        own = without_rows(context)
        return [*self._known.get(own, ()), *self._known.get(own + _MORE, ())]

    def _take_in(self) -> None:
        """Add the work of timed steps whose context the cost model knows."""
        self._read()
        model = self._learner.model
        for _ in range(len(self._new)):
            step, seconds = self._new.popleft()
            step_input, actions, is_new = step
            if step_input.context not in model.patterns:
                self._new.append((step, seconds))  # the model has not learned it yet
                continue
            if len(actions) != len(model.pattern(step_input).calls) or seconds <= 0.0:
                continue
            own = without_rows(step_input.context)
            work = step_work(model, step_input, actions)
            key = own + _MORE if work[-1] else own
            known = self._known.setdefault(key, deque(maxlen=_LATELY))
            known.append((*work, seconds, float(is_new)))
            self._n_since_fit[own] += 1
            if self._n_since_fit[own] >= _REFIT:
                self._rates.pop(own, None)

    def state_dict(self) -> dict[str, Any]:
        """Return what was timed, as JSON values."""
        self._take_in()
        return {
            "steps": {own: list(known) for own, known in self._known.items()},
            "optimizer": list(self._optimizer),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what another session has timed.

        Args:
            state: What ``state_dict`` returned; empty in an older state.
        """
        self._n_since, self._optimizer_began = 0, None
        for waiting in (self._timed, self._new, self._rates, self._known):
            waiting.clear()
        for own, known in state.get("steps", {}).items():
            # An older state does not say which shapes were new.
            rows = ((*map(float, row), 0.0)[: IS_NEW + 1] for row in known)
            self._known[str(own)] = deque(rows, maxlen=_LATELY)
        found = ((float(s), int(n)) for s, n in state.get("optimizer", ()))
        self._optimizer = deque(found, maxlen=_FEW)


def _shape(step_input: StepInput) -> int:
    return hash((step_input.structure, step_input.sizes))


def _has_events(device: torch.device) -> bool:
    """Whether a device has events that measure time."""
    if device.type == "cpu":
        return False
    try:
        torch.Event(device=device, enable_timing=True).record()
    except (RuntimeError, TypeError, ValueError):
        return False
    return True
