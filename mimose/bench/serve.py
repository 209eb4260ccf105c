"""The child process: see `mimose.bench.child`.

``python -m mimose.bench.serve MODULE`` reads a task as a line of JSON from standard
input, runs ``work(task)`` of that module, and writes each yielded value as a line of
JSON. A `work` that needs more messages reads them from `messages`. The answer
``{"failed": "..."}`` means a failure, such as memory that ran out, and is the last one.
If its parent ends, the process ends too, even in a step.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any, TextIO

from mimose.bench import device
from mimose.bench.child import RunFailedError
from mimose.exceptions import first_line
from mimose.memory.out_of_memory import is_out_of_memory

_LOOK_SECONDS = 0.5


def main() -> None:
    """Run the task to its end."""
    end_with_parent()
    answers = _take_standard_output()
    task = json.loads(sys.stdin.readline())
    module = importlib.import_module(sys.argv[1])
    with answers:
        try:
            device.prepare(task)
            for found in module.work(task):
                _answer(answers, found)
        except Exception as error:
            if not (isinstance(error, RunFailedError) or is_out_of_memory(error)):
                raise
            _answer(answers, {"failed": first_line(error)})


def messages() -> Iterator[Any]:
    """Yield messages to this process, until its input ends."""
    return map(json.loads, sys.stdin)


def end_with_parent() -> None:
    """End this process soon after its parent, because a killed parent cannot do it."""
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


def _answer(answers: TextIO, message: Any) -> None:
    """Write one answer at once."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def _take_standard_output() -> TextIO:
    """Return the output for answers; what libraries print goes to standard error."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


if __name__ == "__main__":
    main()
