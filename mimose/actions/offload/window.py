"""Which storages are on their way back before anybody asks for them.

Note: [One ahead]
Backwards ask for storages in the reverse order of their packing. So each storage knows
the one packed before it. When it is asked for, those before it are sent for, of its own
call and of the one before, as long as all that is on its way stays within the headroom
of the call that the storage is of: what the plan leaves free in every segment from the
backward in which it is sent for to its own. Without headroom each comes when it is
asked for. What nobody has asked for by the end of the backward goes again.
"""

from __future__ import annotations

import weakref
from typing import Protocol

from mimose.torch_private import NO_GRAPH_TASK, current_graph_task, queue_callback
from mimose.worker import lock


class Sendable(Protocol):
    """A storage on the host."""

    n_bytes: int
    """That it takes on the device."""
    call: int
    """Which call it is of."""
    headroom_bytes: float
    """That of its call."""

    @property
    def before(self) -> Sendable | None:
        """The one packed before it, if it lives."""
        ...

    @property
    def is_coming(self) -> bool:
        """Whether it is on its way, and nobody has asked for it yet."""
        ...

    def send_for(self) -> None:
        """Begin to bring it back, if it is not there."""
        ...

    def forget(self) -> None:
        """Let go of what is on its way."""
        ...


class Window:
    """Sends for storages ahead of their use: Note: [One ahead]."""

    def __init__(self) -> None:
        self._coming: list[weakref.ref[Sendable]] = []
        self._task = NO_GRAPH_TASK
        self._lock = lock()

    @property
    def coming_bytes(self) -> int:
        """What is on its way, or there, and was not asked for yet."""
        with self._lock:
            return sum(each.n_bytes for each in self._still())

    def asked_for(self, item: Sendable) -> None:
        """Send for what comes next, now that a storage was asked for."""
        task = current_graph_task()
        if task == NO_GRAPH_TASK:
            return  # somebody looks at it; no backward goes on from here
        with self._lock:
            if task != self._task:
                self._forget()  # of a backward that has failed
            before, on_the_way = item.before, self.coming_bytes
            while before is not None and before.call >= item.call - 1:
                if on_the_way + before.n_bytes > before.headroom_bytes:
                    return
                if task != self._task:
                    self._task = task
                    queue_callback(self._ended)
                before.send_for()
                if before.is_coming:
                    self._coming.append(weakref.ref(before))
                on_the_way = self.coming_bytes
                before = before.before

    def _ended(self) -> None:
        with self._lock:
            self._forget()

    def _forget(self) -> None:
        for each in self._still():
            each.forget()
        self._coming, self._task = [], NO_GRAPH_TASK

    def _still(self) -> list[Sendable]:
        found = {id(each): each for ref in self._coming if (each := ref()) is not None}
        return [each for each in found.values() if each.is_coming]
