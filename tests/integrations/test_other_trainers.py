"""Trainers built on that of transformers: TRL's, and that of sentence-transformers."""

import random
import warnings

import pytest
import torch

import mimose

pytest.importorskip("datasets")
pytest.importorskip("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    trl = pytest.importorskip("trl", reason="needs trl")
    st = pytest.importorskip(
        "sentence_transformers", reason="needs sentence-transformers"
    )
    from sentence_transformers import losses, models

from datasets import Dataset
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from trainer_toys import arguments
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from mimose.integrations.transformers import MimoseCallback

pytestmark = pytest.mark.filterwarnings("ignore")

N_STEPS = 18
WORDS = [f"w{i}" for i in range(60)]
SIZES = {
    "vocab_size": len(WORDS) + 3,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "max_position_embeddings": 256,
}


def _tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def _texts(*names, most=60):
    """Make rows of random texts, with these columns."""
    draw = random.Random(0)

    def text():
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, most)))

    return Dataset.from_list([{name: text() for name in names} for _ in range(80)])


def _check(make, **options):
    """Train bare and with the callback: losses are equal. Return the records.

    The callback comes behind what a trainer is made of, which may be its module.
    """
    logged = []
    for has_callback in (False, True):
        trainer = make()
        if has_callback:
            if "module" in options:
                options["module"] = trainer.loss
            callback = MimoseCallback("1TiB", **options)
            trainer.add_callback(callback)
        trainer.train()
        history = trainer.state.log_history
        logged.append([entry["loss"] for entry in history if "loss" in entry])
    assert logged[0] == logged[1]
    return list(callback.session.records)


def _are_planned(records):
    return {"plan"} == {record.phase for record in records[-4:]}


def _llama():
    torch.manual_seed(0)
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
    return LlamaForCausalLM(LlamaConfig(**SIZES, **ends, num_key_value_heads=2))


def _trl(kind, folder, *callbacks, **options):
    config, trainer, data, more = {
        "sft": (trl.SFTConfig, trl.SFTTrainer, _texts("text", most=120), {}),
        "dpo": (
            trl.DPOConfig,
            trl.DPOTrainer,
            _texts("prompt", "chosen", "rejected"),
            {"ref_model": _llama()},
        ),
    }[kind]
    return trainer(
        model=_llama(),
        args=config(**arguments(folder, dict, bf16=False, **options)),
        train_dataset=data,
        processing_class=_tokenizer(),
        callbacks=list(callbacks),
        **more,
    )


def test_what_is_on_by_default_is_refused_with_what_to_set(tmp_path):
    """The error names the configuration and its field."""
    complaint = r"SFTConfig\(\.\.\., \w+=False\)"
    with pytest.raises(mimose.CheckpointingConflictError, match=complaint):
        _trl("sft", tmp_path, MimoseCallback("1TiB"))


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_the_same_training(kind, tmp_path, meter):
    """With checkpointing off, each batch is one step."""

    def make():
        return _trl(kind, tmp_path, gradient_checkpointing=False)

    records = _check(make, meter=meter)
    assert N_STEPS == len(records)
    assert _are_planned(records)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a small model and its tokenizer, and return the folder."""
    folder = str(tmp_path_factory.mktemp("model"))
    _tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES)).save_pretrained(folder)
    return folder


def _sentences(folder, loss, **options):
    data = _texts("anchor", "positive", most=100)
    return st.SentenceTransformerTrainer(
        model=loss.model,
        args=st.SentenceTransformerTrainingArguments(
            **arguments(folder, dict, **options)
        ),
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        loss=loss,
    )


def _loss(folder, kind, **options):
    torch.manual_seed(0)
    parts = models.Transformer(folder), models.Pooling(32, pooling_mode="mean")
    model = st.SentenceTransformer(modules=[*parts], device="cpu")
    return kind(model, **options)


def test_a_loss_that_calls_the_model_for_each_text(saved, tmp_path, meter):
    """With `module=loss` a batch is one step, planned; evaluation is none."""
    options = {"eval_strategy": "steps", "eval_steps": 6}

    def make():
        loss = _loss(saved, losses.MultipleNegativesRankingLoss)
        return _sentences(tmp_path, loss, **options)

    records = _check(make, meter=meter, module=None)
    assert N_STEPS == len(records)
    assert {6} == {len(record.actions) for record in records}
    assert _are_planned(records)


def test_a_loss_that_caches(saved, tmp_path, meter):
    """It runs small batches inside of its backward, each a step that recomputes all."""
    kind = losses.CachedMultipleNegativesRankingLoss

    def make():
        return _sentences(tmp_path, _loss(saved, kind, mini_batch_size=2))

    records = _check(make, meter=meter)
    assert len(records) > N_STEPS
    assert all(record.n_recomputed == len(record.actions) for record in records)
