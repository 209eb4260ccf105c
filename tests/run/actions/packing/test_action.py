"""Packing what a call saved: an exact codec of somebody else's goes all the way."""

import copy
from typing import NamedTuple

import numpy as np
import pytest
import torch

import mimose
from mimose.planners import ActionSpec
from mimose.run.actions.packing.action import Packing
from mimose.run.actions.registry import forget, register

ZOO = ("bert", "gpt2", "t5", "vit", "albert", "resnet")
N_ROWS = (40, 96, 64, 48, 80, 56, 88, 72, 44, 92, 60, 76, 84, 52, 68)
SPEC = ActionSpec(name="away", code="a", resources=frozenset({"replay", "pack"}))


class _Away(NamedTuple):
    """A storage in NumPy's memory, which no meter counts."""

    values: np.ndarray
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    device_bytes = 0

    @property
    def host_bytes(self):
        return self.values.nbytes

    def unpack(self):
        here = torch.from_numpy(self.values).view(self.dtype)
        there = torch.empty_strided(
            self.shape, self.stride, dtype=self.dtype, device=self.device
        )
        there.as_strided((there.numel(),), (1,)).copy_(here)
        return there


class _Carry:
    """Carries every storage away, whatever reads it."""

    is_exact = True

    def takes(self, saved):
        return saved.whole.nbytes >= 1024

    def pack(self, saved):
        whole = saved.whole
        flat = whole.as_strided((whole.numel(),), (1,), 0).cpu()
        values = flat.view(torch.uint8).numpy().copy()
        return _Away(values, whole.shape, whole.stride(), whole.dtype, whole.device)


@pytest.fixture
def away():
    """The action, registered as long as the test runs."""
    action = Packing(SPEC, lambda means: _Carry())
    register(action)
    yield action
    forget(action)


@pytest.mark.parametrize("name", ZOO)
def test_an_exact_codec_trains_like_the_bare_model(toys, away, name):
    """Losses, gradients, buffers and random state, dropout on, at two shapes."""
    model = toys.zoo_model(name)
    batches = toys.zoo_batches(name, 8)
    bare = toys.train(copy.deepcopy(model), batches)
    actions = ("keep", "away", "recompute")
    options = {"actions": actions, "planner": toys.Always("away")}
    with mimose.attach(model, "1TiB", **options) as session:
        trained = toys.train(model, batches)
    assert [] == toys.differences(bare, trained)
    assert {"away"} == {action for r in session.records for action in r.actions}
    assert not session.summary().kept_units


def test_it_is_learned_and_planned(toys, away, meter):
    """Tried in place of keeping, then chosen by bytes: budget kept, growth foretold."""
    model = toys.chain(6, width=128)
    batches = [toys.inputs(4 * n, width=128) for n in N_ROWS * 3]
    with toys.untracked():
        bare = toys.train(copy.deepcopy(model), batches)
    budget = toys.budget_between(model, batches[:2], 0.6, meter)
    how = {"meter": meter, "actions": ("keep", "away", "recompute")}
    with mimose.attach(model, budget, **how) as session:
        trained = toys.train(model, batches)
        problem = session.planning_problem()
    records = list(session.records)
    tried = [r for r in records if "tried in place" in r.reason]
    planned = [r for r in records if r.phase == "plan" and r not in tried]
    assert [] == toys.differences(bare, trained)
    assert not any(record.is_over for record in records)
    assert [r for r in planned if "away" in r.actions]
    assert problem.host_bytes.any()
    assert problem.input_bytes.any()
    assert max(abs(record.prediction_error) for record in planned[-15:]) < 0.01


class _Spectral(torch.nn.Module):
    """Reads one storage as complex numbers and as their parts."""

    def __init__(self):
        super().__init__()
        self.mask = torch.nn.Parameter(torch.rand(33, 2))

    def forward(self, x):
        z = torch.fft.rfft(x)
        parts = torch.view_as_real(z) * self.mask
        return torch.fft.irfft(torch.view_as_complex(parts) * z.abs(), n=x.shape[-1])


class _Conjugate(torch.nn.Module):
    """Reads one storage as numbers and as their conjugates."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(64, 64))

    def forward(self, x):
        z = torch.complex(x @ self.scale, x)
        return (z.conj().transpose(-1, -2) @ z).real @ self.scale


class _Borrowing(torch.nn.Module):
    """Multiplies with a weight that is another module's."""

    def __init__(self, lender):
        super().__init__()
        self._lenders = [lender]
        self.own = torch.nn.Linear(64, 64)

    def forward(self, x):
        return torch.relu(self.own(x)) @ self._lenders[0].weight


@pytest.mark.parametrize("layer", ["spectral", "conjugate", "borrowing"])
def test_views_of_other_kinds_and_weights_of_others_stay(toys, away, layer):
    """A storage is packed only if one kind of number is all that is read of it."""
    torch.manual_seed(2)
    lender = torch.nn.Linear(64, 64)
    make = {
        "spectral": _Spectral,
        "conjugate": _Conjugate,
        "borrowing": lambda: _Borrowing(lender),
    }[layer]
    model = torch.nn.Sequential(lender, make(), make())
    x = torch.randn(64, 64)

    def gradients():
        model.zero_grad()
        model(x).square().mean().backward()
        return [p.grad.clone() for p in model.parameters()]

    bare = gradients()
    options = {
        "actions": ("keep", "away", "recompute"),
        "planner": toys.Always("away"),
        "units": ["1", "2"],
    }
    with mimose.attach(model, "1TiB", **options):
        for _ in range(3):
            assert all(map(torch.equal, bare, gradients()))
