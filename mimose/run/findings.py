"""What was found out about units: which have to be kept, which are not exact."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from mimose.learn.learner import Learner
from mimose.run.unit import Unit
from mimose.types import KEEP

_log = logging.getLogger(__name__)


class Findings:
    """Takes note of each unit that cannot be recomputed, or not to the bit.

    Args:
        units: The units.
        learner: Learns which of them are always kept.

    Attributes:
        kept: By name, why a unit cannot be recomputed.
        inexact: By name, why a unit gives other bits when it is recomputed.
    """

    def __init__(self, units: Sequence[Unit], learner: Learner) -> None:
        self._units = units
        self._learner = learner
        self.kept: dict[str, str] = {}
        self.inexact: dict[str, str] = {}

    def keep(self, unit: Unit, why: str) -> None:
        """Never recompute a unit again."""
        if unit.is_kept:
            return
        self._keep(unit)
        self.kept[unit.name] = why
        _log.warning("mimose: %s is kept from now on: %s", unit.name, why)

    def _keep(self, unit: Unit) -> None:
        unit.is_kept = True
        self._learner.restrict(unit.index, [KEEP])

    def note_inexact(self, unit: Unit, why: str) -> None:
        """Take note of a unit that is recomputed, but not to the bit."""
        if not self.inexact:
            _log.warning(
                "mimose: %s is recomputed, but not exactly: %s; others may follow (see "
                "the session's report)",
                unit.name,
                why,
            )
        self.inexact.setdefault(unit.name, why)

    def state_dict(self) -> dict[str, Any]:
        """Return which units are kept, and why, ready for JSON."""
        return dict(self.kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Keep what another session had to keep, besides what this one has to.

        Args:
            state: What ``state_dict`` returned.
        """
        saved = {str(name): str(why) for name, why in state.items()}
        self.kept = {**saved, **self.kept}
        for unit in self._units:
            unit.is_kept = unit.name in self.kept
            if unit.is_kept:
                self._keep(unit)
