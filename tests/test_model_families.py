"""Transformers' families, tiny: a session is one line, and each trains the same."""

import copy

import pytest
import torch
import transformers

import mimose

LENGTHS = (9, 30, 38, 24, 17, 12, 27, 35, 21, 14)
N_STEPS = 15
N_FOR_BUDGET = 3
"""Steps that the budget is found with; the longest batch is among them."""

WORDS = 64
ENCODER = {
    **{"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64},
    **{"num_hidden_layers": 4, "num_attention_heads": 2},
}
DECODER = {
    **ENCODER,
    **{"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    **{"num_key_value_heads": 1, "head_dim": 16, "attention_dropout": 0.1},
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
STATES = {"vocab_size": WORDS, "hidden_size": 16, "num_hidden_layers": 4}


def _ids(length, generator, n_sequences=2):
    """Make ids and a mask: the first sequence is whole, the others end earlier."""
    shape = (n_sequences, length)
    ids = torch.randint(3, WORDS, shape, generator=generator)
    ends = torch.randint(length // 2, length, (n_sequences, 1), generator=generator)
    ends[0] = length
    mask = (torch.arange(length) < ends).long()
    return ids * mask, mask


def _classes(n_items, generator):
    return torch.randint(0, 2, (n_items,), generator=generator)


def _texts(length, generator):
    ids, mask = _ids(length, generator)
    labels = _classes(2, generator)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _tokens(length, generator):
    ids, mask = _ids(length, generator)
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def _images(length, generator):
    """Make images of two sizes that vary, told by one number."""
    shape = (2, 3, 24 + 8 * (length % 4), 24 + 8 * (length // 4 % 4))
    batch = {"pixel_values": torch.rand(shape, generator=generator)}
    labels = _classes(2, generator)
    return {**batch, "labels": labels, "interpolate_pos_encoding": True}


FAMILIES = {
    # Encoders.
    "deberta_v2": (
        "DebertaV2ForSequenceClassification",
        _texts,
        {
            **ENCODER,
            "relative_attention": True,
            "pos_att_type": ["p2c", "c2p"],
            "position_buckets": 8,
            "norm_rel_ebd": "layer_norm",
            "share_att_key": True,
        },
    ),
    # Decoders.
    "llama": ("LlamaForCausalLM", _tokens, DECODER),
    # Vision.
    "swin": (
        "SwinForImageClassification",
        _images,
        {
            **{"image_size": 32, "patch_size": 2, "embed_dim": 16},
            "hidden_dropout_prob": 0.1,
            "depths": [2, 2],
            "num_heads": [1, 2],
            "window_size": 2,
        },
    ),
    # Mixtures of experts.
    "mixtral": (
        "MixtralForCausalLM",
        _tokens,
        {**DECODER, **EXPERTS, "output_router_logits": True},
    ),
    # State spaces.
    "mamba": ("MambaForCausalLM", _tokens, {**STATES, "state_size": 4}),
}
"""By name: the class, batches of a given length, and a tiny configuration."""


def _built(family):
    torch.manual_seed(7)
    name, _, config = family
    kind = getattr(transformers, name)
    return kind(kind.config_class(**copy.deepcopy(config))).train()


def _batches(family):
    generator = torch.Generator().manual_seed(11)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(N_STEPS)]
    return [family[1](length, generator) for length in lengths]


def _caching(model):
    """Return the configurations that have a cache made, in training as well."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return [config for config in configs if getattr(config, "use_cache", False)]


def _make_caches(configs, use_cache):
    for config in configs:
        config.use_cache = use_cache


def _names(model):
    modules = [name for name, _ in model.named_modules()]
    parameters = [name for name, _ in model.named_parameters()]
    return modules, parameters, list(model.state_dict())


# DeBERTa scripts functions as it is imported, in transformers up to 5.17 at least.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_trains_the_same(toys, meter, name):
    """Every bit and every name as in the bare model; plans; and nothing is left."""
    family = FAMILIES[name]
    with toys.untracked():
        model, batches = _built(family), _batches(family)
        bare = copy.deepcopy(model)
        caching = _caching(bare)
        _make_caches(caching, False)  # as the session tells the model
        expected = toys.train(bare, batches)
        _make_caches(caching, True)
        expected_on = toys.train(bare, batches[:2])
    names = _names(model)
    budget = toys.budget_between(model, batches[:N_FOR_BUDGET], 0.5, meter)

    session = mimose.attach(model, budget, meter=meter)
    assert names == _names(model)
    actual = toys.train(model, batches)
    assert names == _names(model)
    session.detach()

    assert [] == toys.differences(expected, actual)
    assert {} == session.summary().kept_units
    assert 0 == session.summary().retries
    n_planned = sum(record.phase == "plan" for record in session.records)
    assert N_STEPS // 8 < n_planned  # two ways of a loss are learned
    assert {"keep", "recompute"} in [set(r.actions) for r in session.records]
    # Transformers itself hangs hooks into models that return what experts chose.
    assert sorted(toys.leftovers(bare)) == sorted(toys.leftovers(model))
    assert [] == [n for n, m in model.named_modules() if "forward" in vars(m)]
    assert [] == toys.differences(expected_on, toys.train(model, batches[:2]))


SELECTIVE = ("deberta_v2", "swin", "mixtral", "mamba")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", SELECTIVE)
def test_families_of_other_kinds_train_the_same_under_selective(toys, name):
    """What is let go is rebuilt to the bit, whatever layers a family is made of."""
    family = FAMILIES[name]
    model, batches = _built(family), _batches(family)[:3]
    bare = copy.deepcopy(model)
    _make_caches(_caching(bare), False)
    expected = toys.train(bare, batches)
    options = {"actions": "selective", "planner": toys.everywhere("selective")}
    with mimose.attach(model, "1TiB", **options) as session:
        actual = toys.train(model, batches)
    assert [] == toys.differences(expected, actual)
    assert {} == session.summary().kept_units
    assert {"selective"} == {action for r in session.records for action in r.actions}
    assert sum(len(record.actions) for record in session.records) >= 3
