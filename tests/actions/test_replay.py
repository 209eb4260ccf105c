"""What a recipe rebuilds: to the last bit, whatever lies in a layer, or an error."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional

import mimose

WIDTH = 64
ROWS = (32, 48, 32, 17)


class _Two(nn.Module):
    """Two products, for something to lie between."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)


class Activation(_Two):
    """GELU, a product of tensors and dropout."""

    def forward(self, x):
        """Map (rows, width) to the same."""
        h = self.a(x)
        return self.b(functional.dropout(functional.gelu(h) * torch.sigmoid(h), 0.2))


class Norm(_Two):
    """A layer norm of a module's own, and one whose epsilon is elsewhere."""

    def __init__(self):
        super().__init__()
        self.norm, self.other = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.small = 1e-5

    def forward(self, x):
        """Map (rows, width) to the same."""
        h = self.norm(torch.tanh(self.a(x)))
        weight, bias = self.other.weight, self.other.bias
        return self.b(functional.layer_norm(h, (WIDTH,), weight, bias, self.small))


class Shifted(_Two):
    """A number that no node saves."""

    def __init__(self):
        super().__init__()
        self.shift = 1.0

    def forward(self, x):
        """Map (rows, width) to the same."""
        h = torch.tanh(self.a(x))
        return self.b(h * (self.shift + h))


class InPlace(_Two):
    """Sums and activations in place."""

    def forward(self, x):
        """Map (rows, width) to the same."""
        h = functional.gelu(self.a(x))
        h += x
        return self.b(functional.relu_(h)) + h


class Bounded(_Two):
    """A bound that half precision rounds, so that what is beyond it does not show it.

    The bounded values are edited where autograd does not see it, too.
    """

    def __init__(self):
        super().__init__()
        self.half().requires_grad_()

    def forward(self, x):
        """Map (rows, width) to the same."""
        h = functional.hardtanh(self.a(x.half()), -0.1, 0.1)
        return self.b(functional.hardtanh_(h, -0.05, 0.05)).to(x.dtype)


class Gathered(_Two):
    """Rows picked by index, as experts do."""

    def forward(self, x):
        """Map (rows, width) to the same."""
        h = functional.silu(self.a(x))
        h = h[torch.arange(len(h) - 1, -1, -1)]
        return self.b(h * torch.sigmoid(h))


class Modulated(_Two):
    """Parts of one product, zero at first: views that are not known as such."""

    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(WIDTH, 3 * WIDTH)
        nn.init.zeros_(self.gates.weight)
        nn.init.zeros_(self.gates.bias)

    def forward(self, x):
        """Map (rows, width) to the same."""
        shift, scale, gate = self.gates(x).view(-1, 3, WIDTH).unbind(1)
        h = functional.silu(self.a(x) * scale + shift)
        return self.b(h * gate) + torch.tanh(gate) * torch.sigmoid(gate)


class Detached(_Two):
    """A tensor and the same without its graph; in later calls, another."""

    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        """Map (rows, width) to the same."""
        self.calls += 1
        h = functional.silu(self.a(x))
        other = h.detach() if self.calls < 4 else torch.full_like(h, 0.5)
        return self.b(h * other) + torch.tanh(h) * h


class Edited(_Two):
    """Edits one column of what nobody saves, where autograd does not see it."""

    is_on = False

    def forward(self, x):
        """Map (rows, width) to the same."""
        h = torch.tanh(self.a(x)) + x
        if self.is_on:
            with torch.no_grad():
                h[:, 5] = 0.0
        return self.b(functional.gelu(h * 2.0))


class Masked(_Two):
    """Adds a mask that it is given to what it computes."""

    def forward(self, x, mask, then=None):
        """Map (rows, width) to the same."""
        h = torch.tanh(self.a(x)) + mask * -8.0
        h = h if then is None else h + then
        return self.b(functional.gelu(h))


KINDS = (Activation, Norm, Shifted, InPlace, Bounded, Gathered, Modulated)


class Row(nn.Module):
    """Two layers of a kind, and a loss."""

    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(3)
        self.blocks = nn.ModuleList(kind() for _ in range(2))

    def forward(self, x, **options):
        """Map (rows, width) to one number."""
        for block in self.blocks:
            x = block(x, **options) + x
        return x.float().square().sum()


