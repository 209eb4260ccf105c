"""The trainer of sentence-transformers: the callback, and losses that call twice."""

import random
import warnings

import pytest
import torch

pytest.importorskip("datasets")
pytest.importorskip("accelerate")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
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
    PreTrainedTokenizerFast,
)

from mimose.integrations.transformers import MimoseCallback

pytestmark = pytest.mark.filterwarnings("ignore")

N_STEPS = 16
WORDS = [f"w{i}" for i in range(60)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a small model and its tokenizer, and return the folder."""
    folder = str(tmp_path_factory.mktemp("model"))
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=128,
    ).save_pretrained(folder)
    torch.manual_seed(0)
    BertModel(
        BertConfig(
            vocab_size=len(vocabulary),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            max_position_embeddings=128,
        )
    ).save_pretrained(folder)
    return folder


def _loss(folder, kind, **options):
    torch.manual_seed(0)
    transformer = models.Transformer(folder)
    pooling = models.Pooling(32, pooling_mode="mean")
    model = st.SentenceTransformer(modules=[transformer, pooling], device="cpu")
    return kind(model, **options)


def _data():
    draw = random.Random(0)

    def text():
        return " ".join(draw.choice(WORDS) for _ in range(draw.randint(3, 100)))

    rows = [{"anchor": text(), "positive": text()} for _ in range(80)]
    return Dataset.from_list(rows)


def _trainer(folder, loss, *callbacks, **options):
    args = st.SentenceTransformerTrainingArguments(
        output_dir=str(folder),
        max_steps=N_STEPS,
        per_device_train_batch_size=4,
        logging_steps=4,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        **options,
    )
    return st.SentenceTransformerTrainer(
        model=loss.model,
        args=args,
        train_dataset=_data(),
        eval_dataset=_data().select(range(8)),
        loss=loss,
        callbacks=list(callbacks),
    )


def _losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_a_loss_that_calls_the_model_for_each_text(saved, tmp_path, meter):
    """With `module=loss` a batch is one step, planned; evaluation is none."""
    options = {"eval_strategy": "steps", "eval_steps": 6}
    kind = losses.MultipleNegativesRankingLoss
    bare = _trainer(tmp_path, _loss(saved, kind), **options)
    bare.train()
    loss = _loss(saved, kind)
    callback = MimoseCallback("1TiB", meter=meter, module=loss)
    trainer = _trainer(tmp_path, loss, callback, **options)
    trainer.train()
    assert _losses(bare) == _losses(trainer)
    records = callback.session.records
    assert N_STEPS == len(records)
    assert {6} == {len(record.actions) for record in records}
    assert {"plan"} == {record.phase for record in list(records)[-4:]}


def test_a_loss_that_caches_plans_its_small_batches(saved, tmp_path, meter):
    """Such a loss runs forwards with gradients one by one, each a step."""
    kind = losses.CachedMultipleNegativesRankingLoss
    bare = _trainer(tmp_path, _loss(saved, kind, mini_batch_size=2))
    bare.train()
    callback = MimoseCallback("1TiB", meter=meter)
    loss = _loss(saved, kind, mini_batch_size=2)
    trainer = _trainer(tmp_path, loss, callback)
    trainer.train()
    assert _losses(bare) == _losses(trainer)
    assert {"plan"} == {record.phase for record in list(callback.session.records)[-4:]}
