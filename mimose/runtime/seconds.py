"""Measures the seconds of steps on the device, and predicts those of later steps.

Note: [A step's seconds]
A step lasts from the begin of its first forward to the end of its backward. All steps
before an optimizer step share its time. On an accelerator, events measure both; they
are read only on request, so the host does not wait. On a CPU the host's clock measures.

Four rates predict a device's part of a context's steps: seconds for each FLOP of the
layers' forwards, for each byte that these save (which memory-bound operators follow),
for the plan's extra cost, and a fixed time. No rate is negative. On the simulated H100
the median error is 1% for steps with other rows and lengths.

A host that issues kernels more slowly than the device runs them decides instead: such a
step's time does not depend on its size, but grows with the layers that are recomputed.
The rates are fitted to the steps above this floor, the floor to the rest. A step at a
shape that the process never had takes longer, too: libraries choose kernels and build
plans for it (cuDNN's attention, 23 to 37 ms each).
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from cachetools import LRUCache
from numpy.typing import NDArray

from mimose.cost.learner import Learner
from mimose.cost.problem import step_work
from mimose.predictors import fit_rates
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
_LEAST, _LEAST_SHAPES = 6, 3
"""With fewer steps or shapes, no rates are fitted."""
_FEW_NEW = 32
"""New shapes until it is asked again how much they take, which may fit rates."""
_MORE = "~more"
"""Marks a context's steps whose plans have an extra cost: only these show its rate."""
_DOUBT = 0.1
"""The weight of a guess; a step has weight 1."""
_COST, _SECONDS, _IS_NEW = 2, 3, 4
"""Places in a row of a timed step, which begins with its work."""
_REFIT = 8
"""Rates are fitted anew after so many steps: with a floor that takes 0.1 s of the host.
"""
_ROUNDS = 4
"""Of the fit of steps above and below a host's floor."""
_CLEAR = 3.0
"""First times count from so many times the median error of other steps on: of noise
alone, half of the medians are above 0."""
_WELL = 0.02
"""With a smaller mean error, no floor is looked for: a fit takes some milliseconds."""
_CLEARLY = 2.0 / 3.0
"""A floor is used if the fit's error is below this share, as for a knee of a series."""


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
    floor: float = 0.0
    """Seconds of the host in every step, ..."""
    floor_extra: float = 0.0
    """and for each 1 of the plan's cost."""
    first: tuple[float, float] = (0.0, 0.0)
    """Seconds that the first step at a shape takes beyond, if it keeps all, and if not:
    a recomputation meets the shape on a thread that has not."""
    optimizer: float = 0.0
    """Seconds of a step's share of the optimizer step."""

    def parts(
        self, flops: float, held_bytes: float, cost: float
    ) -> tuple[float, float, float]:
        """Return a step's seconds, the fixed part, and the part for its plan.

        The arguments are what `step_work` returns. A first time is not counted.
        """
        one = np.array([[flops, held_bytes, cost]])
        whole = float(self.kept(one)[0])
        one[0, _COST] = 0.0
        extra = whole - float(self.kept(one)[0])
        fixed = max(self.fixed, self.floor)
        return whole + self.optimizer, fixed + self.optimizer, extra

    def device(self, work: _Floats) -> _Floats:
        """Return (n_steps,) the device's seconds for (n_steps, 3) work."""
        rates = np.array([self.flop, self.byte, self.extra])
        seconds: _Floats = self.fixed + work @ rates
        return seconds

    def host(self, work: _Floats) -> _Floats:
        """Return (n_steps,) the host's."""
        seconds: _Floats = self.floor + self.floor_extra * work[:, _COST]
        return seconds

    def kept(self, work: _Floats) -> _Floats:
        """Return (n_steps,) the longer of both."""
        longer: _Floats = np.maximum(self.device(work), self.host(work))
        return longer


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
            known = self._rows(context)
            if len(known) < _LEAST or len({row[0] for row in known}) < _LEAST_SHAPES:
                return None
            rates = _fitted(known)
            if not rates.fixed + rates.flop + rates.byte + rates.floor > 0.0:
                return None  # steps without a time
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
        new = [rates.first[row[_COST] > 0.0] for row in known if row[_IS_NEW]]
        whole = sum(row[_SECONDS] for row in known) + rates.optimizer * len(known)
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
            rows = ((*map(float, row), 0.0)[: _IS_NEW + 1] for row in known)
            self._known[str(own)] = deque(rows, maxlen=_LATELY)
        found = ((float(s), int(n)) for s, n in state.get("optimizer", ()))
        self._optimizer = deque(found, maxlen=_FEW)


