"""What recipes rebuild of layers on images: pools, batch norms, other sizes."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import mimose
from mimose.run.actions.replay import positions
from mimose.run.actions.replay.operators import OPERATORS

WIDTH, PIXELS = 8, 12
SHAPE = (4, WIDTH, PIXELS, PIXELS)
_FULL = 4 * 4 * WIDTH * PIXELS * PIXELS
"""Bytes of a tensor of the full size."""
_SEALS = 4096
"""More than what is held in place of what goes."""


class Layer(nn.Module):
    """A batch norm, what is tried, and a convolution that reads it."""

    def __init__(self, part):
        super().__init__()
        self.first = nn.Conv2d(WIDTH, WIDTH, 3, padding=1)
        self.norm = nn.BatchNorm2d(WIDTH)
        self.part = part
        self.last = nn.LazyConv2d(WIDTH, 1)

    def forward(self, x):
        """Map (batch, width, height, width) to a number for each channel."""
        return self.last(self.part(self.norm(self.first(x)))).mean((2, 3))


class Row(nn.Module):
    """One such layer, and a loss."""

    def __init__(self, part):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList([Layer(part)])

    def forward(self, x):
        """Map images to one number."""
        return self.blocks[0](x * 1.0).square().mean()


class Twice(nn.Module):
    """A ReLU6, and its operand read by another operator besides."""

    def forward(self, x):
        """Map images to images."""
        return functional.relu6(x) + torch.erf(x)


def _half(x):
    return functional.interpolate(x, scale_factor=0.5, mode="bilinear")


PARTS = {
    "relu": (nn.ReLU(), _FULL),
    "relu in place": (nn.ReLU(inplace=True), _FULL),
    "relu6": (nn.ReLU6(), 2 * _FULL),
    "relu6 in place": (nn.ReLU6(inplace=True), 2 * _FULL),
    # Its input and output, and three quarters of the positions' two bytes an element.
    "max-pool": (nn.MaxPool2d(2), _FULL + _FULL // 4 + _FULL // 4 * 3 // 2),
    "wide max-pool": (nn.MaxPool2d(3, 1, 1), 2 * _FULL + _FULL * 3 // 2),
    "average pool": (nn.AvgPool2d(2), _FULL + _FULL // 4),
    "adaptive pool": (nn.AdaptiveAvgPool2d(5), _FULL),
    "nearest": (nn.UpsamplingNearest2d(scale_factor=2), 4 * _FULL),
    "bilinear": (_half, _FULL // 4),
    "padded": (nn.ZeroPad2d(1), _FULL),
}
"""By name: what is tried, and the bytes that go at least."""


@pytest.mark.parametrize("name", PARTS)
def test_it_trains_the_same_and_frees_what_it_should(toys, freed, always_lean, name):
    """Over several batches and sizes, to the last bit."""
    part, n_bytes = PARTS[name]
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randn(SHAPE, generator=generator) for _ in range(4)]
    batches.insert(2, torch.randn(2, WIDTH, 16, 16, generator=generator))
    model = Row(part)
    model(batches[0])  # makes the last convolution
    bare = toys.train(copy.deepcopy(model), batches)
    with mimose.attach(model, **always_lean):
        trained = toys.train(model, batches)
    assert [] == toys.differences(bare, trained)
    assert n_bytes - _SEALS <= freed[-1] <= n_bytes + _FULL


def test_a_relu_edits_what_was_rebuilt_for_it_alone(toys, always_lean, monkeypatch):
    """A batch norm that nobody else reads; not one that is read again."""
    edits = []
    for kind in ("ReluBackward0", "HardtanhBackward0"):
        edit = OPERATORS[kind].edit
        known = copy.copy(OPERATORS[kind])
        object.__setattr__(
            known, "edit", lambda told, x, edit=edit: edits.append(1) or edit(told, x)
        )
        monkeypatch.setitem(OPERATORS, kind, known)
    for part, n_edits in ((nn.ReLU(inplace=True), 1), (nn.ReLU6(), 1), (Twice(), 0)):
        edits.clear()
        model = Row(part)
        model(torch.zeros(SHAPE))
        with mimose.attach(model, **always_lean):
            for _ in range(4):
                model(torch.randn(SHAPE)).backward()
                del edits[:-1]
        assert n_edits == len(edits), part


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n_times", [1, 8])
def test_a_relu6_shows_in_its_output_what_its_backward_reads(dtype, n_times):
    """On its bounds, beyond them, and where there is no number."""
    inf, nan = float("inf"), float("nan")
    values = [-inf, -1.0, -0.0, 0.0, 1e-30, 3.0, 5.999, 6.0, 6.01, inf, nan]
    x = torch.tensor(values * n_times, dtype=dtype)
    gradient, backward = torch.full_like(x, 2.0), torch.ops.aten.hardtanh_backward
    by_operand = backward(gradient, x, 0.0, 6.0)
    by_output = backward(gradient, functional.relu6(x), 0.0, 6.0)
    assert torch.equal(by_operand.nan_to_num(9.0), by_output.nan_to_num(9.0))
    assert by_operand[4] == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("is_affine", [True, False])
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_a_batch_norm_by_its_saved_deviation(dtype, is_affine, layout):
    """The same bits as when the batch is read again."""
    x = torch.randn(SHAPE, dtype=dtype).mul(3).add(1).contiguous(memory_format=layout)
    weight, bias = torch.randn(2, WIDTH, dtype=dtype) if is_affine else (None, None)
    y, mean, rstd = torch.native_batch_norm(x, weight, bias, None, None, True, 0.1, 0.1)
    run = OPERATORS["NativeBatchNormBackward0"].run
    found, *_ = run((True, 0.1), x, weight, bias, mean, rstd)
    assert torch.equal(y, found)


@pytest.mark.parametrize(
    ("plane", "n_bytes"), [(2**15 - 1, 2), (2**15, 4), (2**31 - 1, 4), (2**31, 8)]
)
def test_positions_take_as_few_bytes_as_their_plane_needs(plane, n_bytes):
    """The largest comes back, too."""
    found = torch.tensor([0, 1, plane - 1])
    packed = positions.pack(found, plane)
    assert n_bytes == packed.values.element_size()
    assert torch.equal(found, positions.unpack(packed))


def test_a_pool_takes_what_it_found():
    """Of two that are equal, and of those that are no number, the same one."""
    x = torch.randint(0, 3, (2, 3, 8, 8)).float()
    x[0, 0, 0, 0] = float("nan")
    y, found = functional.max_pool2d_with_indices(x, 3, 2, 1)
    run = OPERATORS["MaxPool2DWithIndicesBackward0"].run
    assert torch.equal(y.view(torch.int32), run(None, x, found).view(torch.int32))
