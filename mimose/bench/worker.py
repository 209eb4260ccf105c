"""The process that trains one strategy: commands come in, rows go out.

``python -m mimose.bench.worker`` reads JSON lines from standard input and answers
each with one on standard output. The first is a task; the answer names the lengths
of the batches. Each further one, ``{"batch": 3, "evaluates": false}``, is a step; the
answer is its row. ``{"error": "..."}`` tells that memory ran out, and is the last
answer. The process ends with its input, and in the middle of a step with whoever
started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from typing import Any, TextIO

from mimose.bench.strategies import Training
from mimose.bench.tasks import task_from_json
from mimose.exceptions import first_line
from mimose.measure.out_of_memory import is_out_of_memory

_LOOK_SECONDS = 0.5


def main() -> None:
    """Serve until the input ends."""
    end_with_parent()
    with take_standard_output() as answers, answering_errors(answers):
        _serve(sys.stdin, answers)


@contextlib.contextmanager
def answering_errors(answers: TextIO, *kinds: type[Exception]) -> Iterator[None]:
    """Answer where memory runs out, or an error of these kinds is raised."""
    try:
        yield
    except Exception as error:
        if not (isinstance(error, kinds) or is_out_of_memory(error)):
            raise
        answer(answers, {"error": first_line(error)})


def _serve(commands: TextIO, answers: TextIO) -> None:
    training = Training(task_from_json(json.loads(commands.readline())))
    answer(answers, {"lengths": training.lengths})
    for line in commands:
        command = json.loads(line)
        row = training.advance(command["batch"], evaluates=command["evaluates"])
        answer(answers, {"row": asdict(row)})
    training.close()


def answer(answers: TextIO, message: Mapping[str, Any]) -> None:
    """Write one answer at once."""
    answers.write(json.dumps(message) + "\n")
    answers.flush()


def end_with_parent() -> None:
    """End this process soon after the one that started it, whatever it is doing.

    A starter that is killed cannot tell its children.
    """
    parent = os.getppid()

    def wait() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK_SECONDS)
        os._exit(1)

    threading.Thread(target=wait, name="end with parent", daemon=True).start()


def take_standard_output() -> TextIO:
    """Return the output for answers; whatever a library prints goes to the errors."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return answers


if __name__ == "__main__":
    main()
