"""Compiled layers are planned from the outside; compiled models are refused."""

import functools
import itertools
import random

import pytest
import torch
import transformers
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.functional import gelu
from torch.utils.flop_counter import FlopCounterMode

import mimose
from mimose.exceptions import MimoseError
from mimose.planners.actions import EXACT_MENU

KEEP, RECOMPUTE = EXACT_MENU.names

BACKEND = "aot_eager"  # needs no compiler for C++
# dynamo itself looks at .grad of what it traces
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
ROWS = 4 * [8, 12, 5, 20]


@pytest.fixture(autouse=True)
def _afresh():
    """Compile nothing that another test has compiled."""
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


class Around(nn.Module):
    """A block that is not compiled around one that is."""

    def __init__(self, toys, width):
        super().__init__()
        self.inner = toys.Block(width)

    def forward(self, x):
        """Add a little to what is inside."""
        return torch.tanh(self.inner(x))


class _Gated(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return x + self.b(self.gate(self.a(x)))


def _calling(how):
    """Return a layer that calls a compiled function, which may be out of sight."""
    compiled = torch.compile(lambda x: gelu(x) * torch.sigmoid(x), backend=BACKEND)

    class Tools:
        gate = staticmethod(compiled)

    class Closure(_Gated):
        def gate(self, x):
            return compiled(x)

    class OutOfSight(_Gated):
        def gate(self, x):
            return getattr(Tools, "gat" + "e")(x)

    return Closure if how == "closure" else OutOfSight


def _chain(toys, how, n_blocks=4, width=16):
    """Build a chain and compile its blocks."""
    if how in ("closure", "out of sight"):
        return toys.chain(n_blocks, width, _calling(how))
    make = functools.partial(Around, toys) if how == "inside" else toys.Block
    return _compiled(toys.chain(n_blocks, width, make), how)


def _compiled(model, how, backend=BACKEND):
    """Compile the blocks of a chain, or something inside of each."""
    for i, block in enumerate(model.blocks):
        if how == "wrapped":
            model.blocks[i] = torch.compile(block, backend=backend)
        elif how == "in place":
            block.compile(backend=backend)
        elif how == "forward":
            block.forward = torch.compile(block.forward, backend=backend)
        else:
            block.inner.compile(backend=backend)
    return model


def _batches(toys, rows=ROWS):
    return [toys.inputs(n, seed=i) for i, n in enumerate(rows)]


@pytest.mark.parametrize(
    "how", ["wrapped", "in place", "inside", "forward", "closure", "out of sight"]
)
def test_any_plan_is_exact_and_none_is_compiled_anew(toys, how):
    """Losses and gradients are the bare compiled model's, from as many graphs."""
    batches = _batches(toys)
    bare = toys.train(_chain(toys, how), batches)
    n_bare = counters["stats"]["unique_graphs"]
    torch._dynamo.reset()
    counters.clear()
    model = _chain(toys, how)
    with mimose.attach(
        model,
        "1TiB",
        planner=toys.RandomPlanner(),
        cache_size=1,
        meter=toys.BlindMeter(),
    ) as session:
        planned = toys.train(model, batches)
    assert toys.differences(bare, planned) == []
    assert counters["stats"]["unique_graphs"] == n_bare > 0
    assert session.summary().kept_units == {}
    plans = {record.actions for record in session.records if record.phase == "plan"}
    assert len(plans) >= 3


@pytest.mark.parametrize("how", ["wrapped", "inside"])
def test_recomputed_flops_are_those_of_the_plain_forward(toys, how):
    """Counted, not guessed, though nobody can look inside compiled code."""
    plain = toys.chain(1).blocks[0]
    with FlopCounterMode(display=False) as counter:
        plain(toys.inputs(8))
    model = _chain(toys, how)
    with mimose.attach(
        model, "1TiB", planner="full", meter=toys.BlindMeter()
    ) as session:
        toys.train(model, _batches(toys, [8, 8]))
    assert [r.recomputed_flops for r in session.records] == 2 * [
        4 * counter.get_total_flops()
    ]


@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_nothing_stays_behind(toys, how):
    """Names, state and what a call runs are as before."""
    model = _chain(toys, how, 3)
    bare = [(n, dict(vars(m))) for n, m in model.named_modules()]
    names = list(model.state_dict())
    session = mimose.attach(model, "1TiB", meter=toys.BlindMeter())
    toys.train(model, _batches(toys, [8, 9]))
    assert list(model.state_dict()) == names
    session.detach()
    assert [(n, dict(vars(m))) for n, m in model.named_modules()] == bare


def test_what_holds_layers_may_not_be_compiled_as_a_whole(toys):
    """The model, or a part of it, which is named: the layers are what to compile."""
    with pytest.raises(MimoseError, match="layers"):
        mimose.attach(torch.compile(toys.chain(3), backend=BACKEND), "1TiB")
    model = toys.zoo_model("bert")
    model.bert.encoder.compile(backend=BACKEND)
    with pytest.raises(MimoseError, match=r"encoder .*compiled"):
        mimose.attach(model, "1TiB")


def _language_model(kind):
    """Build a small model of a class that people compile, and compile its layers."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 64}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 2, "use_cache": False}
    if kind == "bert":
        sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
        layers = model.bert.encoder.layer
    else:
        sizes["num_key_value_heads"] = 1
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        layers = model.model.layers
    for layer in layers:
        layer.compile(backend=BACKEND, dynamic=True)
    return model


def _losses(model, shapes):
    found = []
    for rows, length in shapes:
        ids = torch.arange(rows * length).reshape(rows, length) % 64
        loss = model(
            input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids
        ).loss
        loss.backward()
        model.zero_grad()
        found.append(float(loss.detach()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_two_hundred_shapes_take_two_graphs(toys, kind):
    """One for a single row, one for all others, whatever plans run; equal losses."""
    shapes = random.Random(0).sample(
        [*itertools.product(range(1, 9), range(2, 60))], 200
    )
    bare = _losses(_language_model(kind), shapes)
    model = _language_model(kind)
    options = {"planner": toys.RandomPlanner(), "meter": toys.BlindMeter()}
    with mimose.attach(model, "1TiB", actions="whole", **options) as session:
        losses = _losses(model, shapes)
    assert counters["stats"]["unique_graphs"] <= 2
    assert bare == losses
    planned = [record for record in session.records if record.phase == "plan"]
    assert len(planned) > 180
    assert {KEEP, RECOMPUTE} == {name for r in planned for name in r.actions}


def test_selective_says_that_it_is_not_used(toys, caplog):
    """In one line for all layers, which are kept or recomputed as wholes."""
    model = _chain(toys, "in place")
    options = {"actions": "selective", "planner": toys.FixedActions(1, 1, 1, 1)}
    with mimose.attach(model, "1TiB", meter=toys.BlindMeter(), **options) as session:
        toys.train(model, _batches(toys))
    lines = [r.getMessage() for r in caplog.records if "is not used" in r.message]
    assert [
        "mimose: the action selective is not used for blocks.0: what compiled code "
        "saves cannot be listed, so it is kept or recomputed as a whole (other layers "
        "for which this holds are not logged)"
    ] == lines
    assert session.summary().kept_units == {}
