"""Work in a copy of this process: what it leaves behind meets nothing else."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any


class DiedError(RuntimeError):
    """The copy ended without an answer."""


def apart(work: Callable[[], Any]) -> Any:
    """Fork, work, and return what comes of it; anything that can be pickled.

    No backward may have run on an accelerator before, since its threads are not copied.

    Raises:
        DiedError: The copy ended without an answer.
    """
    context = multiprocessing.get_context("fork")
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(send, work))
    process.start()
    send.close()
    try:
        answer = receive.recv()
    except EOFError:
        process.join()
        msg = f"the process ended with {process.exitcode}"
        raise DiedError(msg) from None
    process.join()
    return answer


def _send(send: Connection, work: Callable[[], Any]) -> None:
    send.send(work())
