"""The budget of a session: when it changes, what it leaves, and whether it is possible.

An impossible budget raises an error with numbers, or warns once.
"""

from __future__ import annotations

import gc
import logging
import math
import operator
import weakref
from collections.abc import Callable, Mapping

import torch
from cachetools import FIFOCache
from torch import distributed, nn

from mimose.budget import (
    Budget,
    all_there_is,
    format_bytes,
    left_free,
    parse_budget,
    rank_share,
)
from mimose.cost.problem import Memory
from mimose.exceptions import InfeasibleBudgetError
from mimose.memory.meters import Meter
from mimose.memory.wall import MemoryLimit
from mimose.model.placement import only_device
from mimose.model.sharding import own_parameters
from mimose.policy.decision import Decision, StepOutcome
from mimose.records import Peaks
from mimose.runtime.optimizers import OptimizerWatch
from mimose.runtime.options import Options
from mimose.tensors import local_bytes
from mimose.types import MOST_CONTEXTS, Context, Sizes, StepInput

_log = logging.getLogger(__name__)

_HELD_ALREADY = (
    "That much is held already, before the first step; a step needs more, for "
    "gradients, optimizer state and activations. Raise the budget, or write '+1GiB' "
    "for 1 GiB more than is held now."
)


def read_budget(
    budget: Budget | Callable[[], Budget],
    grace: float | str | None,
    meter: Meter,
    device: torch.device,
) -> tuple[int, int]:
    """Return a budget, or what a function returns, and the grace, in bytes.

    Args:
        budget: As for `mimose.attach`.
        grace: As for `mimose.attach`.
        meter: Knows the memory that there is.
        device: The model's device.

    Raises:
        BudgetError: They cannot be read.
    """
    if callable(budget):
        budget = budget()
    total, is_cpu = meter.total_bytes(), device.type == "cpu"
    if is_cpu:
        total = rank_share(total)
    grace_bytes = parse_budget(grace, total) if grace else 0
    if budget is not None:
        return parse_budget(budget, total, meter.held_bytes), grace_bytes
    if grace is None and total is not None:
        grace_bytes = int(left_free(total))
    has_ranks = distributed.is_available() and distributed.is_initialized()
    n_bytes = all_there_is(str(device), total, is_shared=is_cpu, has_ranks=has_ranks)
    return n_bytes, grace_bytes


class LeastPeaks:
    """Remembers the peaks of steps with everything recomputed.

    A batch that is at least as large in every size needs at least as much. The first
    steps run before the optimizer's state exists, so the lower of two bounds counts:
    the peak of that step with today's optimizer state, and today's start with the
    growth of that step.
    """

    def __init__(self) -> None:
        self._least: FIFOCache[tuple[Context, Sizes], tuple[float, float]]
        self._least = FIFOCache(MOST_CONTEXTS)
        """The last peaks without the optimizer's state, and the growths."""

    def add(
        self,
        step_input: StepInput,
        peak_bytes: float,
        growth_bytes: float,
        state_bytes: float,
    ) -> None:
        """Record a step with everything recomputed.

        Args:
            step_input: The step.
            peak_bytes: Its peak.
            growth_bytes: Its peak minus its start.
            state_bytes: The optimizer's state at that time.
        """
        least = peak_bytes - state_bytes, growth_bytes
        self._least[step_input.context, step_input.sizes] = least

    def bound(
        self, step_input: StepInput, start_bytes: float, state_bytes: float
    ) -> float:
        """Return a lower bound of the peak under any plan; 0 if none is known.

        Args:
            step_input: The next step.
            start_bytes: What is held now.
            state_bytes: The optimizer's state now.
        """
        own = step_input.sizes
        return max(
            (
                min(peak + state_bytes, start_bytes + growth)
                for (context, sizes), (peak, growth) in self._least.items()
                if context == step_input.context and all(map(operator.le, sizes, own))
            ),
            default=0.0,
        )


