"""What a user is told once, as a warning, of how planning goes."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from mimose.inputs.size_table import Table

_log = logging.getLogger(__name__)

_PATIENCE = 50
"""Steps in a row that were measured and not planned; then that is worth a warning."""


class Notices:
    """Says each thing once.

    Args:
        round_to: How sizes are rounded up to buckets, by name or all alike.
    """

    def __init__(self, round_to: int | Mapping[str, int]) -> None:
        self._round_to = round_to
        self._n_doubted = 0
        self._has_warned = False
        self._knows_names = isinstance(round_to, int)

    def doubted(self, doubt: str) -> None:
        """Count steps without a plan, and warn once where there is no end of them."""
        self._n_doubted = self._n_doubted + 1 if doubt else 0
        if self._n_doubted < _PATIENCE or self._has_warned:
            return
        self._has_warned = True
        _log.warning(
            "mimose: the last %d steps were all measured, with everything recomputed, "
            "and none was planned; the last reason: %s. Where inputs differ in more "
            "than their sizes (texts, identifiers, numbers of tensors), keep that out "
            "of the model's arguments. Where nothing helps, planner='full' recomputes "
            "everything without measuring.",
            self._n_doubted,
            doubt,
        )

    def check_names(self, table: Table) -> None:
        """Warn once if `round_to` speaks of sizes that the model does not have."""
        if self._knows_names or isinstance(self._round_to, int):
            return
        self._knows_names = True
        unknown = [name for name in self._round_to if not table.knows(name)]
        if unknown:
            _log.warning(
                "mimose: round_to: no size is called %s, so that rounds nothing; the "
                "sizes are %s",
                ", ".join(map(repr, unknown)),
                ", ".join(table.spoken_names()),
            )
