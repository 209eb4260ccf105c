"""What a device must do for the library, on a card and on the simulated accelerator.

The lines are those of ``scripts/gpu check``: none may be missed.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.check import GROUPS, MISSED, run_group

_SLOW = ("budget", "exactness", "memory")
_GROUPS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else [])
    for name in GROUPS
    if name not in ("mapping", "expandable")  # the allocator is told before it starts
]


@pytest.fixture(
    params=[
        pytest.param("card", marks=pytest.mark.gpu),
        pytest.param("sim", marks=pytest.mark.sim),
    ]
)
def device(request):
    """The card, where there is one, or else the simulated accelerator."""
    if request.param == "sim":
        request.getfixturevalue("sim")
        return torch.device("sim", 0)
    return torch.device(torch.accelerator.current_accelerator().type, 0)


@pytest.fixture
def _any_algorithm():
    """Let torch choose algorithms as before the test."""
    before = torch.are_deterministic_algorithms_enabled()
    yield
    torch.use_deterministic_algorithms(before)


@pytest.mark.usefixtures("_any_algorithm")
@pytest.mark.filterwarnings("ignore:.*deterministic")
@pytest.mark.parametrize("group", _GROUPS)
def test_no_line_is_missed(device, group):
    """Each group has lines, and what they expect is what is seen."""
    lines = list(run_group(group, device))

    assert lines
    assert [] == [line for line in lines if line.verdict == MISSED]


@pytest.mark.gpu
def test_autosac_saves_memory(tmp_path):
    """With its own time model, which needs a device: losses are plain training's."""
    pytest.importorskip("transformers")
    pytest.importorskip("pulp")
    pytest.importorskip("pwlf")
    from mimose.bench.grid.worker import Task, Worker

    lengths = (64, 256, 160)
    task = {
        "workload": "tc-bert", "scale": "tiny", "seed": 0, "dtype": "float32",
        "sizes": [{"length": length} for length in lengths], "longest": None,
        "device": str(torch.accelerator.current_accelerator()), "threads": 2,
        "shared": str(tmp_path),
    }  # fmt: skip
    plain = Worker(Task(strategy="none", headroom_bytes=None, **task))
    growth = plain.probe()["growth_bytes"]
    losses = [plain.step(i)["loss"] for i in range(len(lengths))]
    plain.close()
    planned = Worker(Task(strategy="autosac", headroom_bytes=growth * 3 // 4, **task))
    rows = [planned.step(i) for i in range(len(lengths))]
    planned.close()
    assert [row["loss"] for row in rows] == losses
    most = max(row["peak_bytes"] - row["start_bytes"] for row in rows)
    assert most < 0.9 * growth
