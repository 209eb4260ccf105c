"""The loaders of a Lightning Trainer, watched before their first batch is made.

Lightning asks for the training's loaders, makes what it needs of them and begins to
read them before it says that training starts. So where it asks is where they are
watched: loaders that are made anew in later epochs are seen there, too.
"""

from __future__ import annotations

import logging
from typing import Any

from mimose.inputs.collating import WatchedLoaders

_log = logging.getLogger(__name__)


class LoaderWatch:
    """Watches what a trainer trains on, until `remove`.

    Args:
        trainer: Whose `fit` is about to begin.
    """

    def __init__(self, trainer: Any) -> None:
        self.loaders = WatchedLoaders()
        self._source = getattr(trainer.fit_loop, "_data_source", None)
        if self._source is None:
            _log.warning(
                "mimose: this Lightning asks for its loaders in another way: plans are "
                "made as batches come"
            )
            return
        self._ask = self._source.dataloader
        self._source.dataloader = self._loader

    def _loader(self) -> Any:
        loader = self._ask()
        if self._source is not None:
            self.loaders.add(loader)
        return loader

    def remove(self) -> None:
        """Give trainer and loaders back as they were. Harmless twice."""
        source, self._source = self._source, None
        if source is not None and vars(source).get("dataloader") == self._loader:
            del source.dataloader  # else another callback's stands around it
        self.loaders.remove()
