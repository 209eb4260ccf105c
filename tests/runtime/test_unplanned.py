"""A session that plans nothing says why, once, and what to call."""

import copy
import logging

import pytest
import torch
from torch import nn

import mimose


class _Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return x + torch.tanh(self.linear(x))


class _Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(_Layer() for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class _Around(nn.Module):
    """A wrapper whose forward calls the layers and not the model."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return _Model.forward(self.model, x)


def _train(model, n_steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for length in range(2, 2 + n_steps):
        output = model(torch.randn(2, length, 8))
        if output.requires_grad:
            output.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def _warnings(caplog):
    return [r for r in caplog.records if r.levelno == logging.WARNING]


def _evaluation(model):
    _train(model.eval())


def _no_grad(model):
    with torch.no_grad():
        _train(model)


def _copy(model):
    _train(copy.deepcopy(model), n_steps=9)


def _other(model):
    del model
    _train(nn.Sequential(_Model(), nn.Linear(8, 2)), n_steps=9)


def _wrapper(model):
    _train(_Around(model))


def _frozen(model):
    head = nn.Linear(8, 2)
    model.requires_grad_(False)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.01)
    for length in (2, 3):
        head(model(torch.randn(2, length, 8))).sum().backward()
        optimizer.step()


def _replaced(model):
    model.layers[1] = _Layer()
    _train(model)


def _later(model):
    _train(model)
    _train(model.eval())


MISTAKES = [
    (_evaluation, "model.train()"),
    (_later, "model.train()"),
    (_no_grad, "torch.no_grad()"),
    (_copy, "attach to the model that you train"),
    (_other, "attach to the model that you train"),
    (_wrapper, "call the attached model itself"),
    (_frozen, "requires_grad_()"),
    (_replaced, "layers.1"),
]


@pytest.mark.parametrize(("mistake", "remedy"), MISTAKES)
def test_mistake_is_said_once_with_its_remedy(mistake, remedy, caplog):
    """One message as the user trains, and a line in the report."""
    model = _Model()
    with mimose.attach(model, "8GiB") as session:
        mistake(model)

        [message] = _warnings(caplog)
        report = " ".join(session.report().split())

    assert remedy in message.getMessage()
    assert remedy in report
    assert len(_warnings(caplog)) == 1


def test_session_that_saw_nothing_says_so():
    """The report of a session without any forward says what to call."""
    with mimose.attach(_Model(), "8GiB") as session:
        assert "model.train()" in session.report()


def test_session_without_an_optimizer_speaks_as_it_ends(caplog):
    """A loop that updates weights by hand gets the message at detach."""
    model = _Model().eval()
    with mimose.attach(model, "8GiB"):
        model(torch.randn(2, 3, 8)).sum().backward()
        assert _warnings(caplog) == []

    assert "model.train()" in caplog.text


def test_ordinary_training_says_nothing(caplog):
    """Evaluations, other models and a copy that is trained beside are no mistakes."""
    model, critic, other = _Model(), _Model(), nn.Linear(8, 8)
    with mimose.attach(model, "8GiB") as session:
        for _ in range(3):
            _train(other, n_steps=1)
            _train(model)
            _train(critic, n_steps=2)
            model.eval()
            with torch.no_grad():
                model(torch.randn(2, 3, 8))
            model(torch.randn(2, 3, 8)).sum().backward()  # a saliency map
            model.train()

        assert session.summary().unplanned == ()
    assert _warnings(caplog) == []


def test_lost_session_is_found():
    """A session that nobody kept can be found by its model, and ended."""
    model = _Model()
    mimose.attach(model, "8GiB")
    with pytest.raises(mimose.AlreadyAttachedError, match=r"mimose\.detach\(model\)"):
        mimose.attach(model, "8GiB")
    session = mimose.session_of(_Around(model))
    assert "3 layers" in repr(session)

    mimose.detach(model)
    mimose.detach(model)

    assert "detached" in repr(session)
    assert mimose.session_of(model) is None
    assert mimose.session_of(copy.deepcopy(model)) is None
    mimose.attach(model, "8GiB").detach()
