"""The parts of replaying: samples, looks, noise as bits, points of a menu."""

import copy

import pytest
import torch
from torch.nn import functional

import mimose
from mimose.bench.grid.strategies import Everywhere
from mimose.bench.proofs.single_layers import LAYERS, alone
from mimose.exceptions import RecomputationError
from mimose.planners.actions import FINE_MENU
from mimose.run.actions.replay import noise, rebuild, sample
from mimose.run.actions.replay.operators import causal_mask

FINER = FINE_MENU.names[1:-1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(8, 33), (1024,), (3, 7, 31)])
def test_noise_goes_as_bits_and_comes_back(dtype, shape):
    """An eighth of a byte an element, whatever the number of elements."""
    drawn = functional.dropout(torch.ones(shape), 0.3).to(dtype)
    packed = noise.pack(drawn)
    assert noise.held_bytes(packed) == -(-drawn.numel() // 8)
    assert torch.equal(noise.unpack(packed), drawn)
    assert noise.unpack(packed).dtype == dtype


@pytest.mark.parametrize("other", [-0.0, 2.5, float("nan"), float("inf")])
def test_what_has_a_third_number_is_no_noise(other):
    """Not even minus zero, whose products have another sign."""
    drawn = functional.dropout(torch.ones(1024), 0.3)
    drawn[-1] = other
    assert noise.pack(drawn) is drawn


def test_a_sample_is_of_other_elements_each_time():
    """Each storage is looked through in the course of some calls."""
    whole = torch.randn(64 * 8)
    seen = set()
    for _ in range(8):
        values, step, start = sample.take(whole)
        assert not sample.differs(sample.Sample(values, step, start), whole.clone())
        seen.add(start)
    assert seen == set(range(8))


def test_a_sample_tells_what_is_rebuilt_to_something_else():
    """A changed scale, another order, a sign of zero; not-a-number equals itself."""
    whole = torch.randn(32, 32)
    whole[0] = float("nan")
    taken = sample.take(whole)
    assert not sample.differs(taken, whole.clone())
    assert sample.differs(taken, whole * 1.0000002)
    assert sample.differs(taken, whole.t().contiguous())
    zero = sample.take(torch.zeros(8))
    assert sample.differs(zero, -torch.zeros(8))


def test_the_mask_that_attention_makes_for_itself():
    """Minus infinity ahead of each query."""
    mask = causal_mask(torch.zeros(2, 3, 4))
    assert (mask == 0).tolist() == [[k <= q for k in range(4)] for q in range(3)]
    assert torch.isinf(mask).sum() == 6


def test_what_is_rebuilt_otherwise_is_an_error_before_any_gradient(monkeypatch):
    """Something that shows in no graph: the samples of what was let go differ."""
    monkeypatch.setattr(rebuild.Rebuild, "_run", _wrong(rebuild.Rebuild._run))
    model, x = alone("bert", 2)
    options = {"actions": FINE_MENU.names, "planner": Everywhere("lean")}
    with mimose.attach(model, "1TiB", units=["layers.0"], **options) as session:
        for _ in range(2):
            model(x).backward()  # compared in full: what differs is not let go
        _WRONG[0] = True
        with pytest.raises(RecomputationError, match="rebuilt to something else"):
            model(x).backward()
        _WRONG[0] = False
        model(x).backward()
    assert ("lean",) == session.records[0].actions


_WRONG = [False]


def _wrong(run):
    def changed(self, step, told):
        made = run(self, step, told)
        if _WRONG[0] and isinstance(made, torch.Tensor):
            made = made * 1.5
        return made

    return changed


@pytest.mark.parametrize("name", LAYERS)
def test_more_products_free_more(name):
    """Each point frees no less than the one before, to the bit; FLOPs are told."""
    torch.manual_seed(0)
    model, x = alone(name, 1)
    expected = _trained(copy.deepcopy(model), x)
    flops = []
    for action in FINER:
        own = copy.deepcopy(model)
        options = {"actions": FINE_MENU.names, "planner": Everywhere(action)}
        with mimose.attach(own, "1TiB", units=["layers.0"], **options) as session:
            found = _trained(own, x)
        assert all(map(torch.equal, expected, found))
        flops.append(session.records[-1].recomputed_flops)
    assert flops == sorted(flops)
    assert flops[0] == 0 < flops[-1]


def _trained(model, x):
    found = []
    for number in range(3):
        model.zero_grad()
        x.grad = None
        torch.manual_seed(number)
        loss = model(x)
        loss.backward()
        found += [loss.detach(), x.grad, *(p.grad for p in model.parameters())]
    return found
