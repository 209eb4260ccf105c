"""Checks whether a budget is possible: raises an error with numbers, or warns once."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import nn

from mimose.budget import format_bytes
from mimose.cost.problem import Memory
from mimose.exceptions import InfeasibleBudgetError
from mimose.memory.out_of_memory import held_already, infeasible
from mimose.types import StepInput

if TYPE_CHECKING:
    from mimose.runtime.engine import Engine

_log = logging.getLogger(__name__)


class BudgetChecks:
    """Raises if a budget is proved impossible, by what is held or by a measured step.

    Args:
        model: The model, for what holds its memory.
        engine: The session's parts.
    """

    def __init__(self, model: nn.Module, engine: Engine) -> None:
        self._model = weakref.ref(model)  # a detached session must not keep the model
        self._engine = engine
        self._slack_bytes = 5 * engine.meter.noise_bytes
        self.warns = engine.options.warns
        """Whether to warn once and go on instead of raising."""
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
        held, model = self._engine.memory_limit.least_bytes(), self._model()
        if held > most and model is not None:
            self._raise(held_already(model, budget_bytes, held))

    def raise_if_infeasible(
        self, step_input: StepInput, start_bytes: float, state_bytes: float
    ) -> None:
        """Check that no smaller step has needed more than the budget.

        Args:
            step_input: The next step.
            start_bytes: What is held now.
            state_bytes: The optimizer's state now.

        Raises:
            InfeasibleBudgetError: One has, with everything recomputed.
        """
        peaks, model = self._engine.policy.least_peaks, self._model()
        least = peaks.bound(step_input, start_bytes, state_bytes)
        budget = float(self._engine.memory_limit.budget_bytes)
        if least > budget + self._slack_bytes and model is not None:
            self._raise(infeasible(model, budget, least, start_bytes, state_bytes))

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
        budget = float(self._engine.memory_limit.budget_bytes)
        if least_peak_bytes <= budget + self._slack_bytes:
            return
        sizes = ", ".join(f"{name} = {size}" for name, size in shape.items())
        advice = (
            f"That is the prediction for the largest shape that session.expect() was "
            f"given ({sizes}). Raise the budget to at least "
            f"{format_bytes(least_peak_bytes)}, or leave such batches out."
        )
        start = memory.start_bytes
        self._raise(_too_large(budget, least_peak_bytes, start, advice))

    def beyond_wall(
        self, least_peak_bytes: float, start_bytes: float
    ) -> InfeasibleBudgetError:
        """Return the error for a forward that ran out of memory at the budget.

        Args:
            least_peak_bytes: What was reserved, and the request that failed.
            start_bytes: What was held when the step began.
        """
        advice = (
            "The forward ended there, and would have needed more. Raise the budget, "
            "use a smaller batch or shorter inputs, or leave such batches out."
        )
        budget = self._engine.memory_limit.budget_bytes
        return _too_large(budget, least_peak_bytes, start_bytes, advice)

    def _raise(self, error: InfeasibleBudgetError) -> None:
        if not self.warns:
            try:
                raise error
            finally:
                del error  # its traceback holds this frame, and the caller's tensors
        if not self._has_warned:
            self._has_warned = True
            _log.warning("mimose: %s Training goes on with the least plan.", error)


def _too_large(
    budget_bytes: float, least_peak_bytes: float, start_bytes: float, advice: str
) -> InfeasibleBudgetError:
    holders = {
        "held before the step": start_bytes,
        "the step itself, with everything recomputed": least_peak_bytes - start_bytes,
    }
    return InfeasibleBudgetError(budget_bytes, least_peak_bytes, holders, advice)