def _inputs(n_rows=32):
    generator = torch.Generator().manual_seed(5)
    return torch.randn(n_rows, WIDTH, generator=generator)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer_trains_the_same(toys, freed, always_selective, kind):
    """Whatever lies in it, over several shapes and another layout."""
    model = Row(kind)
    batches = [_inputs(n_rows) for n_rows in ROWS * 2]
    batches += [_inputs().t().contiguous().t(), _inputs()]
    found, _ = toys.compare(model, batches, **always_selective)
    assert [] == found
    assert max(freed) > 0


def test_what_only_looks_as_if_it_could_be_rebuilt(toys, always_selective):
    """It is found out before anything is let go, whatever earlier calls have shown."""
    model = Row(Detached)
    batches = [_inputs()] * 6
    found, _ = toys.compare(model, batches, **always_selective)
    assert [] == found


def test_a_number_that_is_changed_is_noticed(toys, freed, always_selective):
    """No node has saved it, so it is compared in each call."""
    model = Row(Shifted)
    twin = copy.deepcopy(model)
    batches = [_inputs()] * 3
    bare = toys.train(twin, batches)
    with mimose.attach(model, **always_selective):
        trained = toys.train(model, batches)
        n_freed = len(freed)
        for each in (model, twin):
            each.blocks[0].shift = 1.0625
        trained += toys.train(model, batches)
    assert [] == toys.differences(bare + toys.train(twin, batches), trained)
    assert len(freed) == n_freed + 2 * len(batches)


@pytest.mark.parametrize("what", ["weight", "input"])
def test_an_edit_in_between_is_an_error(what, always_selective):
    """Of a weight that others are rebuilt with, or of what the layer was given."""
    model = Row(Norm)
    with mimose.attach(model, **always_selective):
        x = _inputs().requires_grad_() * 1.0
        loss = model(x)
        with torch.no_grad():
            (model.blocks[0].norm.weight if what == "weight" else x).mul_(1.0)
        with pytest.raises(RuntimeError, match=r"edited in place|inplace operation"):
            loss.backward()


def test_the_users_own_hooks_have_what_is_saved(toys, freed, always_selective):
    """Under them nothing can be let go: the layer is recomputed, and that is said."""
    model = Row(Activation)
    bare = toys.train(copy.deepcopy(model), [_inputs()])
    hooks = torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda t: t)
    with mimose.attach(model, **always_selective), hooks:
        trained = toys.train(model, [_inputs()])
    assert [] == toys.differences(bare, trained)
    assert [] == freed


def _gradients(model, *args, **options):
    model.zero_grad()
    loss = model(*args, **options)
    loss.backward()
    gradients = (p.grad for p in model.parameters())
    return [loss.detach(), *(g for g in gradients if g is not None)]


def _same(one, other):
    return all(itertools.starmap(torch.equal, zip(one, other, strict=True)))


def test_an_edit_that_begins_later_is_an_error(always_selective):
    """In one column alone; then the layer does not run so any more."""
    model = Row(Edited)
    bare = copy.deepcopy(model)
    with mimose.attach(model, **always_selective) as session:
        for _ in range(4):
            assert _same(_gradients(model, _inputs()), _gradients(bare, _inputs()))
        model.blocks[1].is_on = bare.blocks[1].is_on = True
        with pytest.raises(
            mimose.RecomputationError, match="rebuilt to something else"
        ):
            _gradients(model, _inputs())
        for _ in range(2):
            assert _same(_gradients(model, _inputs()), _gradients(bare, _inputs()))
    assert len(session.records) == 7


def test_a_mask_that_hides_nothing_at_first(always_selective):
    """It is not taken for what gave the same by chance."""
    model = Row(Masked)
    bare = copy.deepcopy(model)
    nothing, something = torch.zeros(32, WIDTH), torch.zeros(32, WIDTH)
    something[16:, 32:] = 1.0
    with mimose.attach(model, **always_selective):
        for mask in [nothing] * 4 + [something] * 4:
            found, expected = (
                _gradients(m, _inputs(), mask=mask) for m in (model, bare)
            )
            assert _same(found, expected)


def test_empty_and_single_rows(always_selective):
    """Nothing is held of nothing."""
    model = Row(Norm)
    bare = copy.deepcopy(model)
    with mimose.attach(model, **always_selective):
        for n in (0, 64, 64, 1, 64, 0, 64):
            assert _same(_gradients(model, _inputs(n)), _gradients(bare, _inputs(n)))
