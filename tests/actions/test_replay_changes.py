"""What changes after a recipe was made: another recipe, or an error."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import mimose
from mimose.exceptions import RecomputationError
from mimose.planners import everywhere

WIDTH = 64


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)


class Edited(_Layer):
    """Edits one column of what nobody saves, where autograd does not see it."""

    is_on = False

    def forward(self, x):
        """Map (rows, width) to the same."""
        h = torch.tanh(self.a(x)) + x
        if self.is_on:
            with torch.no_grad():
                h[:, 5] = 0.0
        return self.b(functional.gelu(h * 2.0))


class Masked(_Layer):
    """Adds a mask that it is given to what it computes."""

    def forward(self, x, mask, then=None):
        """Map (rows, width) to the same."""
        h = torch.tanh(self.a(x)) + mask * -8.0
        h = h if then is None else h + then
        return self.b(functional.gelu(h))


class Normed(_Layer):
    """A norm between two products."""

    def forward(self, x):
        """Map (rows, width) to the same."""
        return self.b(functional.gelu(self.norm(self.a(x))))


class Model(nn.Module):
    """One layer behind something that has a graph.

    Args:
        layer: The layer.
    """

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, **options):
        """Return what the layer does."""
        return self.layer(x * 1.0, **options)


def _attach(model, **others):
    action = "selective_all"
    options = {"actions": [action], "planner": everywhere(action), **others}
    return mimose.attach(model, "1TiB", **{"layers": ["layer"], **options})


def _x(n_rows=128):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(n_rows, WIDTH, generator=generator)
    return x.requires_grad_()  # a sum has its operands on the graph then


def _gradients(model, *args, **options):
    model.zero_grad()
    loss = model(*args, **options).square().sum()
    loss.backward()
    gradients = (p.grad for p in model.parameters())
    return [loss.detach(), *(g for g in gradients if g is not None)]


def _same(one, other):
    return all(itertools.starmap(torch.equal, zip(one, other, strict=True)))


def test_an_edit_that_begins_later_is_an_error():
    """In one column alone; then the layer does not run so any more."""
    model = Model(Edited())
    bare = copy.deepcopy(model)
    with _attach(model) as session:
        for _ in range(4):
            assert _same(_gradients(model, _x()), _gradients(bare, _x()))
        model.layer.is_on = bare.layer.is_on = True
        with pytest.raises(RecomputationError, match="rebuilt to something else"):
            _gradients(model, _x())
        for _ in range(2):
            assert _same(_gradients(model, _x()), _gradients(bare, _x()))
    assert len(session.records) == 7


def test_a_mask_that_hides_nothing_at_first():
    """It is not taken for what gave the same by chance."""
    model = Model(Masked())
    bare = copy.deepcopy(model)
    nothing, something = torch.zeros(128, WIDTH), torch.zeros(128, WIDTH)
    something[64:, 32:] = 1.0
    with _attach(model):
        for mask in [nothing] * 4 + [something] * 4:
            found, expected = (_gradients(m, _x(), mask=mask) for m in (model, bare))
            assert _same(found, expected)


def test_empty_and_single_rows():
    """Nothing is held of nothing."""
    model = Model(Normed())
    bare = copy.deepcopy(model)
    with _attach(model):
        for n in (0, 64, 64, 1, 64, 0, 64):
            assert _same(_gradients(model, _x(n)), _gradients(bare, _x(n)))
