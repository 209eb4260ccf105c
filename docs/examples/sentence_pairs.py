"""Bring the two halves of a docstring together, with sentence-transformers."""

import email
import tempfile
from pathlib import Path

import torch
from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import Pooling, Transformer
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from mimose.bench.corpus import load_corpus, train_tokenizer
from mimose.integrations.transformers import MimoseCallback

torch.manual_seed(0)
texts = [text.text for text in load_corpus(root=Path(email.__file__).parent).train]
folder = tempfile.mkdtemp()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=train_tokenizer(texts, 1024),
    pad_token="[PAD]",
    model_max_length=320,
)
tokenizer.save_pretrained(folder)
config = BertConfig(
    vocab_size=len(tokenizer),
    hidden_size=32,
    num_hidden_layers=6,
    num_attention_heads=2,
    intermediate_size=128,
)
BertModel(config).save_pretrained(folder)
model = SentenceTransformer(modules=[Transformer(folder), Pooling(32)], device="cpu")
halves = [(text[: len(text) // 2], text[len(text) // 2 :]) for text in texts]
pairs = [{"anchor": one, "positive": other} for one, other in halves]

loss = MultipleNegativesRankingLoss(model)  # calls the model once for each half
callback = MimoseCallback(budget=0.8, module=loss)
trainer = SentenceTransformerTrainer(
    model,
    SentenceTransformerTrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        max_steps=24,
        report_to=[],
        save_strategy="no",
    ),
    train_dataset=Dataset.from_list(pairs),
    loss=loss,
    callbacks=[callback],
)
trainer.train()

session = callback.session
print(session.report())