class SessionBudget:
    """The budget of a session, which changes between windows only.

    With ``on_infeasible="warn"`` an impossible budget is a warning, once.

    Args:
        model: The model, for what holds its memory.
        options: The session's settings.
        meter: Reads what is held.
        limit: Compares the budget with what the process holds.
        grace_bytes: By how much a backward may pass the budget, as a last resort.
        optimizers: Their state is a part of what is held.

    Attributes:
        limit: The argument.
        least_peaks: The peaks of steps with everything recomputed.
        next: The budget and the grace of the next window, if they change; a function is
            called for each window.
        plans: Whether plans are made. A baseline keeps no budget.
        warns: Whether an impossible budget is a warning.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        meter: Meter,
        limit: MemoryLimit,
        grace_bytes: int,
        optimizers: OptimizerWatch,
    ) -> None:
        self._model = weakref.ref(model)  # a detached session must not keep the model
        self.limit, self.warns = limit, options.warns
        self._grace, self._grace_bytes = options.grace, grace_bytes
        self._has_used_grace = self._has_warned = False
        self._optimizers, self.least_peaks = optimizers, LeastPeaks()
        self._meter, self._device = meter, only_device(model)
        self._slack_bytes = 5 * meter.noise_bytes
        self._n_stepped = 0
        """How many optimizer steps there were when the window began."""
        self.next: tuple[int, int] | Callable[[], Budget] | None
        self.next = options.budget if callable(options.budget) else None
        self._is_renewed = False
        self.plans = options.plans
        memory = options.host and options.host.memory
        self._host_bytes = float(memory.budget_bytes) if memory else math.inf

    @property
    def n_bytes(self) -> int:
        """The present budget in bytes."""
        return self.limit.budget_bytes

    def read(self, budget: Budget | Callable[[], Budget]) -> int:
        """Return a budget, or what a function returns, in bytes."""
        return read_budget(budget, self._grace, self._meter, self._device)[0]

    def set(
        self,
        budget: Budget | Callable[[], Budget],
        is_within_window: Callable[[], bool],
    ) -> None:
        """Set another budget: now if no window runs, else when the next one begins.

        Args:
            budget: As for `mimose.attach`. A function is called for each window.
            is_within_window: Returns whether one runs.

        Raises:
            BudgetError: It cannot be read.
            InfeasibleBudgetError: More is held already; the budget stays the same.
        """
        if callable(budget):
            self.next = budget
            return
        found = read_budget(budget, self._grace, self._meter, self._device)
        is_later = is_within_window()
        if not is_later:
            self._move(*found)
        self.next = found if is_later else None

    def close(self) -> None:
        """Lift the wall, and release the function that returns budgets."""
        self.next = None
        self.limit.close()

    def renew(self, is_within_window: Callable[[], bool]) -> None:
        """Set the budget of the window that begins; a function is called once a window.

        Args:
            is_within_window: Returns whether another one runs.

        Raises:
            BudgetError: What the function returned cannot be read.
            InfeasibleBudgetError: More is held already; the budget stays the same.
        """
        chosen = self.next
        if chosen is None or self._is_renewed or is_within_window():
            return
        if callable(chosen):
            found = read_budget(chosen, self._grace, self._meter, self._device)
            self._move(*found)
        else:
            self.next = None
            self._move(*chosen)
        self._is_renewed = True

    def _move(self, n_bytes: int, grace_bytes: int) -> None:
        """Set the budget now."""
        if n_bytes != self.limit.budget_bytes:
            self.raise_if_held(n_bytes)
            self.limit.move(n_bytes)
        self._grace_bytes = grace_bytes

    def use_grace(self) -> None:
        """Let the rest of the step that runs pass the budget by the grace."""
        grace = self._grace_bytes
        if self.limit.allow_grace(grace) and not self._has_used_grace:
            self._has_used_grace = True
            _log.warning(
                "mimose: a backward has too little room, and its forward cannot run "
                "again, so it may pass the budget by the grace of %s. The records of "
                "such steps say by how much they were over",
                format_bytes(grace),
            )

    def is_enforced(self, decision: Decision) -> bool:
        """Whether the allocator enforces the budget in a step, if it can.

        It does not in a baseline. If an impossible budget is only a warning, a step
        without a plan has no limit.
        """
        return self.plans and (decision.chosen is not None or not self.warns)

    def enforce(self, decision: Decision) -> None:
        """Have the allocator enforce the budget in a forward that begins, or not."""
        if not self.limit.has_wall:
            return
        if self.is_enforced(decision):
            self.limit.raise_wall()
        else:
            self.limit.drop_wall()

    def window_begins(self) -> tuple[Memory, Peaks]:
        """Return the memory as a window begins, and the peaks before it."""
        self._is_renewed, self._n_stepped = False, self._optimizers.n_steps
        start, peaks = self.limit.begin()
        return self.limit.memory(start, self._host_bytes), peaks

    def has_gradients_due(self) -> bool:
        """Whether there are gradients that no optimizer step has used yet."""
        return self._optimizers.are_due(self._n_stepped)

    def has_optimizer_state(self) -> bool:
        """Whether an optimizer of the model has stepped, so that its state exists."""
        return self._optimizers.have_stepped

    def memory_at(self, start_bytes: float) -> Memory:
        """Return the memory of a step.

        Args:
            start_bytes: What is held when it begins.
        """
        return self.limit.memory(start_bytes, self._host_bytes)

    def memory_now(self) -> Memory:
        """Return the memory as if a step began now."""
        return self.memory_at(self.live_bytes())

    def live_bytes(self) -> int:
        """Return what is held now."""
        return self._meter.live_bytes()

    def observe(self, outcome: StepOutcome, peaks: Peaks, *, is_least: bool) -> None:
        """Learn from a step that has ended.

        Args:
            outcome: What it has shown.
            peaks: The readings.
            is_least: Whether it was measured with everything recomputed.
        """
        self.limit.observe()
        if is_least:
            peak, state = peaks.level_bytes, float(self._optimizers.state_bytes)
            growth = max(0, peak - int(outcome.memory.start_bytes))
            self.least_peaks.add(outcome.step_input, peak, growth, state)

    def raise_if_held(self, budget_bytes: int = 0) -> None:
        """Check that a budget is not less than what is held already.

        Args:
            budget_bytes: The budget; 0 for the present one.

        Raises:
            InfeasibleBudgetError: More is held.
        """
        budget_bytes = budget_bytes or self.n_bytes
        most = budget_bytes + self._slack_bytes
        if not self.plans or self.limit.least_bytes() <= most:
            return
        gc.collect()
        held = self.limit.least_bytes()
        if held > most:
            self._raise(self.error(held, held, _HELD_ALREADY, budget_bytes))

    def raise_if_infeasible(self, step_input: StepInput, start_bytes: float) -> None:
        """Check that no smaller step has needed more than the budget.

        Args:
            step_input: The next step.
            start_bytes: What is held now.

        Raises:
            InfeasibleBudgetError: One has, with everything recomputed.
        """
        peaks = self.least_peaks
        most = self.n_bytes + self._slack_bytes
        # To read an optimizer's state takes as long as to make a plan.
        if peaks.bound(step_input, start_bytes, math.inf) <= most:
            return
        state_bytes = float(self._optimizers.state_bytes)
        least = peaks.bound(step_input, start_bytes, state_bytes)
        if least > most:
            self._raise(self.error(least, start_bytes))

    def raise_if_expected(
        self, shape: Mapping[str, int], least_peak_bytes: float, memory: Memory
    ) -> None:
        """Check that an expected shape can be trained within the budget.

        Args:
            shape: Its sizes, by name.
            least_peak_bytes: Its predicted peak under the safest plan.
            memory: What is held, and the budget.

        Raises:
            InfeasibleBudgetError: The peak is above the budget.
        """
        # Without the allowance for fragmentation, which makes no budget impossible.
        if least_peak_bytes <= self.n_bytes + self._slack_bytes:
            return
        sizes = ", ".join(f"{name} = {size}" for name, size in shape.items())
        advice = (
            f"That is the prediction for the largest shape that session.expect() was "
            f"given ({sizes}). Raise the budget to at least "
            f"{format_bytes(least_peak_bytes)}, or leave such batches out."
        )
        self._raise(self.error(least_peak_bytes, memory.start_bytes, advice))

    def error(
        self, least: float, start: float, advice: str = "", budget_bytes: int = 0
    ) -> InfeasibleBudgetError:
        """Return the error for an impossible budget, with what holds the least peak.

        Args:
            least: The lowest peak of any plan.
            start: What is held before the step.
            advice: What to do; "" for the default advice.
            budget_bytes: The budget; 0 for the present one.
        """
        model, state = self._model(), float(self._optimizers.state_bytes)
        assert model is not None  # it runs its forward, or its session's owner does
        start = min(start, least)
        own = own_parameters(model)
        parameters = float(sum(map(local_bytes, own)))
        gradients = float(sum(local_bytes(p.grad) for p in own if p.grad is not None))
        is_on_cpu = any(parameter.device.type == "cpu" for parameter in own)
        others = "interpreter, libraries and data" if is_on_cpu else "other memory"
        holders = {
            "parameters": parameters,
            "gradients": gradients,
            "optimizer state": state,
            f"{others} held before the step": max(
                0.0, start - parameters - gradients - state
            ),
            "the step itself, with everything recomputed": least - start,
        }
        return InfeasibleBudgetError(
            budget_bytes or self.n_bytes,
            least,
            {name: held for name, held in holders.items() if held},
            advice,
        )

    def _raise(self, error: InfeasibleBudgetError) -> None:
        if not self.warns:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and the caller's tensors
        if not self._has_warned:
            self._has_warned = True
            _log.warning("mimose: %s Training goes on with the least plan.", error)
