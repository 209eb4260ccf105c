"""Memory of the host is lent within its budget, and comes back by itself."""

import gc

import torch

from mimose.actions.offload import host
from mimose.actions.offload.host import LEAST_PIECE, HostMemory

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Allocator:
    """Stands for torch's allocator of pinned memory: keeps what is given back.

    Args:
        monkeypatch: Puts it in the place of torch's.
    """

    def __init__(self, monkeypatch):
        self.lent, self.kept, self.fails = {}, {}, False
        monkeypatch.setattr(host, "_piece", self._piece)
        monkeypatch.setattr(host, "empty_host_cache", self.kept.clear)

    @property
    def n_bytes(self):
        """All that is pinned."""
        gc.collect()
        held = (*self.lent.items(), *self.kept.items())
        return sum(size * count for size, count in held)

    def _piece(self, n_bytes, *, is_pinned):
        assert is_pinned
        if self.fails:
            msg = "no more pinned memory"
            raise RuntimeError(msg)
        if self.kept.get(n_bytes, 0):
            self.kept[n_bytes] -= 1
        self.lent[n_bytes] = self.lent.get(n_bytes, 0) + 1
        return Piece(n_bytes, self)


class Piece:
    """Of pinned memory.

    Args:
        n_bytes: Its size.
        allocator: Whose it is.
    """

    def __init__(self, n_bytes, allocator):
        self.nbytes, self._allocator = n_bytes, allocator

    def __del__(self):
        """Go back."""
        self._allocator.lent[self.nbytes] -= 1
        kept = self._allocator.kept
        kept[self.nbytes] = kept.get(self.nbytes, 0) + 1


def test_the_budget_is_never_passed():
    """What does not fit is refused and counted; it fits when something has gone."""
    memory = HostMemory(1000, CPU)
    first = memory.take(700)
    assert memory.take(301) is None
    assert (700, 1) == (memory.peak_bytes, memory.n_refused)
    del first
    assert memory.take(1000) is not None
    assert HostMemory(0, CPU).take(1) is None


def test_what_is_pinned_stays_within_the_budget(monkeypatch):
    """Pieces of other sizes that wait for the next are unpinned before it is passed."""
    allocator, seen = Allocator(monkeypatch), []
    memory = HostMemory(16 * LEAST_PIECE, CUDA)
    for sizes in ([8, 4, 2], [7, 7], [1] * 16, [16], [5, 5, 5]):
        held = [memory.take(size * LEAST_PIECE) for size in sizes]
        assert None not in held
        seen.append(allocator.n_bytes)
        del held
    assert max(seen) == memory.pinned_peak_bytes == memory.peak_bytes
    assert memory.pinned_peak_bytes <= memory.budget_bytes
    assert 0 == memory.held_bytes < allocator.n_bytes


def test_a_machine_without_more(monkeypatch):
    """The tensor stays on the device, and nothing stays counted."""
    allocator = Allocator(monkeypatch)
    memory = HostMemory(2**30, CUDA)
    allocator.fails = True
    assert memory.take(2**20) is None
    assert 1 == memory.n_refused
    assert 0 == memory.held_bytes
