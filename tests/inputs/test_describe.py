"""What is known of a step before it runs."""

import torch
from toys import Chain

from mimose.inputs.describe import Describer

CPU = torch.device("cpu")


def test_freezing_and_evaluating_layers_make_another_context(toys):
    """What is trained, and what is in training mode, changes what a layer holds."""
    model, x = toys.chain(3), toys.inputs()
    reader = Describer(model, CPU)

    def context():
        return reader.arrive((x,), {})[0].context

    plain = context()
    model.blocks[0].requires_grad_(False)
    frozen = context()
    model.blocks[1].dropout.eval()
    evaluated = context()
    assert 3 == len({plain, frozen, evaluated})
    model.blocks[1].dropout.train()
    assert frozen == context()
    model.blocks[0].requires_grad_(True)
    assert plain == context()


class _Ragged(Chain):
    """A chain on jagged inputs."""

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.values().square().mean()


def test_jagged_inputs_are_planned(toys, meter):
    """Their sizes are the batch's and the values'; results stay exact."""
    model = _Ragged(3)
    batches = [
        torch.nested.nested_tensor(
            [toys.inputs(n), toys.inputs(5)], layout=torch.jagged
        )
        for n in (8, 24, 16, 12, 20, 32, 28, 10) * 2
    ]
    found, session = toys.compare(model, batches, meter=meter)
    assert [] == found
    assert "plan" == session.records[-1].phase
    assert {"x.1": 15} == dict(session.records[-1].shape)
