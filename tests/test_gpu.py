"""What a device must do for the library, on a card and on the simulated accelerator.

The lines are those of ``scripts/gpu check``: none may be missed.
"""

from __future__ import annotations

import pytest
import torch

from benchmarks.check import GROUPS, MISSED, run_group

_SLOW = ("exactness", "memory")
_GROUPS = [
    pytest.param(name, marks=[pytest.mark.slow] if name in _SLOW else [])
    for name in GROUPS
    if name != "mapping"  # the allocator is told before it starts
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
