"""Starts a child process, so that what it leaves behind affects no other work.

It runs `mimose.bench.serve`, which calls ``work(task)`` of a module and sends back what
that yields.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from mimose.bench.device import environment_of
from mimose.bench.machine import worker_environment


class RunFailedError(RuntimeError):
    """Something cannot run to its end; the message's first line says why.

    A child sends it as an answer. Here it means that memory ran out or a child died.
    """


class Child:
    """A process that answers a task, and messages, with lines of JSON.

    It has a separate session, so that Ctrl-C in a terminal reaches only its parent.

    Args:
        name: Its name in errors.
        module: The module whose ``work`` is called.
        task: The argument of ``work``: any JSON values.
        threads: Threads of torch's operators.
        environment: Additional environment variables.
        limit_seconds: The longest time that it runs; None for no limit.
    """

    def __init__(
        self,
        name: str,
        module: str,
        task: Mapping[str, Any],
        threads: int,
        *,
        environment: Mapping[str, str] | None = None,
        limit_seconds: float | None = None,
    ) -> None:
        self._name = name
        self._limit_seconds = limit_seconds
        self._is_late = False
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close)
        own = {**environment_of(task), **(environment or {})}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mimose.bench.serve", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            env={**worker_environment(threads), **own},
            text=True,
            encoding="utf-8",
            start_new_session=True,
        )
        self._timer = threading.Timer(limit_seconds or 0.0, self._end_late)
        if limit_seconds is not None:
            self._timer.start()
        self.send(task)

    def ask(self, message: Any) -> dict[str, Any]:
        """Send a message, and wait for its answer.

        Raises:
            RunFailedError: The process has failed or died.
        """
        self.send(message)
        return self.receive()

    def send(self, message: Any) -> None:
        """Send a message.

        Raises:
            RunFailedError: The process has died.
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
            RunFailedError: The process has failed or ended.
        """
        found = self._next()
        if found is None:
            raise self._death()
        return found

    def answers(self) -> Iterator[dict[str, Any]]:
        """Yield its answers until it ends.

        Raises:
            RunFailedError: It ended with an error, or took too long.
        """
        while (found := self._next()) is not None:
            yield found
        if self._process.wait() != 0:
            raise self._death()

    def close(self) -> None:
        """End the process at once, even in a step. A second call does nothing."""
        self._timer.cancel()
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None and not stream.closed:
                with contextlib.suppress(BrokenPipeError):  # what it did not read
                    stream.close()

    def _next(self) -> dict[str, Any] | None:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            return None
        message: dict[str, Any] = json.loads(line)
        if "failed" in message:
            raise RunFailedError(message["failed"])
        return message

    def _end_late(self) -> None:
        self._is_late = True
        self._process.kill()

    def _death(self) -> RunFailedError:
        """Return an error with how it ended, and everything that it wrote."""
        code = self._process.wait()
        if self._is_late:
            return RunFailedError(
                f"{self._name} took more than {self._limit_seconds:g} s"
            )
        self._errors.seek(0)
        text = self._errors.read().decode(errors="replace").strip()
        last = "".join(text.splitlines()[-1:])
        msg = f"the process of {self._name!r} ended with code {code}: {last}\n{text}"
        return RunFailedError(msg.rstrip())


def run_child(
    module: str, task: Mapping[str, Any], threads: int, **options: Any
) -> Iterator[dict[str, Any]]:
    """Run a module's ``work`` in a new process, and yield what it yields.

    The arguments are those of `Child`.

    Raises:
        RunFailedError: It ended with an error, or took too long, after all its earlier
            answers were yielded.
    """
    name = module.rpartition(".")[2]
    with contextlib.closing(Child(name, module, task, threads, **options)) as child:
        yield from child.answers()