def _shape(step_input: StepInput) -> int:
    return hash((step_input.structure, step_input.sizes))


def _fitted(known: Sequence[tuple[float, ...]]) -> Rates:
    """Return the rates of steps at shapes that came before, and what first times add.

    Args:
        known: (n_steps,) Work, seconds, and 1 for a new shape.
    """
    rows = np.array(known)
    work, seconds, new = rows[:, :_SECONDS], rows[:, _SECONDS], rows[:, _IS_NEW] > 0.0
    if (~new).sum() < 2 * _LEAST or len(np.unique(work[~new, 0])) < _LEAST_SHAPES:
        return _with_floor(work, seconds)  # nothing tells first times apart
    rates = _with_floor(work[~new], seconds[~new])
    beyond = seconds - rates.kept(work)
    noise = _CLEAR * float(np.median(np.abs(beyond[~new])))
    more = work[:, _COST] > 0.0
    first = [
        max(0.0, float(np.median(beyond[kind]))) if kind.sum() >= _LEAST_SHAPES else 0.0
        for kind in (new & ~more, new & more)
    ]
    first = [own if own > noise else 0.0 for own in first]
    return rates._replace(first=(first[0] or first[1], first[1] or first[0]))


def _with_floor(work: _Floats, seconds: _Floats) -> Rates:
    """Return the rates of the device alone, or with a host's floor if it fits better.

    Args:
        work: (n_steps, 3) FLOPs, bytes and cost.
        seconds: (n_steps,) Seconds.
    """
    place = work[:, 0].argsort().argsort()
    best, least = Rates(0.0, 0.0, 0.0, 0.0), np.inf
    for n_below in (0, len(work) // 2, len(work)):
        above = place >= n_below
        for _ in range(_ROUNDS):
            rates, before = _split(work, seconds, above), above
            if n_below:
                above = rates.device(work) >= rates.host(work)
            if (above == before).all():
                break
        error = float(np.abs(rates.kept(work) / seconds - 1.0).mean())
        if error < (_CLEARLY if n_below else 1.0) * least:
            best, least = rates, error
        if least < _WELL:
            break
    return best


def _split(work: _Floats, seconds: _Floats, above: _Flags) -> Rates:
    """Return the rates of the steps above the host's floor, and the floor of the rest.

    Args:
        work: (n_steps, 3) FLOPs, bytes and cost.
        seconds: (n_steps,) Seconds.
        above: (n_steps,) Whether the device decides.
    """
    found: list[float] = []
    for own, columns in ((above, [0, 1, 2]), (~above, [2])):
        if own.sum() < 2:
            found += [0.0] * (1 + len(columns))
            continue
        design = np.column_stack((np.ones(own.sum()), work[own][:, columns]))
        # A guess for when plans differ little: a recomputation takes a third of a
        # layer's time.
        guess = np.zeros(design.shape[1])
        if len(columns) > 1:
            flops = work[own][:, 0].mean()
            guess[1], guess[-1] = -flops / 3.0, flops
        guess *= _DOUBT / seconds[own].mean()
        found += fit_rates(design, seconds[own], guess).tolist()
    fixed, flop, byte, extra, floor, floor_extra = found
    return Rates(fixed, flop, byte, extra, floor, floor_extra)


def _has_events(device: torch.device) -> bool:
    """Whether a device has events that measure time."""
    if device.type == "cpu":
        return False
    try:
        torch.Event(device=device, enable_timing=True).record()
    except (RuntimeError, TypeError, ValueError):
        return False
    return True
