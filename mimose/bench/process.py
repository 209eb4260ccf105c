"""A strategy in a process of its own, seen from outside."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol, TypeVar

from mimose.bench.machine import worker_environment
from mimose.bench.rows import StepRow
from mimose.bench.tasks import Task, task_to_json


class StrategyFailedError(RuntimeError):
    """A strategy could not go on: memory ran out, or its process died."""


class Runner(Protocol):
    """Who trains: a process of its own, or in tests this one."""

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each batch's longest member; waits until training can begin."""
        ...

    def advance(self, index: int, *, evaluates: bool = False) -> StepRow:
        """Train on one batch and wait for its row."""
        ...

    def close(self) -> None:
        """End it, whatever it is doing. Harmless twice."""
        ...


_Child = TypeVar("_Child", bound="Child")


class Child:
    """A process that answers each line of JSON with another.

    It has a session of its own, so that Ctrl-C in a terminal reaches only whoever
    waits for it. A context manager; leaving it ends the process.

    Args:
        name: For errors.
        module: What to run.
        threads: For torch's operators.
        first: The first message; its answer is asked for by `receive`.
    """

    def __init__(
        self, name: str, module: str, threads: int, first: Mapping[str, Any]
    ) -> None:
        self._name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=worker_environment(threads),
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self.send(first)

    def ask(self, message: Any) -> dict[str, Any]:
        """Send a message, and wait for its answer."""
        self.send(message)
        return self.receive()

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            StrategyFailedError: The process has died.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def receive(self) -> dict[str, Any]:
        """Wait for an answer.

        Raises:
            StrategyFailedError: It could not go on, or has died.
        """
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise StrategyFailedError(message["error"])
        return message

    def close(self) -> None:
        """End the process at once, in the middle of a step too."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):  # what it did not read
                    stream.close()

    def __enter__(self: _Child) -> _Child:
        """Return the process."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """End the process."""
        self.close()

    def _death(self) -> StrategyFailedError:
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        msg = f"the process of {self._name!r} ended with code {code}: {''.join(last)}"
        return StrategyFailedError(msg)


class StrategyProcess(Child):
    """A process that trains one strategy of the demonstration.

    Args:
        task: What to train.
    """

    def __init__(self, task: Task) -> None:
        self._lengths: tuple[int, ...] | None = None
        first = task_to_json(task)
        super().__init__(task.strategy, "mimose.bench.worker", task.threads, first)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each batch's longest member.

        Raises:
            StrategyFailedError: The process could not set training up.
        """
        if self._lengths is None:
            self._lengths = tuple(self.receive()["lengths"])
        return self._lengths

    def advance(self, index: int, *, evaluates: bool = False) -> StepRow:
        """Train on one batch and wait for its row.

        Raises:
            StrategyFailedError: Memory ran out, or the process died.
        """
        _ = self.lengths  # its answer comes first
        return StepRow(**self.ask({"batch": index, "evaluates": evaluates})["row"])
