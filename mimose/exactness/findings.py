"""What was found out about layers: which have to be kept, which are not exact."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mimose.cost.learner import Learner

if TYPE_CHECKING:
    from mimose.exactness.layer import Layer
    from mimose.exactness.side_effects import Given

_log = logging.getLogger(__name__)


class Findings:
    """Records each layer that cannot be recomputed, or not to the bit.

    Args:
        names: The layers' names, in their order.
        learner: Learns which of them are always kept.

    Attributes:
        kept: By name, why a layer cannot be recomputed.
        inexact: By name, why a layer gives other bits when it is recomputed.
        families: By layer, a key that those have in common that are built alike.
        version: Changes whenever a layer's calls have shown something, or are to.
        read: Of the running step's recomputed calls, what they were given.
        impure: Layers found out in the running step to be such as may not run again.
        on_compiled: Called where a layer turns out to run compiled code.
    """

    def __init__(self, names: Sequence[str], learner: Learner) -> None:
        self._names = names
        self._learner = learner
        self.kept: dict[str, str] = {}
        self.inexact: dict[str, str] = {}
        self.families: Sequence[str] = ()
        self.version = 0
        self.read: list[tuple[Layer, Given]] = []
        self.impure: dict[Layer, str] = {}
        self.on_compiled: Callable[[], object] = lambda: None

    def keep(self, layer: Layer, why: str) -> None:
        """Never recompute a layer again."""
        if layer.name in self.kept:
            return
        self._keep_only(layer.index)
        self.kept[layer.name] = why
        self.version += 1
        _log.warning("mimose: %s is kept from now on: %s", layer.name, why)

    def keep_alike(self, layer: Layer, why: str) -> None:
        """Never recompute a layer again, nor those that are built as it is."""
        self.keep(layer, why)
        if not self.families:
            return
        family = self.families[layer.index]
        for index, name in enumerate(self._names):
            if self.families[index] == family and name not in self.kept:
                self._keep_only(index)
                self.kept[name] = f"{layer.name}, which is built alike, is kept: {why}"

    def exclude(self, layer: Layer, action: str, why: str) -> None:
        """Never choose an action for a layer again."""
        model = self._learner.model
        allowed = [name for name in model.allowed(layer.index) if name != action]
        self._learner.restrict(layer.index, allowed)
        _log.warning("mimose: %s is not run under %s: %s", layer.name, action, why)

    def _keep_only(self, index: int) -> None:
        self._learner.restrict(index, [self._learner.model.menu.first])

    def note_change(self) -> None:
        """Record that a layer's calls have shown something, or are to show it."""
        self.version += 1

    def note_inexact(self, layer: Layer, why: str) -> None:
        """Record a layer that is recomputed, but not to the bit."""
        if not self.inexact:
            _log.warning(
                "mimose: %s is recomputed, but not exactly: %s; others may follow (see "
                "the session's report)",
                layer.name,
                why,
            )
        self.inexact.setdefault(layer.name, why)

    def state_dict(self) -> dict[str, Any]:
        """Return which layers are kept, and why, ready for JSON."""
        return dict(self.kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what another session had to keep, besides what this one has to.

        Args:
            state: What ``state_dict`` returned.
        """
        saved = {str(name): str(why) for name, why in state.items()}
        self.kept = {**saved, **self.kept}
        self.version += 1
        for index, name in enumerate(self._names):
            if name in self.kept:
                self._keep_only(index)
