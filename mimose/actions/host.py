"""Holds storages in the host's memory until their backward, within a budget.

Note: [Who waits for whom]
On an accelerator with streams, copies out and copies in have their own streams, and run
beside the computation:

- A copy out waits until the computation has made the storage. The storage lives until
  the copy has ended, or until the computing stream waits for that end, so that a later
  owner of the memory writes to it afterwards. This is at the end of the call; no plan
  assumes an earlier end.
- When a backward needs the first storage of a call, all storages of the call are copied
  back, the last one first. Plans assume that.
- A copy in waits for the copy out, and for the computation that used its memory before.
  The computation waits for the copy in when the tensor is needed, or when it is freed
  without having been needed.

So no tensor is recorded on another stream (``record_stream``), where the time at which
its memory is free again would depend on timing. Torch's allocator does not free pinned
memory during a copy.

Note: [Pieces]
Torch's allocator of pinned memory keeps freed blocks for the next request, and rounds
each request up to a power of two, up to twice the size. So a storage is held in pieces
that are powers of two: 100 MiB in 64, 32 and 4. The allocator knows when a copy to or
from a piece has ended, and reuses no piece before.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from mimose.budget import format_bytes, parse_budget, rank_share
from mimose.exceptions import BudgetError, first_line
from mimose.memory.meters import control_groups
from mimose.records import HostUse
from mimose.tensors import bytes_of
from mimose.torch_private import (
    NO_GRAPH_TASK,
    current_graph_task,
    empty_host_cache,
    keeps_graph,
    queue_callback,
)

_log = logging.getLogger(__name__)

WITH_STREAMS = frozenset({"cuda", "xpu"})
"""Accelerators that copy to pinned memory while they compute."""
LEAST_PIECE = 65536
"""Bytes of the smallest pinned piece. For smaller ones a copy is mostly its start."""


# ------------------------------------------------------------------------- the budget


def make_host(device: torch.device, host_budget: float | str | None) -> Host | None:
    """Return the `Host` that holds a session's tensors.

    Args:
        device: The model's device.
        host_budget: As for `mimose.attach`. None for half of what is free, because
            loaders and page caches need some, and pinned memory cannot be paged out.

    Returns:
        None if the model itself is on the host.

    Raises:
        BudgetError: The budget cannot be read, or the model is on the host.
    """
    if device.type == "cpu":
        if host_budget is not None:
            msg = (
                f"host_budget {host_budget!r} has no effect: the model itself is on "
                f"the host. Leave host_budget out"
            )
            raise BudgetError(msg)
        return None
    return Host(parse_host_budget(host_budget, rank_share(_free_bytes())), device)


def parse_host_budget(host_budget: float | str | None, free: int | None) -> int:
    """Turn a budget of host memory into bytes.

    Args:
        host_budget: Bytes, or a share of what is free; None for half of it.
        free: What is free on the host; None if not known.

    Raises:
        BudgetError: It is none, or a share of an amount that is not known.
    """
    try:
        return parse_budget(0.5 if host_budget is None else host_budget, free)
    except BudgetError as error:
        msg = f"host_budget (a share is one of the host's free memory): {error}"
        raise BudgetError(msg) from None


def _free_bytes() -> int | None:
    """Return the free bytes of the host or this container; None if not known."""
    found = [max(0, limit - used) for limit, used in control_groups()]
    with contextlib.suppress(OSError, ValueError, IndexError):
        text = Path("/proc/meminfo").read_text(encoding="ascii")
        found.append(int(text.partition("MemAvailable:")[2].split()[0]) * 1024)
    return min(found, default=None)


class HostBuffer(list[torch.Tensor]):
    """Bytes of the host, in consecutive pieces; freed with its last reader."""

    __slots__ = ("__weakref__",)


class HostMemory:
    """Allocates memory of the host, within a budget.

    Args:
        budget_bytes: The most that is allocated, and the most that is pinned.
        is_pinned: Whether it allocates pinned memory.

    Attributes:
        n_refused: Number of requests that did not fit.
    """

    def __init__(self, budget_bytes: int, *, is_pinned: bool) -> None:
        self.budget_bytes = budget_bytes
        self.n_refused = 0
        self._is_pinned = is_pinned
        self._peak_bytes = self._pinned_peak_bytes = 0
        self._lent: Counter[int] = Counter()
        """Number of pieces in use, by size."""
        self._made: Counter[int] = Counter()
        """The same with the free pieces that torch's allocator keeps."""
        self._returned: deque[Sequence[int]] = deque()
        self._lock = threading.RLock()

    def use(self) -> HostUse:
        """Return the use so far."""
        peaks = self._peak_bytes, self._pinned_peak_bytes
        return HostUse(self.budget_bytes, *peaks, self.n_refused)

    def most_bytes(self, n_bytes: int) -> int:
        """Return the most that a storage takes of the budget."""
        return n_bytes + (LEAST_PIECE if self._is_pinned else 0)

    def take(self, n_bytes: int) -> HostBuffer | None:
        """Allocate memory.

        Args:
            n_bytes: The least bytes.

        Returns:
            None if that would pass the budget, or the machine has no more memory.
        """
        sizes = powers_of_two(n_bytes, LEAST_PIECE) if self._is_pinned else [n_bytes]
        with self._lock:
            while self._returned:
                self._lent.subtract(self._returned.popleft())
            held = _total(self._lent) + sum(sizes)
            if held > self.budget_bytes:
                self.n_refused += 1
                return None
            self._lent.update(sizes)
            self._peak_bytes = max(self._peak_bytes, held)
            if self._is_pinned:
                self._pin()
        buffer = HostBuffer()
        # Without a lock, because garbage collection may run this at any time.
        weakref.finalize(buffer, self._returned.append, sizes)
        try:
            buffer.extend(_piece(size, is_pinned=self._is_pinned) for size in sizes)
        except (RuntimeError, MemoryError) as error:
            # The buffer is freed, and its bytes are counted as free.
            self.n_refused += 1
            _log.warning(
                "mimose: the host has no memory of %s for an offloaded tensor, which "
                "stays on the device: %s. Give a smaller host_budget",
                format_bytes(n_bytes),
                first_line(error),
            )
            return None
        return buffer

    def _pin(self) -> None:
        """Count pinned memory; if it is over the budget, free the unused pieces."""
        made = self._made | self._lent
        if _total(made) > self.budget_bytes:
            empty_host_cache()
            made = +self._lent
        self._made = made
        self._pinned_peak_bytes = max(self._pinned_peak_bytes, _total(made))


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


