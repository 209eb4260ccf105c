"""Names the sizes of one structure.

Sizes that were equal in every call count as one size with one name: that of the main
input, if it is among them (for example ``input_ids``, not its mask). A tensor that is
passed by position has the name of the forward's parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from mimose.exceptions import MimoseError

_MAIN_INPUTS = (
    "input_ids",
    "inputs_embeds",
    "pixel_values",
    "input_values",
    "input_features",
)
"""Main inputs of transformers' models, the preferred first."""
_OTHER_INPUTS = ("label", "token_type", "position", "mask")
"""Words in names of other inputs, the preferred first."""


class SizeTable:
    """Groups the dimensions of one structure that are always equal, and names them.

    Dimensions are in one group while they were equal in every call. The batch
    (dimension 0) is never in a group with another dimension.

    Args:
        names: `CallShape.names` of the structure.
        positional: The names of positional arguments.
    """

    def __init__(self, names: tuple[str, ...], positional: Sequence[str] = ()) -> None:
        self.names = names
        self._spoken = tuple(_spoken(name, positional) for name in names)
        self._index = {name: i for i, name in enumerate(names)}
        self._index.update({name: i for i, name in enumerate(self._spoken)})
        self._group: list[int] = []
        self._alike: list[int | None] = []
        """The size of each dimension in all calls; None if it has varied."""
        self._shown: list[tuple[str, int]] = []

    def add(self, sizes: tuple[int, ...]) -> None:
        """Record a call's sizes, which may split a group."""
        together: dict[tuple[int, bool, int], int] = {}
        old = self._group or [0] * len(sizes)
        self._group = [
            together.setdefault((old[i], self.names[i].endswith(".0"), size), i)
            for i, size in enumerate(sizes)
        ]
        before = self._alike or sizes
        self._alike = [
            size if size == old else None
            for size, old in zip(sizes, before, strict=True)
        ]
        self._show()

    def _show(self) -> None:
        """Choose the sizes that get a name: those that vary."""
        columns = sorted(set(self._group))
        varying = [c for c in columns if self._alike[c] is None] or columns
        self._shown = [(self._name(c), c) for c in varying]

    def _name(self, column: int) -> str:
        """Return the name of a group."""
        named = zip(self._spoken, self._group, strict=True)
        return min((name for name, c in named if c == column), key=_rank)

    def column(self, name: str) -> int | None:
        """Return the column of a size's group; None for an unknown name."""
        at = self._index.get(name)
        return at if at is None or not self._group else self._group[at]

    def named(self, sizes: tuple[int, ...]) -> Mapping[str, int]:
        """Return the sizes that vary, by name; all of them while none has varied."""
        return {name: sizes[column] for name, column in self._shown}

    def n_elements(self, sizes: tuple[int, ...], argument: str) -> int:
        """Return the number of elements of an argument's tensor; 0 without a tensor."""
        own = [i for i, n in enumerate(self.names) if n.rpartition(".")[0] == argument]
        return math.prod(sizes[i] for i in own) if own else 0

    def fill(
        self, shape: Mapping[str, int], others: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return all sizes of a shape: named ones from it, the others from `others`.

        Raises:
            MimoseError: A name is unknown, or a size is not a positive integer.
        """
        group = self._group or list(range(len(self.names)))
        sizes = list(others)
        for name, size in shape.items():
            if name not in self._index:
                known = ", ".join(map(self._name, sorted(set(self._group))))
                msg = f"shape: there is no size {name!r}; the model's sizes are {known}"
                raise MimoseError(msg)
            if isinstance(size, bool) or not hasattr(size, "__index__") or size < 1:
                msg = f"shape: {name} must be an integer of at least 1, got {size!r}"
                raise MimoseError(msg)
            chosen = group[self._index[name]]
            for i, column in enumerate(group):
                if column == chosen:
                    sizes[i] = int(size)
        return tuple(sizes)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON values."""
        names = list(self.names)
        return {"names": names, "group": self._group, "alike": self._alike}

    @classmethod
    def from_state(
        cls, state: Mapping[str, Any], positional: Sequence[str] = ()
    ) -> SizeTable:
        """Make the table from what ``state_dict`` returned.

        Args:
            state: What it returned.
            positional: The names of positional arguments.
        """
        table = cls(tuple(map(str, state["names"])), positional)
        table._group = list(map(int, state["group"]))
        table._alike = [n if n is None else int(n) for n in state["alike"]]
        table._show()
        return table


def _spoken(name: str, positional: Sequence[str]) -> str:
    """Return a size's name, with the argument's name instead of its position."""
    first, dot, rest = name.partition(".")
    is_known = first.isdecimal() and int(first) < len(positional)
    return positional[int(first)] + dot + rest if is_known else name


def _rank(name: str) -> int:
    """Return the rank of a name; the one with the lowest rank names a group."""
    *path, _ = name.split(".")
    if path and path[-1] in _MAIN_INPUTS:
        return _MAIN_INPUTS.index(path[-1])
    found = [i for i, word in enumerate(_OTHER_INPUTS, start=1) if word in name]
    return len(_MAIN_INPUTS) + max(found, default=0)
