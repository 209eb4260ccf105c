"""The trainers of TRL with the callback, and with a session of one's own."""

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

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from mimose.integrations.transformers import MimoseCallback

pytestmark = pytest.mark.filterwarnings("ignore")

N_STEPS = 16
WORDS = [f"w{i}" for i in range(60)]


def _tokenizer():
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    )


def _model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS) + 3,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=1,
        )
    )


def _text(draw, most):
    return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, most)))


def _texts():
    draw = random.Random(0)
    return Dataset.from_list([{"text": _text(draw, 120)} for _ in range(80)])


def _preferences():
    draw = random.Random(0)
    names = ("prompt", "chosen", "rejected")
    return Dataset.from_list([{n: _text(draw, 60) for n in names} for _ in range(80)])


def _trainer(kind, folder, callbacks=(), **options):
    config, data, more = {
        "sft": (trl.SFTConfig, _texts, {}),
        "dpo": (trl.DPOConfig, _preferences, {"ref_model": _model()}),
    }[kind]
    args = config(
        output_dir=str(folder),
        max_steps=N_STEPS,
        per_device_train_batch_size=4,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        **options,
    )
    return {"sft": trl.SFTTrainer, "dpo": trl.DPOTrainer}[kind](
        model=_model(),
        args=args,
        train_dataset=data(),
        processing_class=_tokenizer(),
        callbacks=list(callbacks),
        **more,
    )


def _losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _is_planned(session):
    """Return whether each batch was one step, and the last ones had plans."""
    phases = [record.phase for record in session.records]
    return len(phases) == N_STEPS and set(phases[-4:]) == {"plan"}


def test_what_is_on_by_default_is_refused_with_what_to_set(tmp_path):
    """The error names the configuration and its field."""
    complaint = r"SFTConfig\(\.\.\., \w+=False\)"
    with pytest.raises(mimose.CheckpointingConflictError, match=complaint):
        _trainer("sft", tmp_path, [MimoseCallback("1TiB")])


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_the_same_training(kind, tmp_path, meter):
    """With checkpointing off, losses are those of the bare trainer."""
    bare = _trainer(kind, tmp_path, gradient_checkpointing=False)
    bare.train()
    callback = MimoseCallback("1TiB", meter=meter)
    trainer = _trainer(kind, tmp_path, [callback], gradient_checkpointing=False)
    trainer.train()
    assert _losses(bare) == _losses(trainer)
    assert _is_planned(callback.session)
