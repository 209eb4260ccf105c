"""Random numbers of the device: a seed, and an offset that grows with every draw."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

pytestmark = pytest.mark.sim


def _draw(device="sim"):
    return torch.rand(4, device=device).cpu()


def test_the_offset_grows_with_every_draw(sim):
    """Each operator that draws adds 4, on its device; others add nothing."""
    generator, other = sim.default_generators
    offsets = [generator.get_offset()]
    x = torch.rand(1000, device="sim")
    offsets.append(generator.get_offset())
    torch.nn.functional.dropout(x, 0.5)
    offsets.append(generator.get_offset())
    x.square().sum()
    offsets.append(generator.get_offset())

    assert [0, 4, 8, 8] == offsets
    assert 0 == other.get_offset()


def test_state_is_put_back(sim):
    """From the same state come the same numbers, and the same offset."""
    _draw()
    state = sim.get_rng_state()
    first, offset = _draw(), sim.default_generators[0].get_offset()
    _draw()
    sim.set_rng_state(state)

    assert torch.equal(first, _draw())
    assert offset == sim.default_generators[0].get_offset()


def test_seeds(sim):
    """torch.manual_seed seeds all devices; two seeds give other numbers."""
    torch.manual_seed(3)
    first = _draw("sim:0"), _draw("sim:1")
    torch.manual_seed(3)
    again = _draw("sim:0"), _draw("sim:1")
    sim.manual_seed(4)

    assert torch.equal(torch.stack(first), torch.stack(again))
    assert 4 == sim.initial_seed()
    assert 0 == sim.default_generators[0].get_offset()
    assert not torch.equal(first[0], _draw())


def test_neighbouring_seeds_and_offsets_are_unrelated(sim):
    """Draws are uniform over offsets and over seeds alike."""

    def draw():
        return torch.rand(8, device="sim", dtype=torch.float64)

    over_offsets = torch.stack([draw() for _ in range(500)])
    over_seeds = []
    for seed in range(500):
        sim.manual_seed(seed)
        over_seeds.append(draw())
    for drawn in (over_offsets, torch.stack(over_seeds)):
        flat = drawn.flatten().cpu()
        assert flat.numel() == flat.unique().numel()
        assert 0.5 == pytest.approx(flat.mean().item(), abs=0.03)
        assert 1 / 12 == pytest.approx(flat.var().item(), abs=0.01)


def test_the_cpus_state_is_left_alone():
    """Drawing on the device, normal numbers too, changes nothing on the CPU."""
    torch.manual_seed(0)
    torch.randn(1)  # the CPU keeps one of a pair
    state = torch.get_rng_state()
    torch.randn(3, device="sim")

    assert torch.equal(state, torch.get_rng_state())


def test_copies_of_the_state_are_counted(sim):
    """Each time the state comes to the host counts; putting it back does not."""
    state = sim.get_rng_state()
    sim.set_rng_state(state)
    sim.get_rng_state("sim:1")

    assert 2 == sim.rng_copies()


def test_checkpoint_recomputes_the_same_dropout():
    """Torch's checkpointing saves this device's state: the gradient shows the mask."""
    x = torch.ones(1000, device="sim", requires_grad=True)
    kept = checkpoint(torch.nn.functional.dropout, x, 0.5, use_reentrant=False)
    torch.rand(3, device="sim")
    (kept * x).sum().backward()

    assert torch.equal(2 * kept.detach(), x.grad)