# ------------------------------------------------------------------------- the copies


class Host:
    """Holds a device's bytes in the host's memory: Note: [Who waits for whom].

    Args:
        budget_bytes: The most bytes of the host.
        device: The device of the tensors.
        streams: On devices other than CUDA and XPU: the stream of copies to the host,
            that of copies back, and what returns this thread's stream. Without streams,
            copies have ended when they return.

    Attributes:
        memory: Allocates on the host.
        device: The device of the tensors.
    """

    def __init__(
        self,
        budget_bytes: int,
        device: torch.device,
        streams: tuple[Any, Any, Callable[[], Any]] = (None, None, lambda: None),
    ) -> None:
        is_pinned = device.type in WITH_STREAMS
        if is_pinned:
            current = partial(torch.accelerator.current_stream, device)
            streams = torch.Stream(device), torch.Stream(device), current
        self.memory = HostMemory(budget_bytes, is_pinned=is_pinned)
        self.device = device
        self._outward, self._inward, self._current = streams
        self._leaving: deque[tuple[Any, torch.Tensor, Any]] = deque()
        """Copies out: an event at its end, its source, and the source's stream."""
        self._lock = threading.RLock()

    def to_host(self, source: torch.Tensor, pieces: Sequence[torch.Tensor]) -> Any:
        """Begin a copy to the host.

        Args:
            source: (n,) bytes on the device.
            pieces: Bytes on the host, together at least n.

        Returns:
            The event at its end, for `to_device`.
        """
        pairs = [(piece, part) for part, piece in _pairs(source, pieces)]
        ended, computing = self._copy(pairs, self._outward)
        if computing is not None:
            with self._lock:
                self._leaving.append((ended, source, computing))
        return ended

    def to_device(
        self, pieces: Sequence[torch.Tensor], n_bytes: int, sent: Any
    ) -> Arrival:
        """Begin a copy back.

        Args:
            pieces: The bytes on the host.
            n_bytes: Number of bytes.
            sent: What `to_host` returned.
        """
        self.settle()
        target = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        arrived, computing = self._copy(_pairs(target, pieces), self._inward, sent)
        return Arrival(target, arrived, computing, self._current)

    def _copy(
        self,
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]],
        stream: Any,
        *after: Any,
    ) -> tuple[Any, Any]:
        """Copy after some events; return the event at its end, and this stream."""
        if stream is None:
            for target, source in pairs:
                target.copy_(source)
            return None, None
        computing = self._current()
        for event in (computing.record_event(), *after):
            stream.wait_event(event)
        try:
            with stream:
                for target, source in pairs:
                    target.copy_(source, non_blocking=True)
        except BaseException:  # a part may have begun
            stream.synchronize()
            raise
        return stream.record_event(), computing

    def settle(self) -> None:
        """Make the computing streams wait for the copies out, and free the sources."""
        with self._lock:
            while self._leaving:
                ended, _, computing = self._leaving[0]
                computing.wait_event(ended)
                self._leaving.popleft()


