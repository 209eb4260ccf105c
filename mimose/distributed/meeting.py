"""What a rank tells the others as it attaches, before they know of each other.

Note: [Meeting]
Ranks whose layers wait for each other make a group in which they agree, and a group
is made by all of its ranks or by none. Whether layers wait is found on each rank by
itself, and a rank may fail before it has looked. So each leaves a word at the store of
the default group, under the number of its call of `attach`: that it waits, that nothing
of its waits, or with what it has failed. Leaving one waits for nobody, so ranks that
plan freely go on at once, and may attach alone. Who waits goes on when all have left
the same word, and raises as soon as one has left another. Nobody hangs on a rank that
never comes: the limit is how long the group's collectives wait.

Which call of `attach` is which is told by counting, so ranks that are to agree attach
equally often. Sessions that never agree, or that agree in a group they are given, are
not counted.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from torch import distributed

from mimose.distributed.exchange import Exchange
from mimose.exceptions import MimoseError, OtherRankError, first_line
from mimose.torch_private import default_store, group_timeout

_log = logging.getLogger(__name__)

_numbers = itertools.count(1)
_WAITS, _FREE, _FAILED = "waits", "free", "failed"
_LIMIT = timedelta(minutes=30)
"""Where no group tells how long its collectives wait."""
_SHORTEST_NAP, _LONGEST_NAP = 0.005, 0.5
"""Seconds between two looks at the store."""
_SECONDS_TO_TELL = 60.0
"""After which the log says for whom this rank waits."""
_ADVICE = (
    "Attach on all ranks, equally often and to the same model; where ranks run "
    "different parts of a model, give attach(agree=...) the group of those that run "
    "the same. A session on some ranks alone is given agree=None"
)


def n_ranks() -> int:
    """Return how many ranks there are, as far as this process knows."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return 1
    return int(distributed.get_world_size())


class Meeting:
    """A call of `attach` among those of the other ranks: see Note: [Meeting].

    Args:
        agree: As `mimose.attach` is given it.

    Attributes:
        agree: The same.
        exchange: With the ranks of the group that was given, if one was.
    """

    def __init__(self, agree: Any = "auto") -> None:
        self.agree = agree
        self.exchange: Exchange | None = None
        self._store: Any = None
        if n_ranks() < 2 or agree is None:
            return
        if agree == "auto":
            self._store = default_store()
            self._place = f"mimose/attach/{next(_numbers)}"
        elif distributed.get_world_size(agree) > 1:
            self.exchange = Exchange(agree)

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the others of an error, as long as they have heard nothing else."""
        exchange = self.exchange
        try:
            with contextlib.nullcontext() if exchange is None else exchange.telling():
                yield
        except Exception as error:
            self._leave(_FAILED, type(error).__name__, first_line(error))
            raise

    def pass_by(self) -> None:
        """Tell those who may wait that nothing here does."""
        self._leave(_FREE)

    def wait_for_all(self, why: str) -> None:
        """Wait until all ranks have said that they wait, too.

        Args:
            why: What waits here, in words.

        Raises:
            OtherRankError: Another rank could not attach.
            MimoseError: Another has nothing that waits, or has not come in time.
        """
        store = self._store
        if store is None:
            return
        self._leave(_WAITS)
        began, nap, is_told = time.monotonic(), _SHORTEST_NAP, False
        limit = (group_timeout(distributed.group.WORLD) or _LIMIT).total_seconds()
        try:
            while store.add(f"{self._place}/n", 0) < n_ranks():
                self._refuse_other_word(store, why)
                waited = time.monotonic() - began
                if waited > limit:
                    error = MimoseError(self._missing(store, why, limit))
                    self._correct(store, _FAILED, "MimoseError", str(error))
                    raise error
                if waited > _SECONDS_TO_TELL and not is_told:
                    is_told = True
                    _log.warning("mimose: %s", self._missing(store, why, waited))
                time.sleep(nap)
                nap = min(2 * nap, _LONGEST_NAP)
            self._refuse_other_word(store, why)
        except MimoseError:
            raise
        except RuntimeError as error:
            msg = (
                f"the ranks could not agree as they attached, as another one is gone: "
                f"{first_line(error)}. See that rank's own error"
            )
            raise MimoseError(msg) from error

    def _leave(self, *words: str) -> None:
        """Leave a word at the store: one a call of `attach`."""
        store, self._store = self._store, None
        if store is None:
            return
        with contextlib.suppress(RuntimeError):  # whoever keeps it is gone
            if words[0] != _WAITS:
                self._correct(store, *words)
            store.set(f"{self._place}/{distributed.get_rank()}", "")
            store.add(f"{self._place}/n", 1)

    def _correct(self, store: Any, *words: str) -> None:
        """Say that this rank does not wait."""
        store.set(
            f"{self._place}/other", "\n".join((str(distributed.get_rank()), *words))
        )

    def _refuse_other_word(self, store: Any, why: str) -> None:
        """Raise where a rank has left another word than that it waits."""
        if not store.check([f"{self._place}/other"]):
            return
        text = store.get(f"{self._place}/other").decode()
        rank, word, *told = text.split("\n", 3)
        if word == _FAILED:
            raise OtherRankError(int(rank), *told)
        msg = (
            f"{why}, but nothing that rank {rank} has attached to waits for others, so "
            f"they cannot agree on what is recomputed. {_ADVICE}"
        )
        raise MimoseError(msg)

    def _missing(self, store: Any, why: str, seconds: float) -> str:
        ranks = range(n_ranks())
        missing = [r for r in ranks if not store.check([f"{self._place}/{r}"])]
        return (
            f"{why}, and after {seconds:.0f} s the ranks {missing} have not attached, "
            f"with which it has to be agreed on what is recomputed. {_ADVICE}"
        )
