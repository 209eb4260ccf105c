"""Letting go what cheap operators rebuild: exact, freeing what it says, planned."""

import copy
import math

import pytest
import torch
import transformers
from torch import nn

import mimose

ZOO = ("bert", "gpt2", "t5", "vit", "albert", "resnet")
ACTIONS = ("keep", "lean", "recompute")
N_ROWS = (40, 96, 64, 48, 80, 56, 88, 72, 44, 92, 60, 76, 84, 52, 68)


@pytest.mark.parametrize("name", ZOO)
def test_it_trains_like_the_bare_model(toys, freed, always_lean, name):
    """Losses, gradients, buffers and random state, dropout on, at two shapes."""
    model = toys.zoo_model(name)
    batches = toys.zoo_batches(name, 8)
    bare = toys.train(copy.deepcopy(model), batches)
    with mimose.attach(model, **always_lean) as session:
        trained = toys.train(model, batches)
    assert [] == toys.differences(bare, trained)
    assert {"lean"} == {action for r in session.records for action in r.actions}
    assert 0 == sum(record.recomputed_flops for record in session.records)
    assert min(freed) > 0


def test_it_is_learned_and_planned(toys, meter):
    """Tried in place of keeping, then chosen by bytes: budget kept, growth foretold."""
    model = toys.chain(6, width=128)
    batches = [toys.inputs(4 * n, width=128) for n in N_ROWS * 3]
    with toys.untracked():
        bare = toys.train(copy.deepcopy(model), batches)
    budget = toys.budget_between(model, batches[:2], 0.6, meter)
    how = {"meter": meter, "actions": ACTIONS, "cost": "flops"}  # the same plans always
    with mimose.attach(model, budget, **how) as session:
        trained = toys.train(model, batches)
    records = list(session.records)
    tried = [r for r in records if "tried in place" in r.reason]
    planned = [r for r in records if r.phase == "plan" and r not in tried]
    chosen = [r for r in planned if "lean" in r.actions]
    assert [] == toys.differences(bare, trained)
    assert not any(record.is_over for record in records)
    assert 3 <= len(tried) <= 15
    assert len(chosen) >= 10
    assert max(abs(record.prediction_error) for record in planned[-15:]) < 0.01
    assert "lean" in session.report()


WIDTH, LENGTH = 256, 256
SMALL = {
    "hidden_size": WIDTH,
    "num_attention_heads": 4,
    "attn_implementation": "sdpa",
}


class Bottleneck(nn.Module):
    """A residual block of a ResNet."""

    def __init__(self, width=64):
        super().__init__()
        self.a = nn.Conv2d(WIDTH, width, 1, bias=False)
        self.b = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.c = nn.Conv2d(width, WIDTH, 1, bias=False)
        self.norms = nn.ModuleList(map(nn.BatchNorm2d, (width, width, WIDTH)))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        """Map images to images."""
        y = self.relu(self.norms[0](self.a(x)))
        y = self.relu(self.norms[1](self.b(y)))
        return self.relu(self.norms[2](self.c(y)) + x)


def _bert(attention="sdpa"):
    small = {**SMALL, "attn_implementation": attention}
    config = transformers.BertConfig(**small, intermediate_size=4 * WIDTH)
    return transformers.models.bert.modeling_bert.BertLayer(config), {}


def _gpt2():
    config = transformers.GPT2Config(n_embd=WIDTH, n_head=4, attn_implementation="sdpa")
    return transformers.models.gpt2.modeling_gpt2.GPT2Block(config, layer_idx=0), {}


def _t5():
    config = transformers.T5Config(d_model=WIDTH, d_kv=64, num_heads=4, d_ff=4 * WIDTH)
    layer = transformers.models.t5.modeling_t5.T5Block(config, layer_idx=1)
    bias = torch.randn(1, 4, LENGTH, LENGTH).expand(2, 4, LENGTH, LENGTH).contiguous()
    return layer, {"position_bias": bias}


def _llama():
    config = transformers.LlamaConfig(
        **SMALL, num_key_value_heads=2, intermediate_size=704
    )
    llama = transformers.models.llama.modeling_llama
    places = torch.arange(LENGTH)[None]
    turned = llama.LlamaRotaryEmbedding(config)(torch.zeros(1), places)
    options = {"attention_mask": None, "position_ids": places}
    return llama.LlamaDecoderLayer(config, 0), {
        **options,
        "position_embeddings": turned,
    }


def _vit():
    config = transformers.ViTConfig(**SMALL, intermediate_size=4 * WIDTH)
    return transformers.models.vit.modeling_vit.ViTLayer(config), {}


class Alone(nn.Module):
    """One layer that is called as a model calls it."""

    def __init__(self, layer, options):
        super().__init__()
        self.layers = nn.ModuleList([layer])
        self._options = options

    def forward(self, x):
        """Map (batch, length, width) or images to one number."""
        output = self.layers[0](x * 1.0, **self._options)
        return (output[0] if isinstance(output, tuple) else output).square().mean()


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (_bert, 0.48),
        (lambda: _bert("eager"), 0.48),
        (_gpt2, 0.65),
        (_t5, 0.60),
        (_llama, 0.48),
        (_vit, 0.38),
        (lambda: (Bottleneck(), {}), 0.24),
    ],
    ids=["bert", "bert-eager", "gpt2", "t5", "llama", "vit", "resnet"],
)
def test_it_frees_a_good_part_of_a_layer(freed, always_lean, make, share):
    """Of what a layer saves beyond its input and output, and with no product."""
    torch.manual_seed(0)
    layer, options = make()
    is_images = isinstance(layer, Bottleneck)
    shape = (2, WIDTH, 28, 28) if is_images else (2, LENGTH, WIDTH)
    model, x = Alone(layer, options).train(), torch.randn(shape, requires_grad=True)
    saved = _saved_bytes(model, x)
    with mimose.attach(model, units=["layers.0"], **always_lean) as session:
        model(x).backward()
    assert freed[-1] / saved >= share
    assert 0 == session.records[-1].recomputed_flops


def _saved_bytes(model, x):
    """Return the bytes that a layer saves, but for what lives anyway."""
    (layer,) = model.layers
    seen, ends = {}, []

    def note(_, args, output):
        ends.extend((args[0], output[0] if isinstance(output, tuple) else output))

    handle = layer.register_forward_hook(note)

    def pack(tensor):
        seen[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x)
    handle.remove()
    others = [v for v in model._options.values() if isinstance(v, torch.Tensor)]
    others += [t for v in model._options.values() if isinstance(v, tuple) for t in v]
    lasting = [x, *ends, *others, *model.parameters(), *model.buffers()]
    for tensor in lasting:
        seen.pop(tensor.untyped_storage().data_ptr(), None)
    return math.fsum(tensor.untyped_storage().nbytes() for tensor in seen.values())
