"""Batches' sizes as they are collated, in this process or in a `DataLoader`'s workers.

Note: [The line]
Workers write to one pipe, a line of JSON a batch, each in one write that the system
does not split; whoever asks in the main process reads what has come. Neither side ever
waits, so a worker that dies holds nobody up, and lines that find the pipe full are
lost: a shape that nobody was told of is planned for when it comes, as without. There is
no thread, no file and no lock.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from multiprocessing.context import get_spawning_popen
from typing import Any

from torch.utils.data import DataLoader

from mimose.inputs.batches import BatchShape, batch_shape

_MOST_BYTES = min(4096, getattr(select, "PIPE_BUF", 512))
"""Of a line: so much is written whole or not at all."""
_MOST_TOLD = 1024
"""Shapes that wait to be read; then the oldest is lost."""
_OWN = ("collate", "line")
_INNER = ("base_dataloader", "_dataloader", "dataloader", "_loader", "loader")
"""Where those who wrap a `DataLoader` keep it."""


class Line:
    """Tells the main process of shapes: Note: [The line]."""

    def __init__(self) -> None:
        self._reader, self._writer = multiprocessing.Pipe(duplex=False)
        for end in (self._reader, self._writer):
            os.set_blocking(end.fileno(), False)
        self._pid = os.getpid()
        self._told: deque[BatchShape] = deque(maxlen=_MOST_TOLD)
        self._rest = b""
        self.is_closed = False

    def tell(self, shape: BatchShape) -> None:
        """Tell of a batch; from any process, and without waiting."""
        if self.is_closed:
            return
        if os.getpid() == self._pid:
            self._told.append(shape)
        else:
            write(self._writer, shape)

    def read(self) -> list[BatchShape]:
        """Return what was told since the last call."""
        if self.is_closed:
            return []
        self._receive()
        told = list(self._told)
        self._told.clear()
        return told

    def _receive(self) -> None:
        while True:
            try:
                read = os.read(self._reader.fileno(), 2**16)
            except BlockingIOError:
                return
            *lines, self._rest = (self._rest + read).split(b"\n")
            self._told.extend(map(_shape_of, lines))

    def close(self) -> None:
        """Close the pipe; who still tells is not heard. Harmless twice."""
        self.is_closed = True
        self._told.clear()
        self._reader.close()
        self._writer.close()

    def for_worker(self) -> Connection:
        """Return what a process that is being started writes to."""
        return self._writer


def write(writer: Connection, shape: BatchShape) -> None:
    """Write a line, unless it is too long, nobody reads, or the pipe is full.

    Args:
        writer: The pipe's end.
        shape: The batch's.
    """
    line = json.dumps(shape).encode() + b"\n"
    if len(line) > _MOST_BYTES:
        return
    try:
        os.write(writer.fileno(), line)
    except OSError:
        return


def _shape_of(line: bytes) -> BatchShape:
    kind, sizes, masks = json.loads(line)
    return BatchShape(kind, tuple(sizes), None if masks is None else tuple(masks))


class Collate:
    """A loader's `collate_fn` that tells of each batch it has made.

    A copy, and what is pickled for anything but a worker, is the function itself.

    Args:
        collate: The loader's own.
        line: Whom to tell.
    """

    def __init__(self, collate: Callable[[Any], Any], line: Line) -> None:
        self.collate = collate
        self.line = line

    def __call__(self, samples: Any) -> Any:
        """Make a batch."""
        batch = self.collate(samples)
        shape = None if self.line.is_closed else _read(batch)
        if shape is not None:
            self.line.tell(shape)
        return batch

    def __getattr__(self, name: str) -> Any:
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self.collate, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _OWN:
            super().__setattr__(name, value)
        else:  # a setting of the loader's own
            setattr(self.collate, name, value)

    def __reduce__(self) -> Any:
        if get_spawning_popen() is None or self.line.is_closed:
            return _itself, (self.collate,)
        return _InWorker, (self.collate, self.line.for_worker())


class _InWorker:
    """The same in a worker that was not forked.

    Args:
        collate: The loader's own.
        writer: The pipe's end.
    """

    def __init__(self, collate: Callable[[Any], Any], writer: Connection) -> None:
        self._collate = collate
        self._writer = writer

    def __call__(self, samples: Any) -> Any:
        batch = self._collate(samples)
        shape = _read(batch)
        if shape is not None:
            write(self._writer, shape)
        return batch


def _read(batch: object) -> BatchShape | None:
    """Read a batch's sizes; None of what cannot be read, which is nobody's loss."""
    try:
        return batch_shape(batch)
    except Exception:  # anybody's batch, in anybody's worker
        return None


def _itself(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return collate


def base_loaders(loader: object) -> list[DataLoader[Any]]:
    """Return the `DataLoader`s in what accelerate, Lightning or others made of them.

    Args:
        loader: One of these, or a container of such.
    """
    return list(dict.fromkeys(_bases(loader)))


def _bases(loader: object) -> Iterable[DataLoader[Any]]:
    if isinstance(loader, Mapping):
        return [base for each in loader.values() for base in _bases(each)]
    if type(loader) in (list, tuple):
        return [base for each in loader for base in _bases(each)]  # type: ignore[attr-defined]
    own = getattr(loader, "__dict__", {})
    for name in _INNER:  # accelerate's say that they are DataLoaders themselves
        if name in own and _bases(own[name]):
            return _bases(own[name])
    if isinstance(loader, DataLoader):
        return [loader]
    flattened = getattr(loader, "flattened", None)  # of Lightning's CombinedLoader
    return _bases(flattened) if type(flattened) is list else []


class WatchedLoaders:
    """`DataLoader`s that tell of their batches, until `remove`.

    Args:
        loader: As for `base_loaders`.
    """

    def __init__(self, loader: object = ()) -> None:
        self.line = Line()
        self._patched: list[tuple[weakref.ref[DataLoader[Any]], Collate]] = []
        self.add(loader)

    def add(self, loader: object) -> None:
        """Let more loaders tell.

        Args:
            loader: As for `base_loaders`.
        """
        for base in base_loaders(loader):
            if getattr(base.collate_fn, "line", None) is self.line:
                continue
            told = Collate(_plain(base.collate_fn), self.line)
            base.collate_fn = told
            self._patched.append((weakref.ref(base), told))

    def remove(self) -> None:
        """Give the loaders back as they were. Harmless twice."""
        for reference, told in self._patched:
            base = reference()
            if base is not None and base.collate_fn is told:
                base.collate_fn = _plain(told.collate)
        self._patched.clear()
        self.line.close()


def _plain(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a loader's own function, where one that tells nobody stands around it."""
    while isinstance(collate, Collate) and collate.line.is_closed:
        collate = collate.collate
    return collate
