"""Numbers that ranks exchange, and how one's error becomes an error of all.

All ranks exchange at the same places: as they attach, before each forward (twice, where
their plans differ), and behind the first. A rank that fails before such a place takes
part all the same and says so with the first of its numbers; then what it has to say is
gathered, and all raise.
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
        group: The ranks.
        device: Whose tensors the group carries.

    Attributes:
        n_ranks: How many there are.
        n_values: The most numbers that a rank gives, the same on all ranks.
        n_exchanges: Exchanges so far.
        seconds: What they took, waiting for other ranks included.
    """

    def __init__(self, group: Any, device: str = "cpu") -> None:
        self.group = group
        self._device = device
        self._is_due = False
        self.n_ranks = int(distributed.get_world_size(group))
        self.n_values = _N_VALUES
        self.n_exchanges = 0
        self.seconds = 0.0

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of an error, as long as they wait for an exchange."""
        self.expect()
        try:
            yield
        except Exception as error:
            if self._is_due:
                with contextlib.suppress(MimoseError):  # this rank has its own
                    self._reduced([1])
                    self.gathered(_told(error))
            raise

    def expect(self) -> None:
        """Take note that the others wait for an exchange from now on."""
        self._is_due = True

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
            _raise_other(distributed.get_global_rank(self.group, rank), told[rank])
        return found

    def gathered(self, own: Any) -> list[Any]:
        """Return what each rank has to say.

        Args:
            own: What this rank has; can be pickled.

        Raises:
            MimoseError: Another rank is gone, or does not answer.
        """
        with _answered():
            found: list[Any] = [None] * self.n_ranks
            distributed.all_gather_object(found, own, group=self.group)
        return found

    def _reduced(self, values: Sequence[int]) -> list[int]:
        self._is_due = False
        filler = [0] * (1 + self.n_values - len(values))
        numbers = [*values, *filler]
        vector = torch.tensor(numbers, dtype=torch.int64, device=self._device)
        began = time.perf_counter()
        with _answered():
            distributed.all_reduce(
                vector, op=distributed.ReduceOp.MAX, group=self.group
            )
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


@contextlib.contextmanager
def _answered() -> Iterator[None]:
    """Say in words why what is sent in it is not answered.

    Raises:
        MimoseError: It is not.
    """
    if not distributed.is_initialized():  # a group outlives it, as an object
        msg = (
            "the ranks cannot agree any more, for the process group is gone: detach "
            "the session before destroy_process_group(), and attach again once there "
            "is another one"
        )
        raise MimoseError(msg)
    try:
        yield
    except RuntimeError as error:
        msg = (
            f"the ranks could not agree on this step, as another one is gone or did "
            f"not answer in time: {first_line(error)}. See that rank's own error"
        )
        raise MimoseError(msg) from error
