"""A layer's first call in a mode: what it changes.

Note: [Until it is clear]
Whether a buffer on an accelerator has changed without a new version is clear when the
step has ended (see `mimose.exact.late_answers`). Until then it counts as one that
changes.
"""

from __future__ import annotations

from torch import nn

from mimose.exact.changes import (
    Before,
    Compared,
    all_slots,
    attribute_slots,
    running_statistics,
    tensor_attributes,
    union,
)


class FirstCall:
    """One call, from before the forward.

    Args:
        module: The layer.
    """

    def __init__(self, module: nn.Module) -> None:
        self._modules = tuple(module.modules())
        self._names = self._attributes()
        self._given = tensor_attributes(self._modules)
        self.before = Before(all_slots(self._modules))
        """To be put back around a recomputation."""

    def _attributes(self) -> set[object]:
        return {slot.key for slot in attribute_slots(self._modules)}

    def compare(self) -> Compared:
        """Return what later calls have to save; call it when the forward has run.

        See Note: [Until it is clear].
        """
        running = running_statistics(self._modules)
        found = self.before.compare(without=running)
        edited = {slot.key for slot in found.changed}
        given = [slot for slot in self._given if slot.edited().key not in edited]
        new = [s for s in attribute_slots(self._modules) if s.key not in self._names]
        slots = union(running, found.changed, given, new)
        self.before.narrow([*slots, *found.unclear])
        self.before.add_missing(new)
        return found._replace(changed=list(slots))
