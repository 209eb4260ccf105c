"""Copies between a device and the host.

Note: [Who waits for whom]
On an accelerator with streams copies out and copies in have a stream each, and go on
beside the computing:

- A copy out waits until the computing has made what it copies. What is copied lives
  until the copy has ended, or until the computing has been told to wait for that end:
  then whoever gets the memory next writes to it afterwards. How much may live so long
  the caller says, and at the latest it ends with the next call that copies anything;
  with no headroom the computing waits at once, and memory is as if copies took no time.
- A copy in waits for the copy out, and until the computing is done with whatever had
  its memory before. The computing waits for it where the tensor is asked for, or where
  it goes without having been.

So no tensor is ever told of another stream (``record_stream``), which would leave it to
timing when its memory is free again. What is pinned is not freed under a copy by
torch's own allocator.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from mimose.worker import lock


class Arrival(Protocol):
    """A tensor that is on its way to the device, or there."""

    def wait(self) -> torch.Tensor | None:
        """Return it, for use by what computes in this thread from now on.

        None where it was made for another stream than this thread's.
        """
        ...


class Copies(Protocol):
    """How bytes get to the host and back."""

    def to_host(
        self,
        source: torch.Tensor,
        pieces: Sequence[torch.Tensor],
        headroom_bytes: float,
    ) -> Any:
        """Copy to the host.

        Args:
            source: (n,) bytes on the device.
            pieces: Bytes on the host, in all at least as many.
            headroom_bytes: The device may hold so much longer for it.

        Returns:
            What `to_device` needs to know.
        """
        ...

    def to_device(
        self, pieces: Sequence[torch.Tensor], n_bytes: int, sent: Any
    ) -> Arrival:
        """Begin to copy back.

        Args:
            pieces: What was copied to.
            n_bytes: So many of them.
            sent: What `to_host` returned.
        """
        ...

    def settle(self) -> None:
        """Let go of all that was copied to the host so far."""
        ...

    def finish(self, sent: Any) -> None:
        """Have the host wait until a copy to it has ended.

        Args:
            sent: What `to_host` returned.
        """
        ...

    def here(self) -> object:
        """Return for whom a tensor is there once it was waited for in this thread."""
        ...


def make_copies(device: torch.device, *, is_pinned: bool) -> Copies:
    """Return what copies between a device and the host.

    Args:
        device: The device.
        is_pinned: Whether the memory on the host is pinned.
    """
    if not is_pinned:
        return PlainCopies(device)
    return StreamCopies(Streams(device))


class _Here:
    """A tensor that is there."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def wait(self) -> torch.Tensor:
        """Return it."""
        return self._tensor


class PlainCopies:
    """Copies that have ended when they return.

    Args:
        device: Where tensors come from, and go back to.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def to_host(
        self,
        source: torch.Tensor,
        pieces: Sequence[torch.Tensor],
        headroom_bytes: float,
    ) -> None:
        """Copy to the host: see `Copies`."""
        del headroom_bytes
        for part, piece in _pairs(source, pieces):
            piece.copy_(part)

    def to_device(
        self, pieces: Sequence[torch.Tensor], n_bytes: int, sent: None
    ) -> Arrival:
        """Copy back: see `Copies`."""
        del sent
        target = torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
        for part, piece in _pairs(target, pieces):
            part.copy_(piece)
        return _Here(target)

    def settle(self) -> None:
        """Do nothing: nothing is held."""

    def finish(self, sent: None) -> None:
        """Do nothing: it has."""

    def here(self) -> None:
        """Return None: it is there for everybody."""


class Streams:
    """The streams of a device that take part in copies.

    Args:
        device: An accelerator.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.outward: Any = torch.Stream(device)
        self.inward: Any = torch.Stream(device)

    def current(self) -> Any:
        """Return the one that this thread computes on."""
        return torch.accelerator.current_stream(self._device)

    def empty(self, n_bytes: int) -> torch.Tensor:
        """Return memory of the stream that this thread computes on."""
        return torch.empty(n_bytes, dtype=torch.uint8, device=self._device)


class StreamCopies:
    """Copies beside the computing: Note: [Who waits for whom].

    Args:
        streams: The device's.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._leaving: deque[tuple[Any, torch.Tensor, Any]] = deque()
        """Copies out: when each has ended, what it copies, and on which stream that
        was made."""
        self._lock = lock()

    def to_host(
        self,
        source: torch.Tensor,
        pieces: Sequence[torch.Tensor],
        headroom_bytes: float,
    ) -> Any:
        """Begin to copy to the host: see `Copies`."""
        computing, outward = self._streams.current(), self._streams.outward
        outward.wait_event(computing.record_event())
        try:
            with outward:
                for part, piece in _pairs(source, pieces):
                    piece.copy_(part, non_blocking=True)
        finally:  # one that fails may have begun
            ended = outward.record_event()
            with self._lock:
                self._leaving.append((ended, source, computing))
        self._let_go(headroom_bytes)
        return ended

    def to_device(
        self, pieces: Sequence[torch.Tensor], n_bytes: int, sent: Any
    ) -> Arrival:
        """Begin to copy back: see `Copies`."""
        self._let_go(0.0)
        computing, inward = self._streams.current(), self._streams.inward
        target = self._streams.empty(n_bytes)
        inward.wait_event(computing.record_event())
        inward.wait_event(sent)
        try:
            with inward:
                for part, piece in _pairs(target, pieces):
                    part.copy_(piece, non_blocking=True)
        finally:  # one that fails may have begun
            coming = _Coming(target, inward.record_event(), self._streams)
        return coming

    def settle(self) -> None:
        """Have the computing wait for all copies out: see `Copies`."""
        self._let_go(0.0)

    def finish(self, sent: Any) -> None:
        """Wait for a copy out: see `Copies`."""
        sent.synchronize()

    def here(self) -> object:
        """Return the stream that this thread computes on."""
        return self._streams.current()

    def _let_go(self, headroom_bytes: float) -> None:
        """Let go of what was copied out, the oldest first."""
        with self._lock:
            leaving = self._leaving
            held = sum(source.nbytes for _, source, _ in leaving)
            while leaving:
                ended, source, computing = leaving[0]
                if not ended.query():
                    if held <= headroom_bytes:
                        return
                    computing.wait_event(ended)
                held -= source.nbytes
                leaving.popleft()


class _Coming:
    """A tensor that is being copied to the device."""

    __slots__ = ("_arrived", "_computing", "_is_awaited", "_streams", "_target")

    def __init__(self, target: torch.Tensor, arrived: Any, streams: Streams) -> None:
        self._target = target
        self._arrived = arrived
        self._streams = streams
        self._computing = streams.current()
        self._is_awaited = False

    def wait(self) -> torch.Tensor | None:
        """Return it once the computing waits for it: see `Arrival`."""
        if self._streams.current() != self._computing:
            return None
        self._await()
        return self._target

    def _await(self) -> None:
        if not self._is_awaited:
            self._is_awaited = True
            self._computing.wait_event(self._arrived)

    def __del__(self) -> None:
        """Have the computing wait, for its memory may be given to others now."""
        self._await()


def _pairs(
    flat: torch.Tensor, pieces: Sequence[torch.Tensor]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield (n,) bytes part by part, with what holds each."""
    at = 0
    for piece in pieces:
        n_bytes = min(piece.numel(), flat.numel() - at)
        yield flat[at : at + n_bytes], piece[:n_bytes]
        at += n_bytes
