"""Few bits: what is held, that it is right on average, and whose random numbers."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from benchmarks.proofs.packed_call import packed_call
from mimose.run.actions.packing.base import Reader, Role, SavedStorage
from mimose.run.actions.packing.bits import Bits
from mimose.run.actions.packing.quantizing import GROUP, Quantize

PRECISIONS = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
SIZES = [1024 * 8, 5000, 128 * 2**11 + 128 * 3 + 1]


def _saved(whole, *roles, is_source=False):
    readers = [Reader(role, whole) for role in roles or (Role.VALUE,)]
    return SavedStorage(whole, readers, is_source)


def _group(values):
    """(groups, 128) what lies together; the last is filled up."""
    short = -len(values) % GROUP
    return functional.pad(values, (0, short), value=float("nan")).view(-1, GROUP)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("n_elements", SIZES)
@pytest.mark.parametrize("bits", [8, 4])
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


@pytest.mark.parametrize(
    ("dtype", "bits", "least"),
    [
        (torch.float32, 8, 3.7),
        (torch.float32, 4, 7.1),
        (torch.bfloat16, 8, 1.88),
        (torch.bfloat16, 4, 3.5),
    ],
)
def test_how_much_smaller(dtype, bits, least):
    """Ranges included."""
    x = torch.randn(2**16).to(dtype)
    assert x.nbytes / Quantize(bits).pack(_saved(x)).device_bytes > least


def _slope(draw, exact):
    """How the error of a mean falls with the number of draws."""
    total, numbers, errors = torch.zeros_like(exact), (1, 4, 16, 64), []
    for number in range(1, numbers[-1] + 1):
        total += draw()
        if number in numbers:
            errors.append(float((total / number - exact).norm()))
    if not any(errors):
        return None  # steps are no wider than the precision's own
    return float(np.polyfit(np.log(numbers), np.log(errors), 1)[0])


VALUES = {
    "normal": lambda: torch.randn(2**15),
    "far from zero": lambda: torch.randn(2**15) + 100,
    "skewed": lambda: torch.rand(2**15) ** 8,
    "a ReLU's": lambda: torch.randn(2**15).relu(),
    "two outliers": lambda: torch.cat([torch.randn(2**15), torch.tensor([99.0, -99])]),
}


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("bits", [8, 4])
def test_right_on_average(values, dtype, bits):
    """The mean's error falls with the square root of the draws, in any precision."""
    torch.manual_seed(0)
    x, quantize = values().to(dtype), Quantize(bits)
    slope = _slope(lambda: quantize.pack(_saved(x)).unpack().double(), x.double())
    if slope is None:
        assert x.element_size() == 2
        assert x.min() > 90
    else:
        assert -0.5 == pytest.approx(slope, abs=0.05)


@pytest.mark.parametrize("bits", [8, 4])
def test_a_weights_gradient_is_right_on_average(bits):
    """It is linear in what is rounded."""
    torch.manual_seed(0)
    model, x, quantize = nn.Linear(64, 64), torch.randn(256, 64), Quantize(bits)
    direction = torch.randn(256, 64)
    exact = torch.autograd.grad(model(x), model.weight, direction)[0]

    def draw():
        call = packed_call(model, x, [quantize], tuple(model.parameters()))
        return torch.autograd.grad(call.output, model.weight, direction)[0].double()

    assert -0.5 == pytest.approx(_slope(draw, exact.double()), abs=0.05)


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


@pytest.mark.parametrize(
    "x",
    [
        torch.arange(4096) * 1e-45,
        torch.randn(4096) * 1e-38,
        torch.randn(4096, dtype=torch.float64) * 1e-310,
        (torch.randn(4096) * 1e-7).half(),
    ],
)
def test_numbers_as_small_as_there_are(x):
    """Off by no more than a step, which is no less than a normal number."""
    found = Quantize(8).pack(_saved(x)).unpack()
    span = float(x.double().max() - x.double().min())
    least = torch.finfo(torch.promote_types(x.dtype, torch.float32)).tiny
    error = (found.double() - x.double()).abs().max()
    assert (
        error <= 1.001 * max(span / 255, least) + torch.finfo(x.dtype).smallest_normal
    )


@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("place", [0, 5000, -1])
def test_what_is_not_finite_stays(value, dtype, place):
    """It would take its whole group along."""
    x = torch.randn(2**14 + 5).to(dtype)
    x[place] = value
    assert Quantize(8).pack(_saved(x)) is None


def test_a_range_wider_than_there_are_numbers_stays():
    """Its step would be infinite."""
    x = torch.linspace(-3.4e38, 3.4e38, 4096)
    assert Quantize(8).pack(_saved(x.view(32, -1).t().reshape(-1))) is None
    largest = torch.finfo(torch.float16).max
    half = torch.tensor([-largest, largest]).half().repeat(2048)
    assert torch.equal(half, Quantize(8).pack(_saved(half)).unpack())


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


def test_what_is_not_taken():
    """What is fragile, integers, little; what bits alone would do for."""
    x, quantize = torch.randn(2048), Quantize(8)
    assert quantize.takes(_saved(x))
    assert quantize.takes(_saved(x, Role.SIGN, is_source=True))
    assert quantize.takes(_saved(x, Role.LINEAR_WEIGHT, Role.SIGN, Role.SHAPE))
    assert not quantize.takes(_saved(x, Role.SIGN))
    assert not quantize.takes(_saved(x, Role.VALUE, Role.FRAGILE))
    assert not quantize.takes(_saved(x, Role.WINDOW_INDEX))
    assert not quantize.takes(_saved(x[:1000]))
    assert not quantize.takes(_saved(torch.arange(2048)))
    other = Reader(Role.VALUE, x.view(torch.bfloat16))
    assert not quantize.takes(SavedStorage(x, [other], is_source=False))
    with pytest.raises(ValueError, match="got bits=5"):
        Quantize(5)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_a_layer(bits, dtype):
    """All that it saves: gradients are near, the forward is the same."""
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 8, 3)
    model = nn.Sequential(*layers).to(dtype)
    x = torch.randn(8, 3, 24, 24, dtype=dtype, requires_grad=True)
    weights = tuple(model.parameters())
    output = model(x)
    direction = torch.randn_like(output)
    expected = torch.autograd.grad(output, (x, *weights), direction)
    call = packed_call(model, x, [Bits(), Quantize(bits)], weights)
    assert torch.equal(output, call.output)
    found = torch.autograd.grad(call.output, (x, *weights), direction)
    exact, rounded = (
        torch.cat([gradient.float().flatten() for gradient in gradients])
        for gradients in (expected, found)
    )
    error = (exact - rounded).norm() / exact.norm()
    assert 0 < error < (0.02 if bits == 8 else 0.3)
    assert call.saved_bytes / call.device_bytes > {torch.float32: 3.3}.get(dtype, 1.7)


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("bits", [8, 4])
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
