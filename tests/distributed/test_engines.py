"""Engines that start several processes: each rank's results, plans and budget."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

_FIXTURES = Path(__file__).parents[1] / "fixtures"
_LIMIT_SECONDS = 200.0
_TORCHRUN = ("torch.distributed.run", "--nproc-per-node", "2")
_RESTARTED = ("--standalone", "--max-restarts", "1", "--monitor-interval", "0.1")
_ENGINES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "trainer": (("-m", *_TORCHRUN), ("transformers", "accelerate")),
    "lightning": ((), ("lightning",)),
    "elastic": (("-m", *_TORCHRUN, *_RESTARTED), ()),
}
"""How python is told to start each program, and the packages it needs."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(_LIMIT_SECONDS + 40.0),
    pytest.mark.skipif(sys.platform != "linux", reason="processes start as on Linux"),
]


@pytest.mark.parametrize("engine", _ENGINES)
def test_the_same_training_within_a_budget(engine: str, tmp_path: Path) -> None:
    """On each rank losses and parameters are equal, and its own plans recompute."""
    ranks = _run(engine, tmp_path)

    _assert_same(ranks)
    if engine == "elastic":
        _assert_gone_on(ranks)


def _assert_same(ranks: list[dict[str, Any]]) -> None:
    """What holds for each run."""
    assert [2, 2] == [told["n_ranks"] for told in ranks]
    for told in ranks:
        assert [True, True] == told["same"]
        assert len(set(told["losses"])) > 5
        assert told["n_parameters"] > 20
        assert 0 == told["steps_over"]
        assert told["peak_bytes"] <= told["budget_bytes"]
        assert {} == told["kept_units"]
        planned = [
            n_recomputed
            for phase, n_recomputed in zip(
                told["phases"], told["recomputed"], strict=True
            )
            if phase == "plan"
        ]
        assert max(planned) > 0
        assert min(planned) < max(told["calls"])
    assert ranks[0]["rows"] != ranks[1]["rows"]


def _assert_gone_on(ranks: list[dict[str, Any]]) -> None:
    """What rank 0 has saved serves all ranks in the next run: none collects again."""
    for told in ranks:
        assert 1 == told["attempt"]
        assert 0 < told["first"]
        assert len(told["losses"]) == len(told["phases"])
        assert "collect" not in told["phases"]
        assert "plan" == told["phases"][0]


def _run(engine: str, folder: Path) -> list[dict[str, Any]]:
    """Run an engine's program, and return what each rank wrote down."""
    options, packages = _ENGINES[engine]
    for name in packages:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"needs {name}")
    told = folder / "output.txt"
    with told.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, *options, str(_FIXTURES / f"engine_{engine}.py")],
            env={
                **os.environ,
                "OMP_NUM_THREADS": "1",
                # Else ranks that start again may read where those before listened.
                "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                "ENGINE_OUT": str(folder),
                "ENGINE_LIMIT": str(_LIMIT_SECONDS),
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        status = _wait(process)
    words = told.read_text(errors="replace")[-8000:]
    assert 0 == status, words
    paths = [folder / f"{rank}.json" for rank in range(2)]
    assert all(path.exists() for path in paths), words
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]


def _wait(process: subprocess.Popen[bytes]) -> int | str:
    """Wait for a launcher; one that takes too long is told to end its ranks.

    If it ends badly, whatever it has started and left behind is killed.
    """
    status: int | str
    try:
        status = process.wait(_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        status = f"killed after {_LIMIT_SECONDS:.0f} s"
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(10)
    if status != 0:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return status
