"""A user's loader, handing out its own batches while those behind them are read."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from torch.utils.data import DataLoader

from mimose.inputs.batches import batch_shape
from mimose.inputs.collating import WatchedLoaders, base_loaders
from mimose.runtime.ahead import Ahead, Waiting


class Told:
    """What a loader's own workers tell of its batches, as long as a session lives.

    Args:
        loaders: The `DataLoader`s in it.
        ahead: Plans for what is waiting.
    """

    def __init__(self, loaders: WatchedLoaders, ahead: Ahead) -> None:
        self._loaders = loaders
        self._ahead = ahead
        self._waiting = Waiting()

    def begin(self) -> None:
        """Begin another pass: what was told before comes no more."""
        self._loaders.line.read()
        self._waiting.clear()

    def hand(self, batch: object) -> None:
        """Take note that the loop gets a batch."""
        for shape in self._loaders.line.read():
            self._waiting.add(shape)
        self._ahead.hand(batch, self._waiting)

    def end(self) -> None:
        """Take note that the loop has no batch any more."""
        self._ahead.end()

    def remove(self) -> None:
        """Give the loaders back as they were. Harmless twice."""
        self._loaders.remove()


class WatchedLoader:
    """A `DataLoader`, or what accelerate or Lightning made of it, as it is.

    Args:
        loader: The loader.
        told: What its workers tell.
    """

    def __init__(self, loader: Iterable[Any], told: Told) -> None:
        self._loader = loader
        self._told = told

    def __len__(self) -> int:
        """Return the loader's own length."""
        return len(self._loader)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        """Hand out the loader's batches, the very same."""
        self._told.begin()
        batches = iter(self._loader)
        taken: list[Any] = []  # no name here keeps a batch that the loop has let go
        try:
            while True:
                try:
                    taken.append(next(batches))
                except StopIteration:
                    return
                self._told.hand(taken[0])
                yield taken.pop()
        finally:
            self._told.end()


class WatchedBatches:
    """Any other iterable of batches, of which some are taken ahead.

    Args:
        batches: A list or a tuple is read where it is, and nothing is taken out of it.
        ahead: Plans for what is waiting.
        n_ahead: Batches to look ahead.
    """

    def __init__(self, batches: Iterable[Any], ahead: Ahead, n_ahead: int) -> None:
        self._batches = batches
        self._ahead = ahead
        self._n_ahead = n_ahead
        self._taken: deque[Any] = deque()
        """Of an iterator, which another pass goes on with."""

    def __len__(self) -> int:
        """Return the iterable's own length."""
        return len(self._batches)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        if name == "_batches":
            raise AttributeError(name)
        return getattr(self._batches, name)

    def __iter__(self) -> Iterator[Any]:
        """Hand out the batches, the very same, in their order."""
        batches = iter(self._batches)
        taken = self._taken if batches is self._batches else deque()
        waiting = Waiting()
        for shape in map(batch_shape, taken):
            waiting.add(shape)
        failure: Exception | None = None
        try:
            while True:
                while failure is None and len(taken) <= self._n_ahead:
                    try:
                        taken.append(next(batches))
                    except Exception as error:  # its turn comes behind those taken
                        failure = error
                    else:
                        waiting.add(batch_shape(taken[-1]))
                if not taken:
                    break
                self._ahead.hand(taken[0], waiting)
                yield taken.popleft()
        finally:
            self._ahead.end()
        if not isinstance(failure, StopIteration):
            assert failure is not None
            raise failure


class Watches:
    """All loaders that a session watches.

    Args:
        ahead: Plans for what is waiting.
    """

    def __init__(self, ahead: Ahead) -> None:
        self._ahead = ahead
        self._told: weakref.WeakKeyDictionary[DataLoader[Any], Told]
        self._told = weakref.WeakKeyDictionary()
        """By the first `DataLoader` in each; they are not kept alive."""

    def watched(self, loader: Iterable[Any], n_ahead: int) -> Iterable[Any]:
        """Return an iterable of the same batches.

        Args:
            loader: The user's.
            n_ahead: Batches to look ahead, where it has no workers to tell.
        """
        if self._ahead.is_closed:
            return loader
        told = self.told_by(loader)
        if told is None:
            return WatchedBatches(loader, self._ahead, n_ahead)
        return WatchedLoader(loader, told)

    def told_by(self, loader: object) -> Told | None:
        """Let the `DataLoader`s in a loader tell; None where there are none."""
        bases = base_loaders(loader)
        if not bases:
            return None
        told = self._told.get(bases[0])
        if told is None:
            told = self._told[bases[0]] = self.heard(WatchedLoaders(loader))
        return told

    def heard(self, loaders: WatchedLoaders) -> Told:
        """Hear what loaders tell that were watched before there was a session.

        Args:
            loaders: Given back by who watched them.
        """
        return Told(loaders, self._ahead)

    def remove(self) -> None:
        """Give all loaders back as they were. Harmless twice."""
        self._ahead.close()
        for told in list(self._told.values()):
            told.remove()
        self._told.clear()
