"""Work in a process of its own: what a model leaves behind meets no other model.

``python -m mimose.bench.proofs.child NAME`` reads a task as JSON from standard input,
runs ``work(task)`` of that proof and writes each thing it yields as a line of JSON.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from mimose.bench.machine import worker_environment
from mimose.bench.proofs import device
from mimose.bench.worker import end_with_parent, take_standard_output

_PACKAGE = "mimose.bench.proofs"


class ChildFailedError(RuntimeError):
    """The work could not go on: memory ran out, or the process died."""


def run_child(
    proof: str,
    task: Mapping[str, Any],
    threads: int,
    *,
    environment: Mapping[str, str] | None = None,
    limit_seconds: float | None = None,
) -> Iterator[Any]:
    """Run a proof's `work` in a new process, and yield what it yields.

    Args:
        proof: The proof's name.
        task: What `work` is given; anything that JSON can carry.
        threads: For torch's operators.
        environment: Added to the process's.
        limit_seconds: When the process is ended; None for never.

    Raises:
        ChildFailedError: It ended with an error, or took too long; what it yielded
            before was yielded.
    """
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{_PACKAGE}.child", proof],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={
                **worker_environment(threads),
                **device.environment(task),
                **(environment or {}),
            },
            text=True,
            encoding="utf-8",
        )
        clock = _Clock(process, limit_seconds)
        try:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(json.dumps(task))
            process.stdin.close()
            yield from map(json.loads, process.stdout)
            if process.wait() != 0:
                if clock.has_rung:
                    msg = f"{proof} {dict(task)} took more than {limit_seconds:g} s"
                    raise ChildFailedError(msg)
                errors.seek(0)
                text = errors.read().decode(errors="replace").strip()
                msg = f"{proof} {dict(task)} ended with {process.returncode}:\n{text}"
                raise ChildFailedError(msg)
        finally:
            clock.stop()
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()


class _Clock:
    """Ends a process that takes too long.

    Args:
        process: The process.
        limit_seconds: How long it may take; None for as long as it wants.
    """

    def __init__(
        self, process: subprocess.Popen[str], limit_seconds: float | None
    ) -> None:
        self.has_rung = False
        self._process = process
        self._timer: threading.Timer | None = None
        if limit_seconds is not None:
            self._timer = threading.Timer(limit_seconds, self._ring)
            self._timer.start()

    def _ring(self) -> None:
        self.has_rung = True
        self._process.kill()

    def stop(self) -> None:
        """Let the process go on."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()


def main() -> None:
    """Do the work that standard input asks for."""
    end_with_parent()
    task = json.loads(sys.stdin.read())
    proof = importlib.import_module(f"{_PACKAGE}.{sys.argv[1]}")
    with take_standard_output() as answers:
        device.prepare(task)
        for thing in proof.work(task):
            answers.write(json.dumps(thing) + "\n")
            answers.flush()


if __name__ == "__main__":
    main()
