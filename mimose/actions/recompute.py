"""Running a call's forward again in backward, in place of holding what it saves."""

from __future__ import annotations

from typing import Any

from mimose.actions.base import Probe, UnitCall
from mimose.actions.checkpointing import recompute
from mimose.actions.host import AwayInput
from mimose.actions.region import Inputs, Region, has_outer_modes
from mimose.exactness.changes import SavedBuffers
from mimose.exactness.comparison import Comparison
from mimose.exactness.first_call import FirstCall
from mimose.exactness.input_watch import Marks, is_edited, marks
from mimose.exactness.named_errors import is_inside_checkpoint
from mimose.exactness.unit import Unit
from mimose.inputs.compiled import SCRIPTED, code_in_graph
from mimose.memory.marks import Counted
from mimose.planners.actions import RECOMPUTE
from mimose.torch_private import next_sequence_number

_UNSAVABLE = "Inference tensors cannot be saved for backward"
"""What torch says before the forward runs, for `checkpoint` saves what it is given."""
_INFERENCE = "a tensor that it is handed was made under torch.inference_mode()"


class Recompute:
    """Holds a call's inputs and outputs, and nothing of what is made in between."""

    spec = RECOMPUTE

    def refuses(self, unit: Unit) -> str:
        """Return why a call cannot run again, where that shows before it runs."""
        if is_inside_checkpoint():
            return "the model itself checkpoints it"
        if unit.guard.uncounted:
            return (
                f"it holds {unit.guard.uncounted!r}, made under "
                f"torch.inference_mode(), whose changes nobody counts"
            )
        return ""

    def run(self, call: UnitCall, probe: Probe | None) -> Any:
        """Run the forward; a first call tells what it changes."""
        unit, on_recompute = call.unit, call.on_recompute
        unit.is_proven = unit.is_proven or unit.is_compared
        away = self._send_away(call, probe)
        is_short = probe is None and not call.is_whole
        if unit.is_settled and is_short and on_recompute is None:
            inputs = None
            if not has_outer_modes():
                inputs = Inputs.of(call.args, call.kwargs, away)
            if inputs is not None:
                region = Region(unit, inputs)
                output = region.run(call.args, call.kwargs)
                call.notes.note_read(unit, inputs.noted)
                return output
        if probe is not None:
            on_recompute = probe.trace.recomputed(probe.index, probe.gauge)
        noted = marks(call.args, call.kwargs)
        first, buffers, comparison = None, None, None
        if not unit.is_compared:
            comparison = Comparison(unit, call.notes.answers)
            on_recompute = comparison.compared(on_recompute)
        if not unit.is_known:
            first = FirstCall(unit.module)
            buffers = first.buffers
            unit.guard.begin_anew()
        elif unit.buffers:
            buffers = SavedBuffers(unit.buffers)
        is_whole = not is_short or comparison is not None or unit.is_compiled
        began = next_sequence_number()
        try:
            output = recompute(
                unit.forward,
                call.args,
                call.kwargs,
                buffers=buffers,
                on_recompute=on_recompute,
                guard=unit.guard,
                devices=unit.devices,
                handed=unit.handed,
                early_stop=not is_whole,
                branches=unit.branches,
                away=away,
            )
        except RuntimeError as error:
            if _UNSAVABLE not in str(error):
                raise
            _note(call, noted, _INFERENCE)
            return call.forward()
        why = "" if first is None else unit.learn(first, call.notes.answers)
        if comparison is not None and not unit.is_compiled:
            is_compiled, is_scripted = code_in_graph(output, began)
            if is_compiled:
                call.notes.note_compiled(call)
            if is_scripted:
                why = SCRIPTED
        if comparison is not None and is_edited(noted):
            why = "it edits its own input in place"
        _note(call, noted, why)
        if comparison is not None:
            unit.branches.note(output, began)
            unit.note_compared(is_doubted=unit.is_doubted)
            if not unit.guard.changes_weights:
                comparison.take(output)
        return output

    def _send_away(self, call: UnitCall, probe: Probe | None) -> AwayInput | None:
        """Return what holds an input elsewhere until it runs again; None: nothing."""
        del call, probe
        return None

    def held_bytes(self, counted: Counted) -> float | None:
        """Return what of the call is handed on: its outputs."""
        return counted.output_bytes


def _note(call: UnitCall, noted: Marks, why: str) -> None:
    """Take note of a call that will run again, or why it may not.

    That is no error before the forward has ended: other ranks may wait in it.
    """
    call.notes.note_read(call.unit, noted)
    if why:  # at once: whatever becomes of this forward, the next knows
        call.unit.keep(why)
        call.notes.note_impure(call.unit, why)
