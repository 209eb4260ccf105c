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


class _NormBlock(nn.Module):
    """A convolution-like block with running statistics."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(torch.relu(self.norm(self.linear(x))))


class _Repeated(nn.Module):
    """One block, called three times, around another."""

    def __init__(self, block):
        super().__init__()
        self.shared = block(16)
        self.other = block(16)

    def forward(self, x):
        return self.shared(self.other(self.shared(self.shared(x)))).square().mean()


def test_shared_modules(toys, meter):
    """Each call of one module has an action."""
    torch.manual_seed(3)
    model = _Repeated(_NormBlock)
    options = {"layers": ["shared", "other"], "meter": meter}
    found, session = _compared(toys, model, [toys.inputs()] * 7, **options)
    assert [] == found
    assert 4 == len(session.records[-1].actions)
    assert {21} == {int(model.shared.norm.num_batches_tracked)}


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


class _Many(nn.Module):
    """Takes and returns tuples, dicts, None and things that are no tensors."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, state, extra=None, *, options=None):
        x, carried, _, _ = state["all"]
        y = self.dropout(torch.tanh(self.linear(x)))
        if extra is not None:
            y = y * extra
        if options is not None:
            y = y + options["shift"][0] * options["scale"]
        return {
            "all": (y, carried, None, "text"),
            "mean": y.mean(),
            "count": x.shape[0],
        }


class _ManyChain(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(_Many(16) for _ in range(4))

    def forward(self, x, *, batch):
        state = {"all": (x, batch["carried"], None, "text")}
        total = 0.0
        for i, block in enumerate(self.blocks):
            options = {"shift": [batch["shift"]], "scale": 0.5} if i % 2 else None
            state = block(state, x if i > 1 else None, options=options)
            total = total + state["mean"]
        return {"loss": [state["all"][0].square().mean() + total], "name": "many"}


class _Unpacked(nn.Module):
    """Makes a loss of what a chain with structured outputs returns."""

    def __init__(self):
        super().__init__()
        self.chain = _ManyChain()

    def forward(self, x, batch):
        return self.chain(x, batch=batch)["loss"][0]


def test_structured_arguments_and_outputs(toys, meter):
    """Tensors anywhere in arguments and outputs are followed; the rest passes."""
    torch.manual_seed(3)
    model = _Unpacked()
    x = toys.inputs()
    extra = {
        "carried": torch.ones(8, 16, requires_grad=True),
        "shift": torch.full((16,), 0.3, requires_grad=True),
    }
    found, session = _compared(toys, model, [(x, extra)] * 7, meter=meter)
    assert [] == found
    assert session.records[-1].observed_peak_bytes is not None


class _Edits(nn.Module):
    """Edits its own input in place."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x):
        x.mul_(0.5)
        return x + torch.tanh(self.linear(x))


class _MixedChain(nn.Module):
    """Blocks, one of which edits its input."""

    def __init__(self, block):
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList([block(16), _Edits(16), block(16), block(16)])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x) * 1.0
        return x.square().mean()


def test_a_layer_that_edits_its_own_input(toys, meter, caplog):
    """It is found in the first step, kept from then on, and named."""
    torch.manual_seed(3)
    model = _MixedChain(toys.Block)
    options = {"layers": "blocks", "meter": meter}
    mixed = toys.FixedActions(1, 0, 1, 0)
    found, session = toys.compare(model, [toys.inputs()] * 7, planner=mixed, **options)
    assert [] == found
    assert ["blocks.1"] == list(session.summary().kept_units)
    assert {"keep"} == {record.actions[1] for record in session.records}
    assert [1, 0, 0, 0, 0, 0, 0] == [record.retries for record in session.records]
    assert "blocks.1" in caplog.text
    assert "blocks.1" in session.report()


class _FirstEdits(nn.Module):
    """The first layer edits the batch itself."""

    def __init__(self, block):
        super().__init__()
        self.blocks = nn.ModuleList([_Edits(16), block(16), block(16)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_a_layer_that_edits_the_batch(toys):
    """An edited batch cannot be run again: an error says so once, then it is kept."""
    torch.manual_seed(3)
    model = _FirstEdits(toys.Block)
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


class _Sometimes(nn.Module):
    """Runs some of its blocks, in their order."""

    def __init__(self, block):
        super().__init__()
        self.stem = nn.Linear(16, 16)
        self.blocks = nn.ModuleList(block(16) for _ in range(4))
        self.runs = range(4)

    def forward(self, x):
        x = self.stem(x)
        for i in self.runs:
            x = self.blocks[i](x)
        return x.square().mean()


def _train_sometimes(toys, model, batch, runs):
    noted = []
    for model.runs in runs:
        noted += toys.train(model, [batch])
    return noted


def test_a_planned_step_may_run_fewer_layers(toys, meter):
    """It is exact, and its record names what ran."""
    torch.manual_seed(3)
    model = _Sometimes(toys.Block)
    twin, batch = toys.copy.deepcopy(model), toys.inputs()
    runs = [range(4)] * 6 + [(0, 2, 3), (1, 2), (3,), range(4)]
    with toys.untracked():
        expected = _train_sometimes(toys, twin, batch, runs)
    with mimose.attach(model, "1TiB", meter=meter) as session:
        actual = _train_sometimes(toys, model, batch, runs)
    assert [] == toys.differences(expected, actual)
    planned = list(session.records)[6:]
    names = [tuple(f"blocks.{i}#0" for i in run) for run in runs[6:]]
    assert names == [record.events for record in planned]


def test_a_planned_step_that_runs_more_layers(toys, meter):
    """It says so and is exact; those behind it know them."""
    torch.manual_seed(3)
    model = _Sometimes(toys.Block)
    twin, batch = toys.copy.deepcopy(model), toys.inputs()
    runs = [(0, 2, 3)] * 6 + [range(4)] * 4
    with toys.untracked():
        expected = _train_sometimes(toys, twin, batch, runs)
    with mimose.attach(model, "1TiB", meter=meter) as session:
        actual = _train_sometimes(toys, model, batch, runs)
    assert [] == toys.differences(expected, actual)
    first, *rest = list(session.records)[6:]
    assert "more layers ran" in first.reason
    assert ("fallback", None) == (first.phase, first.predicted_peak_bytes)
    assert [4] * 3 == [len(record.actions) for record in rest]
