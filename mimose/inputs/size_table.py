"""The names of sizes, and which of them always equal each other. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mimose.exceptions import MimoseError
from mimose.inputs.size_names import COUNT, rank, spoken

_MOST_NAMED = 1024
_NUMBERS = (".0", f".{COUNT}")
"""Ends of the names of sizes that count: a batch's rows, a list's tensors."""


class Table(Protocol):
    """Names sizes."""

    def named(self, sizes: tuple[int, ...]) -> Mapping[str, int]:
        """Return the sizes that vary, by name."""
        ...

    def knows(self, name: str) -> bool:
        """Whether a size is called so."""
        ...

    def spoken_names(self) -> list[str]:
        """Return what all sizes are called."""
        ...

    def fill(
        self, shape: Mapping[str, int], others: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return all sizes of a shape given by name, the others as they are given."""
        ...


class SizeTable:
    """Merges the dimensions of one structure that are always equal.

    Dimensions stay together as long as they were equal in every call seen; the batch
    (dimension 0) is never merged with another dimension. What a size is called then:
    see `mimose.inputs.size_names`.

    Args:
        names: `CallShape.names` of the structure.
        positional: What the positional arguments are called.
    """

    def __init__(self, names: tuple[str, ...], positional: Sequence[str] = ()) -> None:
        self.names = names
        self._spoken = tuple(spoken(name, positional) for name in names)
        self._index = {name: i for i, name in enumerate(names)}
        self._index.update({name: i for i, name in enumerate(self._spoken)})
        self._group: list[int] | None = None
        self._constant: tuple[int, ...] = ()
        self._varies: list[bool] = []
        self._shown: list[tuple[str, int]] = []
        self._named: dict[tuple[int, ...], Mapping[str, int]] = {}
        """By sizes, what `named` has returned."""

    def add(self, sizes: tuple[int, ...]) -> None:
        """Take note of a call's sizes: they may part what was together."""
        parted: dict[tuple[int, bool, int], int] = {}
        group = []
        old = self._group or [0] * len(sizes)
        for index, size in enumerate(sizes):
            is_batch = self.names[index].endswith(_NUMBERS)
            group.append(parted.setdefault((old[index], is_batch, size), index))
        if self._group is None:
            self._constant, self._varies = sizes, [False] * len(sizes)
        self._varies = [
            v or s != c
            for v, s, c in zip(self._varies, sizes, self._constant, strict=True)
        ]
        self._group = group
        self._show()

    def _show(self) -> None:
        """Settle which sizes are named: those that vary."""
        columns = self.columns()
        varying = [c for c in columns if self._varies[c]] or columns
        self._shown = [(self._name(c), c) for c in varying]
        self._named = {}

    def _name(self, column: int) -> str:
        """Return what a group's size is called."""
        group = self._group or list(range(len(self.names)))
        names = [n for n, c in zip(self._spoken, group, strict=True) if c == column]
        return min(names, key=rank)

    def spoken_names(self) -> list[str]:
        """Return what all sizes are called, those that are always equal once."""
        return [self._name(column) for column in self.columns()]

    def knows(self, name: str) -> bool:
        """Whether a size is called so."""
        return name in self._index

    def state_dict(self) -> dict[str, Any]:
        """Return the state as lists, ready for JSON."""
        return {
            "names": list(self.names),
            "group": self._group,
            "constant": list(self._constant),
            "varies": self._varies,
        }

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], positional: Sequence[str] = ()
    ) -> SizeTable:
        """Make the table that ``state_dict`` told of.

        Args:
            state: What it returned.
            positional: What the positional arguments are called.
        """
        table = cls(tuple(map(str, state["names"])), positional)
        if state["group"] is not None:
            table._group = list(map(int, state["group"]))
            table._constant = tuple(map(int, state["constant"]))
            table._varies = list(map(bool, state["varies"]))
            table._show()
        return table

    def columns(self) -> list[int]:
        """Return one index a group, in order."""
        return sorted(set(self._group or ()))

    def named(self, sizes: tuple[int, ...]) -> Mapping[str, int]:
        """Return the sizes that vary, by name; all of them while none has varied."""
        named, shown = self._named, self._shown  # another thread may add a call's sizes
        found = named.get(sizes)
        if found is None:
            found = {name: sizes[column] for name, column in shown}
            if len(named) >= _MOST_NAMED:
                named.clear()
            named[sizes] = found
        return found

    def fill(
        self, shape: Mapping[str, int], others: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return all sizes of a shape given by name, the others as they are given.

        Raises:
            MimoseError: A name is not one of this structure's.
        """
        group = self._group or list(range(len(self.names)))
        sizes = list(others)
        for name, size in shape.items():
            if name not in self._index:
                known = ", ".join(self.spoken_names())
                msg = f"shape: no size is called {name!r}; the model's are {known}"
                raise MimoseError(msg)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                msg = f"shape: {name} must be an integer of at least 1, got {size!r}"
                raise MimoseError(msg)
            chosen = group[self._index[name]]
            for index, representative in enumerate(group):
                if representative == chosen:
                    sizes[index] = int(size)
        return tuple(sizes)
