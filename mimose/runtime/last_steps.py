"""The last steps: what questions about other shapes, and the next step, start from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeAlias

from mimose.arguments import check_shape
from mimose.cost.pattern import Pattern
from mimose.exceptions import MimoseError
from mimose.inputs.size_table import SizeTable
from mimose.policy.windows import Windows
from mimose.types import Context, StepInput

_Named: TypeAlias = tuple[StepInput, SizeTable]
"""A step, with the names of its sizes."""


class LastSteps:
    """The last steps of a session, or of the state that it has loaded.

    Args:
        tables: The names of sizes by structure.
        windows: Which forwards make up a step.

    Attributes:
        tables: The argument.
        last: The last planned step; None before the first.
        typical: The last planned step whose masks hide something, if there is one. If
            no mask hides anything, layers run without masks; such batches are rare.
        accumulate: Whether one of the last two forwards found gradients there.
        listener: Called with the first forward of each window, before it runs.
        start_bytes: What was held when the last step without gradients began; before
            the first, what a loaded state says.
    """

    def __init__(self, tables: Mapping[str, SizeTable], windows: Windows) -> None:
        self.tables, self._windows = tables, windows
        self.last: _Named | None = None
        self.typical: _Named | None = None
        self.accumulate = False
        self.start_bytes = 0
        self._found_gradients = False
        self.listener: Callable[[StepInput], None] | None = None
        self._hid: tuple[str, str] | None = None
        """The structure and mode of the typical step, if its masks hide something."""

    def planned(
        self, step_input: StepInput, table: SizeTable, mode: str, *, hides: bool
    ) -> None:
        """Record a step that was planned.

        Args:
            step_input: The step.
            table: The names of its sizes.
            mode: What the model trains.
            hides: Whether a mask hides something.
        """
        self.last, kind = (step_input, table), (step_input.structure, mode)
        if hides or self._hid != kind:
            self.typical = self.last
            self._hid = kind if hides else None

    def ran_without_plan(self, step_input: StepInput, table: SizeTable) -> None:
        """Record a step of a baseline, which has no plan."""
        self.last = step_input, table

    def listen(self, listener: Callable[[StepInput], None]) -> None:
        """Call a function with the first forward of each window, before it runs."""
        self.listener = listener

    def began(self, step_input: StepInput, start_bytes: float) -> None:
        """Record a forward that begins.

        Args:
            step_input: Its input.
            start_bytes: What was held when its window began.
        """
        has_gradients = step_input.has_gradients
        self.accumulate = self._found_gradients or has_gradients
        self._found_gradients = has_gradients
        if not has_gradients:
            self.start_bytes = int(start_bytes)

    def load(
        self, patterns: dict[Context, Pattern], start_bytes: int, *, is_first: bool
    ) -> None:
        """Start from the steps of a loaded state.

        Args:
            patterns: Its patterns by context, the last used one last.
            start_bytes: What was held when its last step without gradients began.
            is_first: Whether this session has run no step.
        """
        self.start_bytes = start_bytes
        if is_first:
            self.last = next(self._loaded(patterns), None)

    def _loaded(self, patterns: dict[Context, Pattern]) -> Iterator[_Named]:
        for context, pattern in reversed(list(patterns.items())):
            table = self.tables.get(pattern.structure)
            if table is not None and pattern.rows:
                sizes = pattern.rows[-1].root
                yield StepInput(context, sizes, False, pattern.structure), table

    def asked(self, shape: Mapping[str, int] | None) -> _Named:
        """Return the step of a shape, and the names of its sizes.

        Everything that the shape does not name is as in the last step (in the last one
        whose mask hides something, if any does). Before the first step it is as in the
        last step of the loaded state.

        Args:
            shape: Sizes by name; None for the sizes of the last step.

        Raises:
            MimoseError: The model has no size of such a name; or nothing is known yet.
            TypeError: `shape` is not a mapping.
        """
        if shape is not None:
            check_shape("shape", shape)
        last = self.last if shape is None else self.typical or self.last
        if last is None:
            msg = (
                "no step was run yet and no state was loaded, so the sizes of the "
                "model's inputs are not known: train a step first"
            )
            raise MimoseError(msg)
        step_input, table = last
        if shape is None:
            return step_input, table
        first = step_input
        if "+" in step_input.context:  # several forwards: Note: [Windows] of the policy
            context, _, _ = step_input.context.partition("+")
            structure, _, _ = step_input.structure.partition("+")
            table = self.tables[structure]
            sizes = step_input.sizes[: len(table.names)]
            first = StepInput(context, sizes, step_input.has_gradients, structure)
        first = first._replace(sizes=table.fill(shape, first.sizes))
        whole = self._windows.expected(first)
        if isinstance(whole, str):
            msg = (
                f"mimose makes no plan for such steps, so it cannot predict them: "
                f"{whole}"
            )
            raise MimoseError(msg)
        return whole, table
