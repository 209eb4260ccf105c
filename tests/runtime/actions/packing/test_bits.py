"""Signs and places in windows stand for values: gradients stay what they are."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

import mimose

LAYOUTS = [torch.contiguous_format, torch.channels_last]
POOLS = {
    "resnet": {"kernel_size": 3, "stride": 2, "padding": 1},
    "vgg": {"kernel_size": 2},
    "ceiling": {"kernel_size": 3, "stride": 2, "ceil_mode": True},
    "dilated": {"kernel_size": 3, "stride": 1, "padding": 1, "dilation": 2},
    "oblong": {"kernel_size": (2, 5), "stride": (3, 2), "padding": (0, 2)},
}


class _Layer(nn.Module):
    """A convolution, which nobody runs again, and what is tried behind it."""

    def __init__(self, run):
        super().__init__()
        self.convolution = nn.Conv2d(8, 8, 3, padding=1)
        self.run = run

    def forward(self, x):
        return self.run(self.convolution(x))


def _model(run, dtype=torch.float32):
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 8, 3, padding=1)
    return nn.Sequential(stem, *(_Layer(run) for _ in range(2))).to(dtype)


def _gradients(toys, model, x, **options):
    """Return the gradients of a third step, and the bytes that its forward held."""
    session = mimose.attach(model, "1TiB", units=_Layer, **options) if options else None
    for _ in range(3):
        model.zero_grad()
        x.grad = None
        with toys.StorageTracker() as tracker:
            loss = model(x).float().square().sum()
            held = tracker.live_bytes
        loss.backward()
    if session is not None:
        assert {action for r in session.records for action in r.actions} == {"pool"}
        session.detach()
    named = model.named_parameters()
    grads = [p.grad for name, p in named if not name.endswith("convolution.weight")]
    return [x.grad.clone(), *grads], held


def _check(toys, model, x):
    """Check that gradients are the bare model's, and less is held.

    Those of the layers' convolutions are not: what these read was averaged.
    """
    x = x.clone().requires_grad_()
    bare, most = _gradients(toys, copy.deepcopy(model), x)
    options = {"actions": ("keep", "pool", "recompute"), "planner": toys.Always("pool")}
    found, held = _gradients(toys, model, x, **options)
    assert all(
        torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
        for one, other in zip(bare, found, strict=True)
    )
    assert held < most


@pytest.mark.parametrize("pool", POOLS)
@pytest.mark.parametrize(
    ("dtype", "layout"), [(torch.float32, LAYOUTS[0]), (torch.bfloat16, LAYOUTS[1])]
)
def test_a_relu_and_a_max_pool_behind_it_need_no_values(toys, dtype, layout, pool):
    """One bit an element for both, half a byte a window; the very same gradient."""
    model = _model(lambda x: functional.max_pool2d(x.relu(), **POOLS[pool]), dtype)
    x = torch.randn(3, 3, 29, 31).to(dtype).contiguous(memory_format=layout)
    _check(toys, model.to(memory_format=layout), x)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_numbers_that_are_none(toys, value):
    """A ReLU lets the gradient through where its result is not a number."""
    x = torch.randn(3, 3, 29, 31)
    x[0, :, 3:9, 3:9] = value
    _check(toys, _model(lambda x: functional.max_pool2d(x.relu(), 3, 2, 1)), x)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: functional.avg_pool2d(x, 3),
        lambda x: functional.adaptive_avg_pool2d(x, (3, 4)),
        lambda x: functional.adaptive_max_pool2d(x, (3, 4)),
        lambda x: x.transpose(0, 2).relu(),
        lambda x: x[1:3].relu_(),
    ],
)
def test_pools_read_nothing_of_their_input(toys, run):
    """Their gradients are the same without it, and so are those of parts of tensors."""
    _check(toys, _model(run), torch.randn(3, 3, 28, 30))
