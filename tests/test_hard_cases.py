"""Models that are not a plain chain of plain layers: all exact, whatever the plan."""

import pytest
import torch
from torch import nn

import mimose


def _compared(toys, model, batches, **options):
    """Train under a planner; mixed plans come from the toss of a coin."""
    chosen = toys.RandomPlanner()
    found, session = toys.compare(model, batches, planner=chosen, **options)
    planned = [record for record in session.records if record.phase == "plan"]
    assert {"keep", "recompute"} == set(planned[-1].actions)
    return found, session


def test_frozen_first_layers(toys, meter):
    """Layers without a gradient take no part in the backward and are no calls."""
    model = toys.chain(5)
    for frozen in (model.stem, model.blocks[0], model.blocks[1]):
        frozen.requires_grad_(False)
    found, session = _compared(toys, model, [toys.inputs()] * 7, meter=meter)
    assert [] == found
    assert 3 == len(session.records[-1].actions)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_lora(toys, meter):
    """Adapters on frozen layers train as without a session."""
    peft = pytest.importorskip("peft", reason="peft is not installed")
    model = toys.zoo_model("bert")
    config = peft.LoraConfig(
        r=2, lora_alpha=4, lora_dropout=0.1, target_modules=["query", "value"]
    )
    torch.manual_seed(9)
    model = peft.get_peft_model(model, config).train()
    batches = toys.zoo_batches("bert", 10)
    found, session = _compared(toys, model, batches, meter=meter)
    assert [] == found
    assert 3 == session.summary().layers


class _Edits(nn.Module):
    """Edits its own input in place."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        x.mul_(0.5)
        return x + torch.tanh(self.linear(x))


class _Row(nn.Module):
    """Blocks, one of which edits its input."""

    def __init__(self, *blocks):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x) * 1.0
        return x.square().mean()


def test_a_layer_that_edits_its_own_input(toys, meter, caplog):
    """It is found in the first step, kept from then on, and named."""
    torch.manual_seed(3)
    model = _Row(toys.Block(), _Edits(16), toys.Block(), toys.Block())
    options = {"layers": "blocks", "meter": meter}
    mixed = toys.FixedActions(1, 0, 1, 0)
    found, session = toys.compare(model, [toys.inputs()] * 7, planner=mixed, **options)
    assert [] == found
    assert ["blocks.1"] == list(session.summary().kept_units)
    assert {"keep"} == {record.actions[1] for record in session.records}
    assert [1, 0, 0, 0, 0, 0, 0] == [record.retries for record in session.records]
    assert "blocks.1" in caplog.text
    assert "blocks.1" in session.report()


def test_a_layer_that_edits_the_batch(toys):
    """An edited batch cannot be run again: an error says so once, then it is kept."""
    torch.manual_seed(3)
    model = _Row(_Edits(16), toys.Block(), toys.Block())
    twin = toys.copy.deepcopy(model)
    with mimose.attach(model, "1TiB", units="blocks") as session:
        with pytest.raises(mimose.NotRecomputableError, match="run the step again"):
            model(toys.inputs())
        torch.manual_seed(1)
        actual = model(toys.inputs())
        actual.backward()
    torch.manual_seed(1)
    assert torch.equal(twin(toys.inputs()), actual)
    assert "blocks.0" in session.summary().kept_units
