"""Work in processes of its own: real ones, on a tiny model."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("transformers")

from mimose.bench.child import Child, RunFailedError, run_child
from mimose.bench.step_meter import RunningStep, StepMeter

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")

MIB = 2**20


def test_a_step_is_seen_past_resets() -> None:
    """A peak before somebody else's reset belongs to the step all the same."""
    import torch

    meter = StepMeter()
    step = RunningStep(meter, torch.device("cpu"))
    block = bytearray(64 * MIB)
    del block
    meter.reset_peak()

    assert step.end().growth_bytes > 60 * MIB
    assert RunningStep(meter, torch.device("cpu")).end().growth_bytes < 8 * MIB


_LARGE = """
import torch

class Block(torch.nn.Linear):
    pass

class Model(torch.nn.Sequential):
    def forward(self, x):
        return super().forward(x).mean()

def make():
    batch = lambda sizes, _: {"x": torch.ones(sizes["rows"], 16)}
    return Model(*(Block(16, 16) for _ in range(4))), batch, ["rows"]
"""


@pytest.mark.slow
def test_limit_makes_allocations_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that needs more than the budget and the slack ends with a message."""
    (tmp_path / "mine_of_child.py").write_text(_LARGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    task = {
        **{"workload": "mine_of_child:make", "strategy": "none", "scale": "tiny"},
        "sizes": [{"rows": 2**18}],  # each layer makes 16 MiB, and the slack is 32
        **{"longest": None, "headroom_bytes": 1, "is_limited": True, "seed": 0},
        **{"device": "cpu", "dtype": "float32", "threads": 1, "shared": str(tmp_path)},
    }

    with (
        contextlib.closing(Child("none", "mimose.bench.grid.worker", task, 1)) as child,
        pytest.raises(RunFailedError, match="can't allocate memory"),
    ):
        child.receive()
        child.ask(["step", {"index": 0}])


def test_one_that_takes_too_long_is_ended() -> None:
    """And the error says how long it had."""
    with pytest.raises(RunFailedError, match=r"check took more than 0\.01 s"):
        list(run_child("benchmarks.proofs.check", {}, 1, limit_seconds=0.01))


_STARTER = """
import os, subprocess, sys
busy = "from mimose.bench.serve import end_with_parent as e; e(); print(1, flush=1)"
busy += "\\nwhile True: pass"
child = subprocess.Popen(
    [sys.executable, "-c", busy], stdout=subprocess.PIPE, start_new_session=True
)
child.stdout.readline()
print(child.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_a_child_ends_with_a_starter_that_is_killed() -> None:
    """In the middle of its work, and without a word from anybody."""
    starter = subprocess.run(
        [sys.executable, "-c", _STARTER], stdout=subprocess.PIPE, text=True, check=False
    )
    child = Path(f"/proc/{int(starter.stdout)}")
    for _ in range(600):
        if not child.exists():
            return
        time.sleep(0.1)
    os.kill(int(starter.stdout), 9)
    pytest.fail("the child goes on")
