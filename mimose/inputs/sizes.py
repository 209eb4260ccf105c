"""What the sizes of a step are called, and which of them always equal each other.

Sizes that were equal in every call count as one, and one name stands for all: that of
what the model is about, if it is among them (a text is told as ``input_ids`` rather
than by its mask). A tensor passed by position is called as the model's forward calls
it. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mimose.exceptions import MimoseError

_MOST_NAMED = 1024
_ABOUT = (
    "input_ids",
    "inputs_embeds",
    "pixel_values",
    "input_values",
    "input_features",
)
"""What models of transformers are about, in this order."""
_ASIDE = ("label", "token_type", "position", "mask")
"""What belongs to something else; masks say least."""


class SizeTable:
    """Merges the dimensions of one structure that are always equal, and names them.

    Dimensions stay together as long as they were equal in every call seen; the batch
    (dimension 0) is never merged with another dimension.

    Args:
        names: `CallShape.names` of the structure.
        positional: What the positional arguments are called.
    """

    def __init__(self, names: tuple[str, ...], positional: Sequence[str] = ()) -> None:
        self.names = names
        self._spoken = tuple(_spoken(name, positional) for name in names)
        self._index = {name: i for i, name in enumerate(names)}
        self._index.update({name: i for i, name in enumerate(self._spoken)})
        self._group: list[int] = []
        self._constant: tuple[int, ...] = ()
        self._varies: list[bool] = []
        self._shown: list[tuple[str, int]] = []
        self._named: dict[tuple[int, ...], Mapping[str, int]] = {}
        """By sizes, what `named` has returned."""

    def add(self, sizes: tuple[int, ...]) -> None:
        """Take note of a call's sizes: they may part what was together."""
        if not self._constant:
            self._constant, self._varies = sizes, [False] * len(sizes)
        together: dict[tuple[int, bool, int], int] = {}
        old = self._group or [0] * len(sizes)
        self._group = [
            together.setdefault((old[i], self.names[i].endswith(".0"), size), i)
            for i, size in enumerate(sizes)
        ]
        self._varies = [
            varies or size != first
            for varies, size, first in zip(
                self._varies, sizes, self._constant, strict=True
            )
        ]
        self._show()

    def _show(self) -> None:
        """Settle which sizes are named: those that vary."""
        columns = sorted(set(self._group))
        varying = [c for c in columns if self._varies[c]] or columns
        self._shown = [(self._name(c), c) for c in varying]
        self._named = {}

    def _name(self, column: int) -> str:
        """Return what a group's size is called."""
        named = zip(self._spoken, self._group, strict=True)
        return min((name for name, c in named if c == column), key=_rank)

    def spoken_names(self) -> list[str]:
        """Return what all sizes are called, those that are always equal once."""
        return [self._name(column) for column in sorted(set(self._group))]

    def knows(self, name: str) -> bool:
        """Whether a size is called so."""
        return name in self._index

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
            MimoseError: A name is not one of this structure's, or a size is no
                positive integer.
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
            sizes = [
                size if column == chosen else other
                for column, other in zip(group, sizes, strict=True)
            ]
        return tuple(sizes)

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
        table._group = list(map(int, state["group"]))
        table._constant = tuple(map(int, state["constant"]))
        table._varies = list(map(bool, state["varies"]))
        table._show()
        return table


def _spoken(name: str, positional: Sequence[str]) -> str:
    """Return a size's name, with the argument's in place of its position."""
    first, dot, rest = name.partition(".")
    is_known = first.isdecimal() and int(first) < len(positional)
    return positional[int(first)] + dot + rest if is_known else name


def _rank(name: str) -> int:
    """Return which of several names is to stand for all: that of the lowest rank."""
    *path, _ = name.split(".")
    if path and path[-1] in _ABOUT:
        return _ABOUT.index(path[-1])
    found = [i for i, word in enumerate(_ASIDE, start=1) if word in name]
    return len(_ABOUT) + max(found, default=0)
