"""Training a model at any batch size."""

import math

import torch
from torch import nn

from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.training import Point, Training


class _Losing(nn.Module):
    """A layer, with a loss or without."""

    def __init__(self, has_loss):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self._has_loss = has_loss

    def forward(self, x):
        """Return a loss, or all outputs."""
        out = self.layer(x)
        return {"loss": out.square().sum()} if self._has_loss else out


def test_a_model_without_a_loss_is_told_of():
    """A model without a loss is told of: the mean of its output is trained."""
    for has_loss in (True, False):
        training = Training(
            _Losing(has_loss),
            torch.rand(4, 3),
            METHODS["none"],
            device=torch.device("cpu"),
            optimizer="sgd",
        )
        training.step(Point(2))
        assert any("no loss" in note for note in training.notes()) != has_loss


def test_a_step_without_a_plan_has_no_seconds(toys):
    """A session recomputes all of it, which is not what the method does."""
    training = Training(
        *toys.blocks(),
        METHODS["mimose"],
        device=torch.device("cpu"),
        optimizer="sgd",
    )
    training.attach(2**40, None, refine=False)
    took = [training.step(Point(size)) for size in (2, 3, 4) * 4]
    phases = [each.phase for each in training.session.records]
    training.close()
    assert {"collect", "plan"} <= set(phases)
    for seconds, phase in zip(took, phases, strict=True):
        assert math.isnan(seconds) == (phase in ("collect", "fallback"))
