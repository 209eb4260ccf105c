"""What a thread that plans and fits beside training does to stay out of its way.

Threads of Python take turns at the interpreter's lock. Whoever has it may keep it for
5 ms, which is the time of hundreds of small operators. So work beside training pauses
by itself, wherever it calls `give_way`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from mimose.planners import pauses as of_planners
from mimose.predictors import pauses as of_predictors
from mimose.predictors.pauses import give_way

__all__ = ["give_way", "giving_way"]


@contextmanager
def giving_way(pause: Callable[[], None]) -> Iterator[None]:
    """Have a function called, in this thread alone, wherever `give_way` is.

    Args:
        pause: Called at every turn of fits, problems and plans; most often it should
            do nothing, and sleep where its thread has run for long.
    """
    before = of_planners.ask(pause), of_predictors.ask(pause)
    try:
        yield
    finally:
        of_planners.ask(before[0])
        of_predictors.ask(before[1])
