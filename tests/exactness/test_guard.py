"""Weights and modes that change between a forward and its backward."""

import copy

import pytest
import torch

import mimose


def _gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def _attach(model, planner="full"):
    return mimose.attach(model, "1TiB", planner=planner, meter="prediction")


def test_a_step_between_forward_and_backward_is_refused(toys):
    """Weights that an optimizer moved would be recomputed with: an error says so."""
    model = toys.chain(3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with _attach(model):
        model(toys.inputs()).backward()
        loss = model(toys.inputs())
        optimizer.step()
        for _ in range(2):
            with pytest.raises(mimose.ChangedWeightsError, match="an optimizer step"):
                loss.backward(retain_graph=True)
        del loss
        model.zero_grad()
        model(toys.inputs()).backward()
    assert [] == toys.leftovers(model)


def test_a_functional_call_is_refused_where_it_would_be_recomputed(toys):
    """The weights lent to a call are gone in backward; a layer that keeps is exact."""
    model = toys.chain(3)
    lent = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    call = torch.func.functional_call
    torch.manual_seed(0)
    expected = torch.autograd.grad(call(model, lent, toys.inputs()), [*lent.values()])
    with _attach(model, "none"):
        torch.manual_seed(0)
        loss = call(model, lent, toys.inputs())
        actual = torch.autograd.grad(loss, [*lent.values()])
    assert all(map(torch.equal, expected, actual))
    with _attach(model):
        loss = call(model, lent, toys.inputs())
        with pytest.raises(mimose.ChangedWeightsError, match="functional_call"):
            loss.backward()


def test_a_step_within_the_backward_is_none_of_its_business(toys):
    """Optimizers that step layer by layer as gradients come are exact."""

    def train(model):
        torch.manual_seed(1)
        optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def update(parameter):
            optimizers[parameter].step()
            parameter.grad = None

        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            model(toys.inputs()).backward()
        return [p.detach().clone() for p in model.parameters()]

    model = toys.chain(4)
    expected = train(copy.deepcopy(model))
    with _attach(model):
        actual = train(model)
    assert all(map(torch.equal, expected, actual))


@pytest.mark.parametrize("part", ["all", "a child"])
def test_modes_changed_before_the_backward_are_those_of_the_forward(toys, part):
    """`model.eval()` before `backward()` changes nothing, and stays in force."""

    def step(model):
        torch.manual_seed(3)
        if part == "a child":
            model.blocks[1].dropout.eval()
        loss = model(toys.inputs())
        changed = model if part == "all" else model.blocks[1].dropout
        changed.train(not changed.training)
        modes = [module.training for module in model.modules()]
        loss.backward()
        assert modes == [module.training for module in model.modules()]
        return _gradients(model)

    model = toys.chain(3)
    expected = step(copy.deepcopy(model))
    with _attach(model):
        actual = step(model)
    for name, gradient in expected.items():
        assert torch.equal(gradient, actual[name]), name


def test_a_buffer_lent_to_a_call_is_missed_in_backward(toys):
    """Buffers count like weights, but for those that a forward changes anyway."""

    class Scaled(torch.nn.Module):
        """A block scaled by a buffer."""

        def __init__(self, width):
            super().__init__()
            self.linear = torch.nn.Linear(width, width)
            self.register_buffer("scale", torch.ones(()))

        def forward(self, x):
            """Run it."""
            return x + torch.relu(self.linear(x)) * self.scale

    model = toys.chain(3, make=Scaled)
    with _attach(model):
        model(toys.inputs()).backward()
        loss = model(toys.inputs())
        model.blocks[1].scale = torch.tensor(2.0)
        with pytest.raises(mimose.ChangedWeightsError, match=r"blocks\.1"):
            loss.backward()


def test_another_part_of_the_model_may_change_meanwhile(toys):
    """A teacher's average, another tower's step: what is recomputed is untouched."""

    class Towers(torch.nn.Module):
        """Two chains on one input, each with a loss."""

        def __init__(self):
            super().__init__()
            self.blocks = toys.chain(2).blocks
            self.others = toys.chain(2).blocks

        def forward(self, x):
            """Run it."""
            first, second = x, x
            for block, other in zip(self.blocks, self.others, strict=True):
                first, second = block(first), other(second)
            return first.square().mean(), second.square().mean()

    def train(model):
        torch.manual_seed(4)
        optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
        for _ in range(3):
            model.zero_grad()
            first, second = model(toys.inputs())
            first.backward()
            optimizer.step()
            second.backward()
        return _gradients(model)

    model = Towers()
    expected = train(copy.deepcopy(model))
    with _attach(model):
        actual = train(model)
    assert all(torch.equal(expected[name], actual[name]) for name in expected)
