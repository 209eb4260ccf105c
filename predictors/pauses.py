"""Where long work in Python lets other threads run.

A thread that runs Python code for long holds the interpreter's lock, and another one,
which is back from a short operator, waits for it up to 5 ms. So fits and searches say
at every turn that here they may pause. In a thread that asked for nothing that costs
some 50 ns. The planners have the same: the two folders know nothing of each other.
"""

import threading
from collections.abc import Callable


class _Asked(threading.local):
    pause: Callable[[], None] | None = None


_asked = _Asked()


def give_way() -> None:
    """Do what this thread has asked for, if it has."""
    pause = _asked.pause
    if pause is not None:
        pause()


def ask(pause: Callable[[], None] | None) -> Callable[[], None] | None:
    """Have a function called in this thread at every turn of long work.

    Args:
        pause: The function; None for none.

    Returns:
        What was asked for before.
    """
    before, _asked.pause = _asked.pause, pause
    return before
