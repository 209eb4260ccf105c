"""Transformers' families, tiny: a session is one line, and each trains the same."""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import mimose

LENGTHS = (9, 30, 38, 24, 17, 12, 27, 35, 21, 14)
N_STEPS = 15
N_FOR_BUDGET = 3
"""Steps that the budget is found with; the longest batch is among them."""

NO_RULE = "the sizes of the layers' inputs do not follow from the batch's sizes"

WORDS = 64
LAYERS = {
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
ENCODER = {**LAYERS, "vocab_size": WORDS}
DECODER = {
    **ENCODER,
    **ENDS,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "attention_dropout": 0.1,
}
PAIR = {
    **ENDS,
    "vocab_size": WORDS,
    "d_model": 32,
    "encoder_layers": 3,
    "decoder_layers": 3,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
    "attention_dropout": 0.1,
}
EXPERTS = {**DECODER, "num_experts_per_tok": 2, "output_router_logits": True}
STATES = {
    "vocab_size": WORDS,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "state_size": 4,
}
PIXELS = {"image_size": 32, "patch_size": 8, "hidden_dropout_prob": 0.1}
SOUND = {
    **ENCODER,
    "conv_dim": (16, 16),
    "conv_kernel": (10, 3),
    "conv_stride": (5, 4),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "mask_time_prob": 0.2,
    "mask_time_length": 2,
    "ctc_zero_infinity": True,
}


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


def _sounds(length, generator):
    sound = torch.randn((2, 40 * length), generator=generator)
    labels = torch.randint(3, 32, (2, 3), generator=generator)
    return {"input_values": sound, "labels": labels}


def _windows(length, generator):
    """Make sounds of one length: how many varies, and what is said in them."""
    n_windows = 1 + length % 3
    features = torch.randn((n_windows, 8, 40), generator=generator)
    labels, mask = _ids(length, generator, n_windows)
    return {"input_features": features, "labels": labels.masked_fill(mask == 0, -100)}


def _captions(length, generator):
    ids, mask = _ids(length, generator, 3)
    pixels = torch.rand((3, 3, 32, 32), generator=generator)
    batch = {"input_ids": ids, "attention_mask": mask, "pixel_values": pixels}
    return {**batch, "return_loss": True}


@dataclasses.dataclass(frozen=True)
class _Family:
    """A family: its class, a tiny configuration, and batches of a given length."""

    model: str
    batch: Callable[[int, torch.Generator], dict[str, Any]]
    config: Mapping[str, Any]
    reason: str = ""
    """What the records say where plans are not to be had."""


FAMILIES = {
    # Encoders.
    "deberta_v2": _Family(
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
    # It halves the sequence after each block: odd lengths are rounded up.
    "funnel": _Family(
        "FunnelForSequenceClassification",
        _texts,
        {
            "vocab_size": WORDS,
            "d_model": 32,
            "block_sizes": [2, 2],
            "n_head": 2,
            "d_head": 16,
            "d_inner": 64,
        },
        NO_RULE,
    ),
    # Decoders.
    "llama": _Family("LlamaForCausalLM", _tokens, DECODER),
    # Vision.
    "swin": _Family(
        "SwinForImageClassification",
        _images,
        {
            **PIXELS,
            "patch_size": 2,
            "embed_dim": 16,
            "depths": [2, 2],
            "num_heads": [1, 2],
            "window_size": 2,
        },
    ),
    # Speech: which layers run is drawn in every step.
    "wav2vec2 with layerdrop": _Family(
        "Wav2Vec2ForCTC", _sounds, {**SOUND, "layerdrop": 0.3}
    ),
    "whisper": _Family(
        "WhisperForConditionalGeneration",
        _windows,
        {
            **PAIR,
            "num_mel_bins": 8,
            "max_source_positions": 20,
            "max_target_positions": 64,
            "dropout": 0.1,
        },
    ),
    # Mixtures of experts.
    "mixtral": _Family(
        "MixtralForCausalLM", _tokens, {**EXPERTS, "num_local_experts": 4}
    ),
    # State spaces.
    "mamba": _Family("MambaForCausalLM", _tokens, STATES),
    # Two towers.
    "clip": _Family(
        "CLIPModel",
        _captions,
        {
            "text_config": {**ENCODER, "attention_dropout": 0.1, "eos_token_id": 2},
            "vision_config": {**LAYERS, "image_size": 32, "patch_size": 8},
            "projection_dim": 16,
        },
    ),
}


def _built(family):
    torch.manual_seed(7)
    kind = getattr(transformers, family.model)
    return kind(kind.config_class(**copy.deepcopy(family.config))).train()


def _batches(family):
    generator = torch.Generator().manual_seed(11)
    lengths = [LENGTHS[i % len(LENGTHS)] for i in range(N_STEPS)]
    return [family.batch(length, generator) for length in lengths]


def _caching(model):
    """Return the configurations that have a cache made, in training as well."""
    configs = [getattr(module, "config", None) for module in model.modules()]
    return [config for config in configs if getattr(config, "use_cache", False)]


def _make_caches(configs, use_cache):
    for config in configs:
        config.use_cache = use_cache


def _trained(toys, model, batches):
    """Train; return what each step left, and numpy's random state at the end."""
    np.random.seed(5)  # noqa: NPY002  (transformers draws SpecAugment's masks there)
    noted = toys.train(model, batches)
    _, numbers, place, *_ = np.random.get_state()  # noqa: NPY002
    return noted, (place, numbers.tolist())


def _differences(toys, expected, actual):
    found = toys.differences(expected[0], actual[0])
    return found + ["numpy's random state"] * (expected[1] != actual[1])


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
        expected = _trained(toys, bare, batches)
        _make_caches(caching, True)
        expected_on = _trained(toys, bare, batches[:2])
    names = _names(model)
    budget = toys.budget_between(model, batches[:N_FOR_BUDGET], 0.5, meter)

    session = mimose.attach(model, budget, meter=meter)
    assert names == _names(model)
    actual = _trained(toys, model, batches)
    assert names == _names(model)
    session.detach()

    assert [] == _differences(toys, expected, actual)
    assert {} == session.summary().kept_units
    assert 0 == session.summary().retries
    _check_plans(session, family)
    # Transformers itself hangs hooks into models that return what experts chose.
    assert sorted(toys.leftovers(bare)) == sorted(toys.leftovers(model))
    assert [] == [n for n, m in model.named_modules() if "forward" in vars(m)]
    assert [] == _differences(toys, expected_on, _trained(toys, model, batches[:2]))


def _check_plans(session, family):
    """Some layers are kept and others recomputed, or the records say why not."""
    planned = [record for record in session.records if record.phase == "plan"]
    if family.reason:
        assert [] == planned
        assert N_STEPS // 6 < [r.reason for r in session.records].count(family.reason)
        return
    assert N_STEPS // 8 < len(planned)  # two ways of a loss are learned
    assert {"keep", "recompute"} in [set(r.actions) for r in session.records]


SELECTIVE = ("deberta_v2", "swin", "mixtral", "mamba")


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("name", SELECTIVE)
def test_families_of_other_kinds_train_the_same_under_selective(toys, name):
    """What is let go is rebuilt to the bit, whatever layers a family is made of."""
    family = FAMILIES[name]
    model, batches = _built(family), _batches(family)[:3]
    bare = copy.deepcopy(model)
    _make_caches(_caching(bare), False)
    expected = _trained(toys, bare, batches)
    options = {"actions": "selective", "planner": toys.Always("selective")}
    with mimose.attach(model, "1TiB", **options) as session:
        actual = _trained(toys, model, batches)
    assert [] == _differences(toys, expected, actual)
    assert {} == session.summary().kept_units
    assert {"selective"} == {action for r in session.records for action in r.actions}
    assert sum(len(record.actions) for record in session.records) >= 3
