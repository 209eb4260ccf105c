"""What the window that a forward is part of is expected to be: see Note: [Windows]."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from mimose.cost.windows import MOST_FORWARDS, Ending, Part, Windows, joined
from mimose.inputs.describe import Describer
from mimose.inputs.sizes import SizeTable, Table, WindowTable
from mimose.runtime.step import OTHERS, Window
from mimose.types import StepInput

_MOST = 0.5
"""Of sizes seen, so many are no larger than likely ones."""
_TOO_MANY = f"more than {MOST_FORWARDS} forwards run before one backward"


_SEVERAL = "several backwards go through one forward"


class Likely(NamedTuple):
    """A window, whose sizes to come follow no rule."""

    likely: StepInput
    """With those as large as most seen."""
    smallest: StepInput
    """With the smallest seen."""


class Expected(NamedTuple):
    """A window, with the forwards that are still to come."""

    whole: StepInput
    """With the largest seen, where sizes follow no rule."""
    table: Table
    """Names its sizes."""
    n_backwards: int = 1
    sizes: Likely | None = None
    """The same with other sizes to come; None where all follow a rule."""


class Expectations:
    """Completes windows by what came before.

    Args:
        windows: What came before.
        describer: Knows the names of sizes.
    """

    def __init__(self, windows: Windows, describer: Describer) -> None:
        self._windows = windows
        self._describer = describer

    def of(self, window: Window, facts: StepInput, table: SizeTable) -> Expected | str:
        """Return what a window is expected to be, or why it cannot be planned.

        Args:
            window: With the forwards so far.
            facts: Of the forward that begins.
            table: Names its sizes.
        """
        if window.reason:
            return window.reason
        parts = [*window.parts, facts]
        if len(parts) == 1 and not self._windows.are_told:
            return Expected(facts, table)
        ending = self._windows.ending(parts)
        if ending.n_backwards > 1:
            return _SEVERAL
        tables = self._tables([*parts, *ending.parts])
        if tables is None:
            ending, tables = Ending((), 1), self._tables(parts)
        if tables is None or len(tables) > MOST_FORWARDS:
            return _TOO_MANY
        to_come, is_sure = self._windows.to_come(parts, ending)
        whole = joined([*parts, *to_come], ending.n_backwards)
        planned = window.planned
        if window.steps and (planned is None or planned.context != whole.context):
            return OTHERS
        named: Table = WindowTable(tables) if len(tables) > 1 else table
        sizes = None
        if not is_sure:
            likely, smallest = (
                self._windows.to_come(parts, ending, share=share)[0]
                for share in (_MOST, 0.0)
            )
            sizes = Likely(
                joined([*parts, *likely], ending.n_backwards),
                joined([*parts, *smallest], ending.n_backwards),
            )
        return Expected(whole, named, ending.n_backwards, sizes)

    def _tables(self, parts: Sequence[StepInput | Part]) -> list[SizeTable] | None:
        """Return the tables of forwards; None where one was never called so."""
        found = [self._describer.table(part.structure) for part in parts]
        tables = [table for table in found if table is not None]
        return tables if len(tables) == len(found) else None