@dataclass(eq=False)
class Arrival:
    """Bytes that are being copied to the device, or are there."""

    target: torch.Tensor
    """The tensor that is filled."""
    arrived: Any
    """The event after which it is filled; None if it is filled now."""
    computing: Any
    """The stream that it is for."""
    current: Callable[[], Any]
    """Returns this thread's stream."""

    def wait(self) -> torch.Tensor | None:
        """Return the tensor, and make this thread's stream wait for it.

        None if it was made for another stream.
        """
        if self.current() != self.computing:
            return None
        self.settle()
        return self.target

    def settle(self) -> None:
        """Make the stream wait, at the latest when the memory may be reused."""
        arrived, self.arrived = self.arrived, None
        if arrived is not None:
            self.computing.wait_event(arrived)

    __del__ = settle


def _pairs(
    flat: torch.Tensor, pieces: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the parts of (n,) bytes, each with its piece."""
    at = 0
    for piece in pieces:
        n_bytes = min(piece.numel(), flat.numel() - at)
        yield flat[at : at + n_bytes], piece[:n_bytes]
        at += n_bytes


# ----------------------------------------------------------------------- the storages


class Packed(NamedTuple):
    """The packed form of a storage, held between forward and backward."""

    device_bytes: int
    host_bytes: int
    """Bytes on the host, if that is not the device."""
    unpack: Callable[[], torch.UntypedStorage]
    """Returns a storage with the layout of the one that was packed."""


class HostCall:
    """Copies what one call saves to the host: a `Codec`.

    Args:
        host: Holds it there.
    """

    def __init__(self, host: Host) -> None:
        self.host = host
        self._sent: list[weakref.ref[_OnHost]] = []
        self._task = NO_GRAPH_TASK

    def __enter__(self) -> HostCall:
        return self

    def __exit__(self, *_: object) -> None:
        """Make the computing stream wait for the copies at the end of the forward."""
        self.host.settle()

    def role(self, tensor: torch.Tensor) -> bool | None:
        """Return True for tensors of the device; None for others."""
        return tensor.device.type == self.host.device.type or None

    def pack(self, tensor: torch.Tensor, role: bool = True) -> Packed | None:
        """Copy a tensor's storage; None if that would pass the budget."""
        del role
        storage, memory = tensor.untyped_storage(), self.host.memory
        buffer = memory.take(storage.nbytes())
        if buffer is None:
            return None
        made = _OnHost(self, buffer, storage)
        self._sent.append(weakref.ref(made))
        return Packed(0, memory.most_bytes(storage.nbytes()), made.unpack)

    def asked(self) -> None:
        """Copy all storages back when a backward needs the first one.

        Note: [Who waits for whom]
        """
        task = current_graph_task()
        if task in (NO_GRAPH_TASK, self._task):
            return
        self._task = task
        for ref in reversed(self._sent):
            each = ref()
            if each is not None:
                each.send_for()


class _OnHost:
    """A storage on the host, whose memory is freed with it."""

    def __init__(
        self, call: HostCall, buffer: HostBuffer, storage: torch.UntypedStorage
    ) -> None:
        self._call, self._buffer, self._n_bytes = call, buffer, storage.nbytes()
        self._coming: Arrival | None = None
        self._ended = call.host.to_host(bytes_of(storage), buffer)

    def unpack(self) -> torch.UntypedStorage:
        """Return the storage, on its device."""
        self._call.asked()
        coming, self._coming = self._coming, None
        tensor = None if coming is None else coming.wait()
        while tensor is None:  # of another stream
            tensor = self._fetch().wait()
        return tensor.untyped_storage()

    def _fetch(self) -> Arrival:
        host = self._call.host
        return host.to_device(self._buffer, self._n_bytes, self._ended)

    def send_for(self) -> None:
        """Begin to copy it back."""
        self._coming = self._fetch()
        if keeps_graph():
            queue_callback(self._forget)

    def _forget(self) -> None:
        self._coming = None


class AwayInput:
    """An input of a call that is held on the host until the call is recomputed.

    It holds no tensor of the call.

    Args:
        tensor: The input.
        packed: Its packed storage.

    Attributes:
        stand_in: An empty tensor on the input's device.
    """

    __slots__ = ("_input", "_looks", "_unpack", "stand_in")

    def __init__(self, tensor: torch.Tensor, packed: Packed) -> None:
        self._input = weakref.ref(tensor)
        self._looks = tensor.shape, tensor.stride()
        self._unpack = packed.unpack
        self.stand_in = tensor.new_empty(0)

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether it stands for a tensor."""
        return self._input() is tensor

    def bring(self) -> torch.Tensor:
        """Return the input on its device, as a leaf that requires a gradient."""
        whole = self.stand_in.new_empty(0)
        return whole.set_(self._unpack(), 0, *self._looks).requires_grad_()
