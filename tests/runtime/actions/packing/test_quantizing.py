"""Few bits: what is held, that it is right on average, and whose random numbers."""

import numpy as np
import pytest
import torch
from torch.nn import functional

from mimose.actions.packing.base import Reader, Role, SavedStorage
from mimose.actions.packing.quantizing import GROUP, Quantize

PRECISIONS = [torch.float32, torch.bfloat16, torch.float16]


def _saved(whole, *roles, is_source=False):
    readers = [Reader(role, whole) for role in roles or (Role.VALUE,)]
    return SavedStorage(whole, readers, is_source)


def _group(values):
    """(groups, 128) what lies together; the last is filled up."""
    short = -len(values) % GROUP
    return functional.pad(values, (0, short), value=float("nan")).view(-1, GROUP)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize(("n_elements", "bits"), [(5000, 8), (128 * 2**11 + 385, 4)])
def test_each_comes_back_within_a_step_of_its_group(dtype, n_elements, bits):
    """And what is held is what was promised."""
    torch.manual_seed(0)
    x = (torch.randn(n_elements) * torch.logspace(-3, 3, n_elements)).to(dtype)
    packed = Quantize(bits).pack(_saved(x))
    found = packed.unpack()
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    own = _group(x.double())
    span = own.nan_to_num(-1e30).amax(1) - own.nan_to_num(1e30).amin(1)
    error = (_group(found.double()) - own).abs().nan_to_num(0.0).amax(1)
    rounding = own.abs().nan_to_num(0.0).amax(1) * torch.finfo(dtype).eps
    assert (error <= 1.001 * span / (2**bits - 1) + rounding).all()
    number_bytes = max(4, x.element_size())
    ranges = -(-n_elements // GROUP) * 2 * number_bytes
    assert -(-n_elements * bits // 8) + ranges == packed.device_bytes
    assert 0 == packed.host_bytes


def _slope(draw, exact):
    """How the error of a mean falls with the number of draws."""
    total, numbers, errors = torch.zeros_like(exact), (1, 4, 16, 64), []
    for number in range(1, numbers[-1] + 1):
        total += draw()
        if number in numbers:
            errors.append(float((total / number - exact).norm()))
    return float(np.polyfit(np.log(numbers), np.log(errors), 1)[0])


VALUES = {
    "normal": lambda: torch.randn(2**15),
    "a ReLU's": lambda: torch.randn(2**15).relu(),
    "two outliers": lambda: torch.cat([torch.randn(2**15), torch.tensor([99.0, -99])]),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 8), (torch.bfloat16, 4)])
def test_right_on_average(values, dtype, bits):
    """The mean's error falls with the square root of the draws, in any precision."""
    torch.manual_seed(0)
    x, quantize = values().to(dtype), Quantize(bits)
    slope = _slope(lambda: quantize.pack(_saved(x)).unpack().double(), x.double())
    assert -0.5 == pytest.approx(slope, abs=0.05)


def test_what_needs_no_rounding_has_none():
    """Groups of one number, and numbers that are whole steps, at any scale."""
    for bits in (8, 4):
        levels = torch.arange(2**bits).float()
        steps = levels.repeat_interleave(8).view(-1, GROUP)
        steps[:, 0], steps[:, 1] = 0, 2**bits - 1
        for x in (
            torch.full((4096,), 0.1),
            torch.zeros(4096),
            steps.reshape(-1).repeat(64),
            steps.reshape(-1).repeat(64) * 2.0**-40,
            -1e38 + torch.zeros(4096),
        ):
            packed = Quantize(bits).pack(_saved(x))
            assert torch.equal(x, packed.unpack())
            assert (packed.ranges.steps > 0).all()  # it is divided by


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_what_is_not_finite_stays(value):
    """It would take its whole group along."""
    for place in (0, 5000, -1):
        x = torch.randn(2**14 + 5)
        x[place] = value
        assert Quantize(8).pack(_saved(x)) is None


@pytest.mark.parametrize("dtype", PRECISIONS)
def test_signs_are_those_that_were(dtype):
    """What is above zero does not round to it; a bit an element more."""
    x = torch.randn(2**14).mul(2).exp().mul(torch.randn(2**14) > 0).to(dtype)
    quantize = Quantize(4)
    plain = quantize.pack(_saved(x)).unpack()
    assert not torch.equal(x > 0, plain > 0)
    packed = quantize.pack(_saved(x, Role.VALUE, Role.SIGN))
    assert torch.equal(x > 0, packed.unpack() > 0)
    assert 2**14 / 8 == packed.device_bytes - quantize.pack(_saved(x)).device_bytes


def test_random_numbers_are_its_own():
    """Dropout behind it draws what it would; equal runs round alike."""
    x = torch.randn(4096)
    torch.manual_seed(3)
    expected = functional.dropout(x)
    torch.manual_seed(3)
    one, other = (Quantize(8).pack(_saved(x)).unpack() for _ in range(2))
    assert torch.equal(expected, functional.dropout(x))
    assert torch.equal(one, other)
    quantize = Quantize(8, seed=1)
    first, second = (quantize.pack(_saved(x)).unpack() for _ in range(2))
    assert not torch.equal(first, second)
    assert not torch.equal(first, one)


@pytest.mark.parametrize(("dtype", "bits"), [(torch.float32, 8), (torch.bfloat16, 4)])
def test_working_memory(dtype, bits, meter):
    """Slices are worked on: little more is held than what goes in and comes out."""
    x = torch.randn(2**23).to(dtype)
    saved, quantize = _saved(x), Quantize(bits)
    before = meter.live_bytes()
    meter.reset_peak()
    packed = quantize.pack(saved)
    assert meter.peak_bytes() - before < 0.9 * x.nbytes
    before = meter.live_bytes()
    meter.reset_peak()
    packed.unpack()
    assert meter.peak_bytes() - before < 1.25 * x.nbytes


@pytest.mark.sim
def test_on_an_accelerator(sim):
    """Its own generator there, too, and the bytes that are said."""
    x = torch.randn(2**16 + 3).to("sim")
    saved, quantize = _saved(x), Quantize(8)
    expected = sim.get_rng_state()
    before = sim.memory_allocated()
    packed = quantize.pack(saved)
    held = sim.memory_allocated() - before
    assert torch.equal(expected, sim.get_rng_state())
    assert packed.device_bytes <= held <= packed.device_bytes + 2 * 512
    assert (packed.unpack() - x).abs().max() < 8 / 255
