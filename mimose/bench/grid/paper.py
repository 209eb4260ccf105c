"""The published Mimose, rebuilt as a baseline.

Liao et al., "Exploiting Input Tensor Dynamics in Activation Checkpointing for Efficient
Training on GPU", IPDPS 2023: Algorithm 1, and the system around it as its sections
describe it. In the first iterations every block's forward runs twice, once to be
measured and once under a checkpoint. One quadratic in one number, the input's size, is
fitted for each block and one for the whole model, once. Plans are made for sizes
rounded up to a multiple of 5, and never made anew; nothing is learned from what is
observed. What the authors take off the budget by hand, 0.5 to 1 GB of 4 to 8, against
fragmentation, is not taken off here.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from mimose.bench.grid.menu import WHOLE_LAYERS, menu_named
from mimose.bench.grid.strategies import Applied, Facts, Setup, Strategy
from mimose.bench.grid.workload import size_of
from mimose.measure.meters import Meter
from mimose.planners import Greedy, PlanningProblem
from mimose.tensors import storages_in
from mimose.watch.patch import Patch
from mimose.watch.units import find_units

_COLLECTED = 10
"""Iterations of sheltered execution; the paper says 10 to 30."""
_ROUND_TO = 5
"""Tokens; the paper rounds height times width to 100 pixels."""
_ROUND_PIXELS_TO = 100
_DEGREE = 2


class _Block(Patch):
    """One block's forward: kept, under a checkpoint, or run twice to be measured."""

    def __init__(
        self, module: torch.nn.Module, meter: Meter, device: torch.device
    ) -> None:
        super().__init__(module)
        self._meter = meter
        self._devices = [device] if device.type == "cuda" else []
        self.is_measured = True
        self.is_recomputed = False
        self.sizes: list[tuple[int, float]] = []
        """The input's size and the bytes that the block's activations took."""
        self.input_size = 0
        self.activation_bytes = 0.0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block as the phase and the plan say."""
        if not torch.is_grad_enabled() or not (self.is_measured or self.is_recomputed):
            return self.original(*args, **kwargs)
        if self.is_measured:
            self._measure(args, kwargs)
        return checkpoint(self.original, *args, use_reentrant=False, **kwargs)

    def _measure(self, args: Any, kwargs: Any) -> None:
        with torch.random.fork_rng(devices=self._devices):
            before = self._meter.live_bytes()
            output = self.original(*args, **kwargs)
            taken = self._meter.live_bytes() - before
            own = sum(s.nbytes() for s in storages_in(output).values())
            del output
        self.activation_bytes += max(0.0, float(taken - own))


class PaperMimose(Applied):
    """The published system at work."""

    def __init__(self, setup: Setup) -> None:
        self._meter = setup.meter
        self.budget_bytes = setup.budget_bytes()
        found = find_units(setup.model, setup.units)
        self._names = tuple(name for name, _ in found)
        self._blocks = [_Block(m, setup.meter, setup.device) for _, m in found]
        self._whole: list[tuple[int, float]] = []
        self._fits: tuple[Callable[[float], Any], ...] = ()
        self._plans: dict[int, tuple[str, ...]] = {}
        self._n_steps = 0
        self._size = 0
        self._start_bytes = 0
        self._facts = Facts()
        self._is_open = False

    def before_step(self, sizes: Mapping[str, int]) -> None:
        """Choose a plan for the batch, or measure."""
        self._finish()
        began = time.perf_counter()
        self._size, self._start_bytes = size_of(sizes), self._meter.live_bytes()
        self._is_open = True
        if self._n_steps < _COLLECTED:
            self._facts = Facts(phase="collect", plan="r" * len(self._blocks))
            self._set_all(is_measured=True, is_recomputed=True)
            return
        if not self._fits:
            self._fit()
        key = self._rounded(sizes)
        is_known = key in self._plans
        if not is_known:
            self._plans[key] = self._plan(key)
        for block, action in zip(self._blocks, self._plans[key], strict=True):
            block.is_measured = False
            block.is_recomputed = action != "keep"
        seconds = time.perf_counter() - began
        self._facts = Facts(
            phase="plan",
            plan_seconds=seconds,
            cache_hit=is_known,
            plan=menu_named(WHOLE_LAYERS).codes(self._plans[key]),
        )

    def facts(self) -> Facts:
        """Tell about the last step, and take what was measured in it."""
        self._finish()
        return self._facts

    def phase_of(self, phase: str) -> None:
        """Behave as in sheltered execution again, or not."""
        self._n_steps = 0 if phase == "collect" else _COLLECTED

    def close(self) -> None:
        """Give the blocks their forwards back."""
        for block in self._blocks:
            block.remove()

    def _finish(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._n_steps += 1
        if self._facts.phase != "collect":
            return
        total = 0.0
        for block in self._blocks:
            block.sizes.append((self._size, block.activation_bytes))
            total += block.activation_bytes
            block.activation_bytes = 0.0
        peak = self._meter.peak_bytes()
        self._whole.append((self._size, peak - self._start_bytes + total))

    def _set_all(self, *, is_measured: bool, is_recomputed: bool) -> None:
        for block in self._blocks:
            block.is_measured, block.is_recomputed = is_measured, is_recomputed

    def _fit(self) -> None:
        self._fits = tuple(
            _quadratic(samples)
            for samples in (self._whole, *[block.sizes for block in self._blocks])
        )

    def _plan(self, size: int) -> tuple[str, ...]:
        """Run Algorithm 1 with the estimates for a size."""
        whole, *blocks = (float(fit(size)) for fit in self._fits)
        held = np.array([[max(0.0, each), 0.0] for each in blocks])
        rest = whole - float(held[:, 0].sum())
        n_events = len(blocks)
        zeros = np.zeros((n_events, 2))
        problem = PlanningProblem(
            events=self._names,
            actions=("keep", "recompute"),
            allowed=np.ones((n_events, 2), dtype=bool),
            held_bytes=held,
            forward_excess_bytes=zeros,
            backward_excess_bytes=zeros,
            backward_net_bytes=np.zeros(n_events),
            cost=zeros,
            gap_bytes=np.zeros(n_events + 1),
            gap_excess_bytes=np.zeros(n_events + 1),
            start_bytes=max(0.0, self._start_bytes + rest),
            optimizer_state_bytes=0.0,
            step_excess_bytes=0.0,
            budget_bytes=float(self.budget_bytes or 0),
            host_bytes=zeros,
            host_budget_bytes=0.0,
        )
        return Greedy().plan(problem).actions

    def _rounded(self, sizes: Mapping[str, int]) -> int:
        step = _ROUND_PIXELS_TO if "height" in sizes else _ROUND_TO
        return -(-size_of(sizes) // step) * step


def _quadratic(samples: list[tuple[int, float]]) -> Callable[[float], Any]:
    sizes, values = (
        np.array(column, dtype=float) for column in zip(*samples, strict=True)
    )
    degree = min(_DEGREE, len(set(sizes.tolist())) - 1)
    return np.polynomial.Polynomial.fit(sizes, values, degree)


PAPER = Strategy(
    "mimose-paper",
    "the published system: Algorithm 1, quadratic fits, double forwards at first",
    PaperMimose,
    heeds_budget=True,
)
