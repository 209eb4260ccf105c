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


@pytest.mark.parametrize("planner", ["none", "full"])
def test_weights_lent_to_a_call_are_found_again(toys, planner):
    """`functional_call` takes them away before the backward; gradients are theirs."""
    model = toys.chain(3)
    lent = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    call = torch.func.functional_call
    torch.manual_seed(0)
    expected = torch.autograd.grad(call(model, lent, toys.inputs()), [*lent.values()])
    with _attach(model, planner):
        for _ in range(2):
            torch.manual_seed(0)
            loss = call(model, lent, toys.inputs())
            actual = torch.autograd.grad(loss, [*lent.values()])
            assert all(map(torch.equal, expected, actual))


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


@pytest.mark.parametrize("kind", ["buffer", "attribute"])
def test_tensors_of_its_own_that_change_before_the_backward(toys, kind):
    """One that is replaced is found again; one that is edited is missed, by name."""

    class Scaled(torch.nn.Module):
        """A block scaled by a tensor."""

        def __init__(self, width):
            super().__init__()
            self.linear = torch.nn.Linear(width, width)
            if kind == "buffer":
                self.register_buffer("scale", torch.ones(()))
            else:
                self.scale = torch.ones(())

        def forward(self, x):
            """Run it."""
            return x + torch.relu(self.linear(x)) * self.scale

    model = toys.chain(3, make=Scaled)
    model(toys.inputs()).backward()
    expected = _gradients(model)
    with _attach(model):
        for _ in range(2):
            model.zero_grad()
            loss = model(toys.inputs())
            mine, model.blocks[1].scale = model.blocks[1].scale, torch.tensor(2.0)
            loss.backward()
            model.blocks[1].scale = mine
            for name, gradient in _gradients(model).items():
                assert torch.equal(gradient, expected[name]), name
        loss = model(toys.inputs())
        model.blocks[1].scale.add_(1.0)
        with pytest.raises(mimose.ChangedWeightsError, match=r"'scale' of blocks\.1"):
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
