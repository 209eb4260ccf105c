"""One call under `recompute` equals a plain call."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from mimose.exact.changes import SavedBuffers, running_statistics
from mimose.run.actions.checkpointing import recompute


def _gradients(module, run, *inputs):
    """Return output, gradients of inputs and parameters, and random state."""
    torch.manual_seed(1)
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    output = run(*inputs)
    output.square().sum().backward()
    grads = [x.grad for x in inputs] + [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    return [output.detach(), *grads, torch.get_rng_state()]


def _equal(expected, actual):
    return [
        one is other if one is None or other is None else torch.equal(one, other)
        for one, other in zip(expected, actual, strict=True)
    ]


class _Named(nn.Module):
    """Takes tensors in every way a call can."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x, scale=1.0, *, shift=None, extra=None, flag=False):
        y = self.dropout(self.linear(x)) * scale
        if shift is not None:
            y = y + shift
        if extra is not None:
            y = y * extra["a"][0] - extra["b"]
        return y if flag else y.tanh()


@pytest.mark.parametrize(
    "call",
    [
        lambda f, x, y, z: f(x),
        lambda f, x, y, z: f(x, 2.0, flag=True),
        lambda f, x, y, z: f(x, shift=y),
        lambda f, x, y, z: f(x=x, shift=y, flag=True),
        lambda f, x, y, z: f(x, extra={"a": [y], "b": z}),
        lambda f, x, y, z: f(x, shift=y, extra={"a": (z, None), "b": y}),
    ],
)
def test_arguments_of_every_kind(call):
    """Positional, keyword and nested tensors all get their gradients."""
    torch.manual_seed(0)
    module = _Named()
    x, y, z = (torch.randn(3, 4, requires_grad=True) for _ in range(3))

    def plain(*tensors):
        return call(module, *tensors)

    def again(*tensors):
        def forward(*args, **kwargs):
            return recompute(module.forward, args, kwargs)

        return call(forward, *tensors)

    expected = _gradients(module, plain, x, y, z)
    assert all(_equal(expected, _gradients(module, again, x, y, z)))


def test_nothing_is_kept(toys):
    """Under `recompute` only the output is alive; the backward runs it again."""
    module, x = toys.Block(), torch.randn(6, 16)
    with toys.StorageTracker() as tracker:
        output = recompute(module.forward, (x,), {})
        assert tracker.bytes_made(output) == tracker.live_bytes


def test_buffers_change_once():
    """Running statistics take a batch in once, in the first call."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    twin = copy.deepcopy(module)
    x = torch.randn(6, 4, requires_grad=True)
    expected = _gradients(module, module, x)
    actual = _gradients(
        twin,
        lambda x: recompute(twin.forward, (x,), {}, buffers=_statistics(twin)),
        x,
    )
    assert all(_equal(expected, actual))
    for (name, one), (_, other) in zip(
        module.named_buffers(), twin.named_buffers(), strict=True
    ):
        assert torch.equal(one, other), name
    assert 1 == int(twin[1].num_batches_tracked)


def test_two_backwards_recompute_twice():
    """With the graph retained, a second backward is as right as the first."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    x = torch.randn(6, 4)
    output = recompute(module.forward, (x,), {}, buffers=_statistics(module)).sum()
    output.backward(retain_graph=True)
    first = [p.grad.clone() for p in module.parameters()]
    output.backward()
    assert all(
        _equal([2 * grad for grad in first], [p.grad for p in module.parameters()])
    )
    assert 1 == int(module[1].num_batches_tracked)


def test_on_recompute_is_called_in_backward_only():
    """The first call is not told of; the recomputation is, and its result is used."""
    module, x = nn.Linear(4, 4), torch.randn(3, 4, requires_grad=True)
    calls = []

    def noted(forward, given):
        calls.append("recomputed")
        return forward()

    output = recompute(module.forward, (x,), {}, on_recompute=noted)
    assert [] == calls
    output.sum().backward()
    assert ["recomputed"] == calls


def test_early_stop_leaves_out_what_is_not_needed(toys):
    """A last product whose result nobody saved is run again only without it."""
    module, x = toys.Block(rate=0.0), torch.randn(6, 16)

    def flops(early_stop):
        output = recompute(module.forward, (x,), {}, early_stop=early_stop)
        with FlopCounterMode(display=False) as counter:
            output.sum().backward()
        return counter.get_total_flops()

    assert 2 * 6 * 32 * 16 == flops(False) - flops(True)


def test_what_a_layer_adds_to_a_list_is_the_callers():
    """A list among the arguments is the caller's own; backward leaves it alone."""
    linear, x = nn.Linear(4, 4), torch.randn(3, 4)

    def forward(x, losses):
        y = linear(x).tanh()
        losses.append(y.square().mean() * (1 + len(losses)))
        return y

    results = []
    for run in (forward, lambda *args: recompute(forward, args, {})):
        losses = [torch.ones(())]
        y = run(x, losses)
        (y.sum() + sum(losses)).backward()
        results.append([len(losses), losses[1].detach(), linear.weight.grad])
        linear.zero_grad()
    assert results[0][0] == results[1][0] == 2
    assert all(map(torch.equal, results[0][1:], results[1][1:]))


def _statistics(module):
    return SavedBuffers(running_statistics(module.modules()))
