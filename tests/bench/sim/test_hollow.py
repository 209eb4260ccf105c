"""The hollow card: true sizes, no arithmetic, a clock by the card's rates."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.sim


class _Layer(nn.Module):
    """Attention, a norm and products, as in an encoder.

    No dropout: on a CPU its kernel makes temporaries that CUDA's does not.
    """

    def __init__(self, width):
        super().__init__()
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, -1, 64)).unbind(2)
        scores = (q.transpose(1, 2) @ k.transpose(1, 2).mT).softmax(-1)
        mixed = (scores @ v.transpose(1, 2)).transpose(1, 2).flatten(2)
        return x + self.out(mixed)


def _model(width, n_layers, dtype=torch.float32):
    with torch.device("sim"):
        layers = (_Layer(width) for _ in range(n_layers))
        return nn.Sequential(*layers).to(dtype).train()


def _bytes_of_steps(sim, *, amp):
    """Train some lengths; return what was requested at each moment of a step."""
    torch.manual_seed(0)
    model = _model(128, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    told = []
    for length in (40, 200, 64):
        sim.reset_peak_memory_stats()
        x = torch.randn(4, length, 128, device="sim")
        with torch.autocast("sim", torch.bfloat16, enabled=amp):
            loss = model(x).sum()
        told.append(_requested(sim))
        loss.backward()
        told.append(_requested(sim))
        optimizer.step()
        optimizer.zero_grad()
        told.append(_requested(sim))
        del x, loss
    return told


def _requested(sim):
    stats = sim.memory_stats()
    return [stats[f"requested_bytes.all.{which}"] for which in ("current", "peak")]


@pytest.mark.parametrize("amp", [False, True])
def test_bytes_are_those_of_the_device_that_computes(sim, amp):
    """Held after forward, backward and the optimizer's step; and nearly at the peak.

    There a CPU's kernels hold temporaries, such as a cast operand, that CUDA's do not.
    """
    computed = _bytes_of_steps(sim, amp=amp)
    sim.reset()
    sim.set_hollow(dataclasses.replace(sim.CARDS["h100"], blas_workspace=0.0))
    hollow = _bytes_of_steps(sim, amp=amp)
    assert [held for held, _ in hollow] == [held for held, _ in computed]
    for (_, here), (_, there) in zip(hollow, computed, strict=True):
        assert 0.95 * there < here <= there


def test_the_clock_is_the_roofline(sim):
    """A product by its FLOPs, an addition by its bytes, a view and the host nothing."""
    card = sim.CARDS["h100"]
    sim.set_hollow(card)
    a = torch.empty(4096, 4096, dtype=torch.bfloat16, device="sim")
    passed = []
    for run in (lambda: a @ a, lambda: a + a, lambda: a.t()):
        before = sim.clock()
        run()
        passed.append(sim.clock().since(before))
    product, added, view = passed
    assert product.flops == pytest.approx(2 * 4096**3, rel=1e-4)
    assert product.kernels == pytest.approx(
        card.launch + 2 * 4096**3 / card.half_flops, rel=1e-4
    )
    moved = 3 * 2 * 4096**2 / card.memory_bytes
    assert added.kernels == pytest.approx(card.launch + moved, rel=1e-4)
    assert (added.n_kernels, added.flops) == (1, 0)
    assert view.seconds == view.n_kernels == 0


def test_a_user_waits_for_the_slower_of_host_and_device(sim):
    """Small kernels wait for the host, large ones for the device, readings for both."""
    sim.set_hollow(sim.CARDS["h100"], sim.HOST)
    small = torch.empty(8, 8, dtype=torch.bfloat16, device="sim")
    large = torch.empty(8192, 8192, dtype=torch.bfloat16, device="sim")
    price = sim.HOST.operator
    for tensor, decides in ((small, "host"), (large, "kernels")):
        (tensor @ tensor)[0, 0].item()  # takes its segment; the host waits
        before = sim.clock()
        for _ in range(50):
            tensor @ tensor
        passed = sim.clock().since(before)
        assert passed.host == pytest.approx(50 * price)
        assert passed.user == pytest.approx(getattr(passed, decides), rel=0.05)
    large[0, 0].item()  # the host waits, so that it is ahead no more
    before = sim.clock()
    small @ small
    assert sim.clock().since(before).user > price
    before = sim.clock()
    for _ in range(3000):
        small.add_(1)
    sim.pass_on_host(1.0)
    passed = sim.clock().since(before)
    assert passed.user == pytest.approx(1.0 + 3000 * price, rel=0.01)


def test_streams_run_beside_each_other_until_one_waits(sim):
    """Two products on two streams take the time of one, and of both after an event."""
    sim.set_hollow(sim.CARDS["a100"], sim.HOST)
    large = torch.empty(8192, 8192, dtype=torch.bfloat16, device="sim")
    (large @ large)[0, 0].item()
    aside, passed = sim.Stream(), []
    for waits in (False, True):
        before = sim.clock()
        large @ large
        if waits:
            aside.wait_stream(sim.current_stream())
        with sim.stream(aside):
            large @ large
        passed.append(sim.clock().since(before))
        sim.synchronize()
    beside, behind = passed
    assert beside.user == pytest.approx(beside.kernels / 2, rel=0.05)
    assert behind.user == pytest.approx(behind.kernels, rel=0.05)


def test_bits_of_what_is_not_computed_are_zeros(sim):
    """Sums of bits tell the session what was rebuilt to something else."""
    sim.set_hollow(sim.CARDS["h100"])
    torch.full((2**16,), 7, device="sim")  # leaves its values in the memory
    numbers = torch.empty(2**18, dtype=torch.bfloat16, device="sim")
    assert 0 == numbers.view(torch.int64).sum().item()
    del numbers
    torch.full((2**18,), 7, device="sim")
    words = torch.empty(2**22, dtype=torch.bfloat16, device="sim").view(torch.int64)
    torch.full((2**16,), 7, device="sim")
    for part in (words[:32], words.view(-1, 64)[3::17].flatten()):
        assert 0 == part.sum().item()
    torch.full((2**18,), 7, device="sim")
    assert 0 == torch.arange(300_000, device="sim").sum().item()  # too many


def test_segments_take_time(sim):
    """A new segment costs a call, a cached block none, an emptied cache one again."""
    card = sim.CARDS["h100"]
    sim.set_hollow(card)
    before = sim.clock()
    for _ in range(3):
        torch.empty(2**30, dtype=torch.uint8, device="sim")
    once = card.segment + card.segment_byte * 2**30
    assert sim.clock().since(before).allocator == pytest.approx(once, rel=1e-5)
    sim.empty_cache()
    assert sim.clock().since(before).allocator == pytest.approx(2 * once, rel=1e-5)
