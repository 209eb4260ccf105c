"""What a user is told once, as a warning, of how planning goes."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)

_PATIENCE = 50
"""Steps in a row that were measured and not planned; then that is worth a warning."""


class Notices:
    """Says each thing once."""

    def __init__(self) -> None:
        self._n_doubted = 0
        self._has_warned = False

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
