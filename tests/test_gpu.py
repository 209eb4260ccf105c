"""What a device must do for the library, on a card and on the simulated accelerator.

The lines are those of ``scripts/gpu check``: none may be missed.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.check import (
    budget,
    exactness,
    meter,
    out_of_memory,
    random_numbers,
    requested,
    versions,
    waits,
    workspaces,
)
from benchmarks.check.line import MISSED

_CHECKS = (
    versions.hardware,
    versions.private_parts,
    *meter.CHECKS,
    *random_numbers.CHECKS,
    waits.of_a_step,
    requested.allocated_over_requested,
    *workspaces.CHECKS,
    exactness.under_autocast,
    pytest.param(budget.kept, marks=pytest.mark.slow),
    pytest.param(out_of_memory.limit_falls, marks=pytest.mark.slow),
)


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
@pytest.mark.parametrize("check", _CHECKS, ids=lambda check: check.__name__)
def test_no_line_is_missed(device, check):
    """Each check has lines, and what they expect is what is seen."""
    lines = list(check(device))

    assert lines
    assert [] == [line for line in lines if line.verdict == MISSED]
