"""The names of the sizes of several forwards, one behind the other. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mimose.exceptions import MimoseError
from mimose.inputs.size_table import SizeTable


class WindowTable:
    """Names the sizes of a window: of all forwards but the first with a number.

    Args:
        tables: Those of its forwards.
    """

    def __init__(self, tables: Sequence[SizeTable]) -> None:
        self._tables = tuple(tables)

    def named(self, sizes: tuple[int, ...]) -> Mapping[str, int]:
        """Return the sizes that vary, by name."""
        return {
            _called(part, name): size
            for part, (table, own) in enumerate(self._parts(sizes))
            for name, size in table.named(own).items()
        }

    def knows(self, name: str) -> bool:
        """Whether a size of one of them is called so, with or without a number."""
        own = name.partition(" (")[0]
        return any(
            table.knows(own) and name in (own, _called(part, own))
            for part, table in enumerate(self._tables)
        )

    def spoken_names(self) -> list[str]:
        """Return what all sizes are called."""
        return [
            _called(part, name)
            for part, table in enumerate(self._tables)
            for name in table.spoken_names()
        ]

    def fill(
        self, shape: Mapping[str, int], others: tuple[int, ...]
    ) -> tuple[int, ...]:
        """Return all sizes of a shape given by name, the others as they are given.

        Raises:
            MimoseError: A name is not one of theirs.
        """
        for name in shape:
            if not self.knows(name):
                known = ", ".join(self.spoken_names())
                msg = f"shape: no size is called {name!r}; the model's are {known}"
                raise MimoseError(msg)
        filled: tuple[int, ...] = ()
        for part, (table, sizes) in enumerate(self._parts(others)):
            own = {
                name.partition(" (")[0]: size
                for name, size in shape.items()
                if name == _called(part, name.partition(" (")[0])
            }
            filled += table.fill(own, sizes)
        return filled

    def _parts(self, sizes: tuple[int, ...]) -> list[tuple[SizeTable, tuple[int, ...]]]:
        found, begin = [], 0
        for table in self._tables:
            end = begin + len(table.names)
            found.append((table, sizes[begin:end]))
            begin = end
        return found


def _called(part: int, name: str) -> str:
    return f"{name} ({part + 1})" if part else name
