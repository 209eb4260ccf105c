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
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from mimose.integrations.transformers import MimoseCallback

pytestmark = pytest.mark.filterwarnings("ignore")

N_STEPS = 16
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


def _arguments(folder, **options):
    return {
        "output_dir": str(folder),
        "max_steps": N_STEPS,
        "per_device_train_batch_size": 4,
        "logging_steps": 4,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }


def _check(make, callback):
    """Train bare and with the callback: losses are equal. Return the records."""
    trainers = make(), make(callback)
    logged = []
    for trainer in trainers:
        trainer.train()
        history = trainer.state.log_history
        logged.append([entry["loss"] for entry in history if "loss" in entry])
    assert logged[0] == logged[1]
    records = list(callback.session.records)
    assert {"plan"} == {record.phase for record in records[-4:]}
    return records


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
        args=config(**_arguments(folder, bf16=False, **options)),
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

    def make(*callbacks):
        return _trl(kind, tmp_path, *callbacks, gradient_checkpointing=False)

    assert N_STEPS == len(_check(make, MimoseCallback("1TiB", meter=meter)))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a small model and its tokenizer, and return the folder."""
    folder = str(tmp_path_factory.mktemp("model"))
    _tokenizer().save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES)).save_pretrained(folder)
    return folder


def _sentences(folder, loss, *callbacks, **options):
    data = _texts("anchor", "positive", most=100)
    return st.SentenceTransformerTrainer(
        model=loss.model,
        args=st.SentenceTransformerTrainingArguments(**_arguments(folder, **options)),
        train_dataset=data,
        eval_dataset=data.select(range(8)),
        loss=loss,
        callbacks=list(callbacks),
    )


def _loss(folder, kind, **options):
    torch.manual_seed(0)
    parts = models.Transformer(folder), models.Pooling(32, pooling_mode="mean")
    model = st.SentenceTransformer(modules=[*parts], device="cpu")
    return kind(model, **options)


def test_a_loss_that_calls_the_model_for_each_text(saved, tmp_path, meter):
    """With `module=loss` a batch is one step, planned; evaluation is none."""
    options = {"eval_strategy": "steps", "eval_steps": 6}
    kind = losses.MultipleNegativesRankingLoss
    loss = _loss(saved, kind)

    def make(*callbacks):
        its = loss if callbacks else _loss(saved, kind)
        return _sentences(tmp_path, its, *callbacks, **options)

    records = _check(make, MimoseCallback("1TiB", meter=meter, module=loss))
    assert N_STEPS == len(records)
    assert {6} == {len(record.actions) for record in records}


def test_a_loss_that_caches_plans_its_small_batches(saved, tmp_path, meter):
    """Such a loss runs forwards with gradients one by one, each a step."""
    kind = losses.CachedMultipleNegativesRankingLoss

    def make(*callbacks):
        return _sentences(tmp_path, _loss(saved, kind, mini_batch_size=2), *callbacks)

    _check(make, MimoseCallback("1TiB", meter=meter))
