"""Rows of a grid that never ran."""

from __future__ import annotations

import json
from typing import Any, ClassVar

import pytest

from mimose.bench.child import RunFailedError
from mimose.bench.grid.runner import GridRow

MIB = 2**20


def _row(strategy: str, step: int, **changes: Any) -> GridRow:
    length = 10 * (step + 1)
    values: dict[str, Any] = {
        **{"workload": "tc-bert", "scale": "tiny", "is_synthetic": True},
        **{"strategy": strategy, "budget_share": None, "headroom_bytes": None},
        **{"step": step, "is_measured": step >= 2},
        "sizes": json.dumps({"length": length}),
        **dict.fromkeys(("base_bytes", "start_bytes"), 100 * MIB),
        **dict.fromkeys(("peak_bytes", "reserved_bytes"), (100 + length) * MIB),
        **{"seconds": 0.1, "recomputed_flops": 0, "loss": 1.0 / (step + 2)},
        **{"load_average": 0.5, "seed": 0, "threads": 2, "dtype": "float32"},
        **{"date": "2026-01-01T00:00:00", "device": "cpu: none", "python": "3.11"},
        **{"torch": "2", "transformers": "5", "mimose": "0"},
    }
    return GridRow(**{**values, **changes})


@pytest.fixture
def make_row() -> Any:
    """Make a row: growth is 10 MiB a step, and 10 more with each."""
    return _row


@pytest.fixture
def grid(make_row: Any) -> list[GridRow]:
    """Six steps of plain training, and of mimose within 35 MiB."""
    rows = [make_row("none", step) for step in range(6)]
    for step in range(6):
        growth = min(10 * (step + 1), 34)
        rows.append(
            make_row(
                "mimose",
                step,
                **{"budget_share": 0.5, "headroom_bytes": 35 * MIB},
                phase="collect" if step == 0 else "plan",
                plan="rrk" if step > 2 else "kkk",
                peak_bytes=(100 + growth) * MIB,
                predicted_growth_bytes=None if step == 0 else 1.01 * growth * MIB,
            )
        )
    return rows


class _FakeChild:
    """Answers as a `Worker` would, and keeps what it was told and asked.

    A step grows by 8 MiB a token with everything kept. Under a hard limit it fails
    like the allocator, at the first step over it.
    """

    made: ClassVar[list[_FakeChild]] = []
    plain_growth: ClassVar[int] = 300 * MIB
    private_bytes: ClassVar[int] = MIB
    fails: ClassVar[dict[str, int]] = {"static": 2}
    _held: ClassVar[dict[str, float]] = {"none": 8, "full": 1, "static": 2, "mimose": 3}
    _more: ClassVar[dict[str, int]] = {"hf-full": 3, "mimose-paper": 2}

    def __init__(self, name, module, task, threads):
        self.name, self.first = name, task
        self.asked = []
        self.is_closed = False
        self.made.append(self)

    @classmethod
    def of(cls, name):
        """Return the first of a strategy."""
        return next(child for child in cls.made if child.name == name)

    @property
    def counts(self):
        """What it was asked to count."""
        return [asked for asked in self.asked if asked[0] == "count"]

    def receive(self):
        return {"ready": True}

    def ask(self, message):
        command, arguments = message
        self.asked.append((command, *arguments.values()))
        return getattr(self, command)(**arguments)

    def probe(self):
        growth = {"none": self.plain_growth, "full": 100 * MIB}[self.name]
        longest = self.first["longest"] or self.first["sizes"][0]
        return {
            "growth_bytes": growth,
            "longest": longest,
            "private_bytes": self.private_bytes,
        }

    def step(self, index):
        if self.fails.get(self.name) == index and not self.first["is_limited"]:
            msg = "memory ran out"
            raise RunFailedError(msg)
        sizes = self.first["sizes"][index]
        growth = int(self._held.get(self.name, 1) * sizes.get("length", 1)) * MIB
        if self.first["is_limited"] and growth > self.first["headroom_bytes"]:
            msg = "can't allocate memory\nin some line"
            raise RunFailedError(msg)
        is_planned = self.name in ("mimose", "mimose-paper")
        return {
            **{"sizes": json.dumps(sizes), "phase": "plan" if is_planned else ""},
            "plan": "kr"[index % 2] if self.name == "mimose-paper" else "",
            **dict.fromkeys(("base_bytes", "start_bytes"), 400 * MIB),
            **dict.fromkeys(("peak_bytes", "reserved_bytes"), 400 * MIB + growth),
            "predicted_growth_bytes": 1.01 * growth if is_planned else None,
            "recomputed_flops": {"full": 7, "mimose": 5, "static": 6}.get(self.name),
            **{"seconds": 0.1, "loss": 1.0},
            "accuracy": 0.25 if index == len(self.first["sizes"]) - 1 else None,
        }

    def count(self, index, phase):
        if self.name == "hf-every-2":
            msg = "it fails when it is counted"
            raise RunFailedError(msg)
        length = self.first["sizes"][index]["length"]
        return {"flops": 100 + length + self._more.get(self.name, 0) * length**2}

    def rest(self):
        return {}

    def close(self):
        self.is_closed = True


@pytest.fixture
def children(monkeypatch):
    """Processes of a grid that only say that they train."""
    from mimose.bench.grid import runner

    machine = dict.fromkeys(("device", "python", "torch", "transformers", "mimose"), "")
    machine["device"] = "cpu: imagined, 2 cores"
    monkeypatch.setattr("mimose.bench.rows.describe_machine", lambda device: machine)
    monkeypatch.setattr(_FakeChild, "made", [])
    monkeypatch.setattr(runner, "Child", _FakeChild)
    return _FakeChild
