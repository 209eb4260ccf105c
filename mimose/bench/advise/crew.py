"""The processes in which steps are timed.

There are two: in one a session reads memory, and on a CPU the heap is then made to give
it back, which takes time; in the other nothing does, as in training without one. One of
each is enough: sizes that are timed are known to fit, and each process on an
accelerator holds memory of its own there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mimose.bench.advise.methods import METHODS
from mimose.bench.child import Child, RunFailedError


class Crew:
    """Both processes; one that dies is started anew.

    Args:
        start: Starts a process, given its name.

    Raises:
        RunFailedError: One could not begin.
    """

    def __init__(self, start: Callable[[str], Child]) -> None:
        self._start = start
        self._children = {has_session: start(name) for has_session, name in _NAMES}
        try:
            for child in self._children.values():  # they start side by side
                child.receive()
        except BaseException:
            self.close()
            raise

    def ask(self, method: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Let a method take a turn.

        Raises:
            RunFailedError: It could not, or its process has died.
        """
        has_session = METHODS[method].options is not None
        try:
            return self._children[has_session].ask({"method": method, **arguments})
        except RunFailedError:
            self._children[has_session].close()
            self._children[has_session] = self._start(dict(_NAMES)[has_session])
            self._children[has_session].receive()
            raise

    def close(self) -> None:
        """End both. Harmless twice."""
        for child in self._children.values():
            child.close()


_NAMES = ((False, "turns without sessions"), (True, "turns with sessions"))
