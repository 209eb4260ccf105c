"""Which modules and buffers a module consists of, looked at again at little cost."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, TypeAlias

from torch import nn

from mimose.torch_private import buffers_of, parameters_of, submodules_of

Tables: TypeAlias = "Sequence[tuple[dict[str, Any], dict[str, Any]]]"
"""Tables, each with what was in it."""
_values = dict.values
_get = dict.get


class Structure:
    """The modules in a module, how many buffers they have, and where tensors lack.

    A parametrization is a module, too. Scripted modules cannot change.

    Args:
        root: The module.

    Attributes:
        modules: All of them, as last noted.
        tables: Those of submodules, each with what was in it.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._note()

    def _note(self) -> None:
        self.modules = tuple(self._root.modules())
        tables = [t for t in map(submodules_of, self.modules) if isinstance(t, dict)]
        self.tables: Tables = [(table, dict(table)) for table in tables]
        self._filled = [table for table in tables if table]
        self._empty = [table for table in tables if not table]
        self._inside = list(chain.from_iterable(map(_values, self._filled)))
        buffers = map(buffers_of, self.modules)
        counted = [table for table in buffers if isinstance(table, dict)]
        self._buffers = [table for table in counted if table]
        self._n_buffers = list(map(len, self._buffers))
        self._without = [table for table in counted if not table]
        nothing = [
            (table, name)
            for module in self.modules
            for table in (parameters_of(module), buffers_of(module))
            if isinstance(table, dict)
            for name, value in table.items()
            if value is None
        ]
        self._nothing_in = [table for table, _ in nothing]
        self._nothing_at = [name for _, name in nothing]

    def is_refilled(self) -> bool:
        """Whether modules were taken out or replaced, or put in beside others."""
        return list(chain.from_iterable(map(_values, self._filled))) != self._inside

    def is_other(self) -> bool:
        """Whether modules or buffers were put in, taken out or replaced since noted."""
        return (
            self.is_refilled()
            or any(self._empty)
            or any(self._without)
            or list(map(len, self._buffers)) != self._n_buffers
            or list(map(_get, self._nothing_in, self._nothing_at)).count(None)
            != len(self._nothing_at)
        )

    def renew(self) -> bool:
        """Note the modules anew, if they are others; return whether they are."""
        if not self.is_other():
            return False
        self._note()
        return True


@contextlib.contextmanager
def filled_as(tables: Tables) -> Iterator[None]:
    """Give tables for a while another content.

    Args:
        tables: Each with the content.
    """
    before = [(table, dict(table)) for table, _ in tables]
    try:
        for table, content in tables:
            _fill(table, content)
        yield
    finally:
        for table, content in before:
            _fill(table, content)


def _fill(table: dict[str, Any], content: dict[str, Any]) -> None:
    table.clear()
    table.update(content)
