"""What a process of the grid trains, here in the tests' own process."""

from __future__ import annotations

import pytest

pytest.importorskip("transformers")


from mimose.bench.device import need_device
from mimose.bench.grid.worker import Task, Worker
from mimose.usage import UsageError

MIB = 2**20


@pytest.mark.sim
def test_it_trains_on_the_simulated_accelerator(sim, tmp_path):
    """Reserved bytes are read, and stay within the headroom that it was given."""
    need_device("sim")
    sizes = [{"length": n} for n in (40, 90, 60, 120, 80, 100, 70, 110)]
    task = Task(
        workload="tc-bert",
        strategy="mimose",
        scale="tiny",
        sizes=sizes,
        longest=None,
        headroom_bytes=200 * MIB,
        seed=0,
        device="sim",
        dtype="float32",
        threads=1,
        shared=str(tmp_path),
    )
    worker = Worker(task)
    steps = [worker.step(index) for index in range(len(sizes))]
    worker.close()
    assert {"plan"} <= {step["phase"] for step in steps}
    for step in steps:
        assert step["reserved_bytes"] % (2 * MIB) == 0
        assert 0 < step["reserved_bytes"] <= step["base_bytes"] + 200 * MIB


def test_a_device_that_is_not_there_is_named():
    """Before any process is started for it."""
    with pytest.raises(UsageError, match="abacus: torch knows no such device"):
        need_device("abacus")
