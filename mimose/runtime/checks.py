"""Checks whether a budget is possible: raises an error with numbers, or warns once."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from mimose.budget import format_bytes
from mimose.cost.problem import Memory
from mimose.exceptions import InfeasibleBudgetError
from mimose.inputs.sharding import own_parameters
from mimose.tensors import local_bytes
from mimose.types import StepInput

if TYPE_CHECKING:
    from mimose.runtime.engine import Engine

_log = logging.getLogger(__name__)

_HELD_ALREADY = (
    "That much is held already, before the first step; a step needs more, for "
    "gradients, optimizer state and activations. Raise the budget, or write '+1GiB' "
    "for 1 GiB more than is held now."
)


class BudgetChecks:
    """Raises if a budget is proved impossible, by what is held or by a measured step.

    With ``on_infeasible="warn"`` it warns once instead.

    Args:
        model: The model, for what holds its memory.
        engine: The session's parts.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model = weakref.ref(model)  # a detached session must not keep the model
        self._engine = engine
        self._slack_bytes = 5 * engine.meter.noise_bytes
        self._has_warned = False

    def raise_if_held(self, budget_bytes: int) -> None:
        """Check that a budget is not less than what is held already.

        Args:
            budget_bytes: The budget.

        Raises:
            InfeasibleBudgetError: More is held.
        """
        most = budget_bytes + self._slack_bytes
        if self._engine.memory_limit.least_bytes() <= most:
            return
        gc.collect()
        held = self._engine.memory_limit.least_bytes()
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
        peaks = self._engine.policy.least_peaks
        most = self._engine.memory_limit.budget_bytes + self._slack_bytes
        # To read an optimizer's state takes as long as to make a plan.
        if peaks.bound(step_input, start_bytes, math.inf) <= most:
            return
        state_bytes = float(self._engine.optimizers.state_bytes)
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
        budget = self._engine.memory_limit.budget_bytes
        if least_peak_bytes <= budget + self._slack_bytes:
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
        model, state = self._model(), float(self._engine.optimizers.state_bytes)
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
            budget_bytes or self._engine.memory_limit.budget_bytes,
            least,
            {name: held for name, held in holders.items() if held},
            advice,
        )

    def _raise(self, error: InfeasibleBudgetError) -> None:
        if not self._engine.options.warns:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and the caller's tensors
        if not self._has_warned:
            self._has_warned = True
            _log.warning("mimose: %s Training goes on with the least plan.", error)
