"""The little work by which the machine's pace is told."""

import pytest
import torch

from mimose.bench.advise.pace import pace_of
from mimose.torch_private import TorchDispatchMode


class _Results(TorchDispatchMode):
    """Collects what operators wrote to that was not there before."""

    def __init__(self):
        super().__init__()
        self.n_calls = 0
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run it, and compare what it returns with what it was given."""
        kwargs = kwargs or {}
        found = func(*args, **kwargs)
        given = [*args, *kwargs.values()]
        held = {each.data_ptr() for each in given if isinstance(each, torch.Tensor)}
        self.n_calls += 1
        if found.data_ptr() not in held:
            self.made.append(func)
        return found


def test_pace_allocates_nothing():
    """What memory costs depends on the method before, so none is asked for."""
    pace = pace_of(torch.device("cpu"))
    with _Results() as results:
        assert pace() > 0.0
    assert results.n_calls > 100
    assert results.made == []


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_an_accelerator_keeps_its_pace(device):
    """Nothing runs there."""
    assert pace_of(torch.device(device))() == 1.0
