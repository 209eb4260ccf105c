"""Numbers that ranks exchange, and how one's error becomes an error of all.

All ranks exchange at the same places: as they attach, and before each forward. A rank
that fails before such a place takes part all the same and says so with the first of its
numbers; then what it has to say is gathered, and all raise.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch
from torch import distributed

from mimose.exceptions import (
    InfeasibleBudgetError,
    MimoseError,
    OtherRankError,
    first_line,
)

WORD_BYTES = 8
"""Of each number."""
_N_VALUES = 8
"""As ranks attach, before they know of each other how much there is to say."""


class Exchange:
    """The maxima of numbers over the ranks of a group.

    Args:
        group: The ranks; carries tensors of the CPU.

    Attributes:
        n_values: The most numbers that a rank gives, the same on all ranks.
        n_exchanges: Exchanges so far.
        seconds: What they took, waiting for other ranks included.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._is_due = False
        self.n_values = _N_VALUES
        self.n_exchanges = 0
        self.seconds = 0.0

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of an error, where this rank has not exchanged since."""
        self._is_due = True
        try:
            yield
        except Exception as error:
            if self._is_due:
                self._reduced([1])
                self.gathered(_told(error))
            raise

    def maxima(self, values: Sequence[int]) -> list[int]:
        """Return the largest of all ranks' numbers at each place.

        Args:
            values: This rank's, at most `n_values`; the rest are taken for 0.

        Raises:
            InfeasibleBudgetError: Another rank's budget cannot be kept.
            OtherRankError: Another rank has failed otherwise.
            MimoseError: Another rank is gone, or does not answer.
        """
        is_error, *found = self._reduced([0, *values])
        if is_error:
            told = self.gathered(None)
            rank = next(rank for rank, each in enumerate(told) if each)
            _raise_other(distributed.get_global_rank(self._group, rank), told[rank])
        return found

    def gathered(self, own: Any) -> list[Any]:
        """Return what each rank has to say.

        Args:
            own: What this rank has; can be pickled.

        Raises:
            MimoseError: Another rank is gone, or does not answer.
        """
        found: list[Any] = [None] * distributed.get_world_size(self._group)
        try:
            distributed.all_gather_object(found, own, group=self._group)
        except RuntimeError as error:
            raise _unanswered(error) from error
        return found

    def _reduced(self, values: Sequence[int]) -> list[int]:
        self._is_due = False
        filler = [0] * (1 + self.n_values - len(values))
        vector = torch.tensor([*values, *filler], dtype=torch.int64)
        began = time.perf_counter()
        try:
            distributed.all_reduce(
                vector, op=distributed.ReduceOp.MAX, group=self._group
            )
        except RuntimeError as error:
            raise _unanswered(error) from error
        self.seconds += time.perf_counter() - began
        self.n_exchanges += 1
        return vector.tolist()


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


def _unanswered(error: RuntimeError) -> MimoseError:
    return MimoseError(
        f"the ranks could not agree on this step, as another one is gone or did not "
        f"answer in time: {first_line(error)}. See that rank's own error"
    )
