"""Memory of the host, lent within a budget of its own.

Note: [Pieces]
A copy can go on beside the computing only where its side on the host is pinned. Pinning
takes milliseconds, so torch's allocator keeps what is given back for whoever asks next;
and it rounds each request up to a power of two, up to twice of what is needed. So a
storage is held in pieces that are powers of two already: 100 MiB in 64, 32 and 4. It
also knows when a copy to or from a piece has ended, and lends no piece before.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Sequence

import torch

from mimose.budget import format_bytes
from mimose.exceptions import first_line
from mimose.records import HostUse
from mimose.torch_private import empty_host_cache
from mimose.worker import lock

_log = logging.getLogger(__name__)

LEAST_PIECE = 65536
"""Bytes of the smallest pinned piece. What is lost of a storage is less than that; a
copy of so few bytes is mostly the wait for its beginning."""

_PINNED = frozenset({"cuda", "xpu"})
"""Accelerators whose copies to pinned memory go on beside the computing."""


class HostBuffer:
    """Bytes of the host, given back to whom they belong when nobody holds this.

    Attributes:
        pieces: Tensors of bytes that follow each other, at least as long in all as was
            asked for.
        most_bytes: What as many bytes take of the budget at most, however they fall
            into pieces.
    """

    __slots__ = ("_returned", "_sizes", "most_bytes", "pieces")

    def __init__(
        self, sizes: Sequence[int], most_bytes: int, returned: deque[Sequence[int]]
    ) -> None:
        self.pieces: Sequence[torch.Tensor] = ()
        self.most_bytes = most_bytes
        self._sizes = sizes
        self._returned = returned

    def __del__(self) -> None:
        """Give it back: without a lock, for this may run in the middle of anything."""
        self._returned.append(self._sizes)


class HostMemory:
    """Lends memory of the host, never more than its budget.

    Args:
        budget_bytes: The most that is lent, and the most that is pinned, at any time.
        device: Whose tensors are to be held; decides whether memory is pinned.

    Raises:
        ValueError: The budget is negative.
    """

    def __init__(self, budget_bytes: int, device: torch.device) -> None:
        if budget_bytes < 0:
            msg = f"a budget of host memory is at least 0 bytes, got {budget_bytes}"
            raise ValueError(msg)
        self.budget_bytes = budget_bytes
        self.is_pinned = device.type in _PINNED
        """Whether what is lent is pinned."""
        self.n_refused = 0
        """So many requests did not fit."""
        self._peak_bytes = self._pinned_peak_bytes = 0
        self._lent: Counter[int] = Counter()
        """Pieces, by their size."""
        self._made: Counter[int] = Counter()
        """The same, those among them that torch's allocator keeps for others."""
        self._returned: deque[Sequence[int]] = deque()
        self._lock = lock()

    @property
    def held_bytes(self) -> int:
        """What is lent now."""
        with self._lock:
            self._settle()
            return _total(self._lent)

    @property
    def free_bytes(self) -> int:
        """What could be lent now."""
        return self.budget_bytes - self.held_bytes

    @property
    def peak_bytes(self) -> int:
        """The most that was lent at once."""
        return self._peak_bytes

    @property
    def pinned_peak_bytes(self) -> int:
        """The most that was pinned at once."""
        return self._pinned_peak_bytes

    def use(self) -> HostUse:
        """Return what was taken so far."""
        return HostUse(
            self.budget_bytes,
            self._peak_bytes,
            self._pinned_peak_bytes,
            self.n_refused,
        )

    def take(self, n_bytes: int) -> HostBuffer | None:
        """Lend memory.

        Args:
            n_bytes: At least so many.

        Returns:
            None where that would pass the budget, or the machine itself has no more.
        """
        sizes = self._sizes(n_bytes)
        with self._lock:
            self._settle()
            if _total(self._lent) + sum(sizes) > self.budget_bytes:
                self.n_refused += 1
                return None
            self._lent.update(sizes)
            if self.is_pinned:
                self._pin()
            self._peak_bytes = max(self._peak_bytes, _total(self._lent))
        most_bytes = n_bytes + (LEAST_PIECE if self.is_pinned else 0)
        buffer = HostBuffer(sizes, most_bytes, self._returned)
        try:
            buffer.pieces = [_piece(size, is_pinned=self.is_pinned) for size in sizes]
        except (RuntimeError, MemoryError) as error:
            # The buffer goes, and gives back what was counted.
            self.n_refused += 1
            _log.warning(
                "mimose: the host refuses %s of memory for an offloaded tensor, which "
                "stays on the device: %s. Give a smaller host_budget",
                format_bytes(n_bytes),
                first_line(error),
            )
            return None
        return buffer

    def _sizes(self, n_bytes: int) -> list[int]:
        if not self.is_pinned:
            return [n_bytes]
        return powers_of_two(n_bytes, LEAST_PIECE)

    def _pin(self) -> None:
        """Count what is pinned for what is lent; unpin what waits if it is too much."""
        made = self._made | self._lent
        if _total(made) > self.budget_bytes:
            empty_host_cache()
            made = +self._lent
        self._made = made
        self._pinned_peak_bytes = max(self._pinned_peak_bytes, _total(made))

    def _settle(self) -> None:
        while self._returned:
            self._lent.subtract(self._returned.popleft())


def powers_of_two(n_bytes: int, least: int) -> list[int]:
    """Return distinct powers of two that add up to a size, the largest first.

    Args:
        n_bytes: The size, rounded up to a multiple of the least.
        least: The smallest power.
    """
    rest = -(-n_bytes // least) * least
    return [1 << bit for bit in range(rest.bit_length() - 1, -1, -1) if rest >> bit & 1]


def _piece(n_bytes: int, *, is_pinned: bool) -> torch.Tensor:
    return torch.empty(n_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)


def _total(pieces: Counter[int]) -> int:
    return sum(size * count for size, count in pieces.items())
