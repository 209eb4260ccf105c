"""A strategy in a process of its own, seen from outside."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Protocol

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


class StrategyProcess:
    """A process that trains one strategy. A context manager; leaving it ends it.

    It has a session of its own, so that Ctrl-C in a terminal reaches only whoever
    waits for it.

    Args:
        task: What to train.
    """

    def __init__(self, task: Task) -> None:
        self._name = task.strategy
        self._lengths: tuple[int, ...] | None = None
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mimose.bench.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env=worker_environment(task.threads),
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self._send(task_to_json(task))

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each batch's longest member.

        Raises:
            StrategyFailedError: The process could not set training up.
        """
        if self._lengths is None:
            self._lengths = tuple(self._receive()["lengths"])
        return self._lengths

    def advance(self, index: int, *, evaluates: bool = False) -> StepRow:
        """Train on one batch and wait for its row.

        Raises:
            StrategyFailedError: Memory ran out, or the process died.
        """
        _ = self.lengths  # its answer comes first
        self._send({"batch": index, "evaluates": evaluates})
        return StepRow(**self._receive()["row"])

    def close(self) -> None:
        """End the process at once, in the middle of a step too."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None and not stream.closed:
                stream.close()

    def __enter__(self) -> StrategyProcess:
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

    def _send(self, message: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._death() from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise self._death()
        message: dict[str, Any] = json.loads(line)
        if "error" in message:
            raise StrategyFailedError(message["error"])
        return message

    def _death(self) -> StrategyFailedError:
        code = self._process.wait()
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().splitlines()[-1:]
        msg = f"the process of {self._name!r} ended with code {code}: {''.join(last)}"
        return StrategyFailedError(msg)
