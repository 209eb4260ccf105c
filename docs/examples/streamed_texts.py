"""Fill the budget from a stream of texts in the Trainer of transformers."""

import email
from pathlib import Path

import torch
from torch.utils.data import IterableDataset
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from mimose.bench.corpus import encode_corpus, load_corpus
from mimose.integrations.transformers import MimoseCallback, fill_budget

torch.manual_seed(0)
source = load_corpus(n_labels=8, root=Path(email.__file__).parent)
corpus = encode_corpus(source, max_tokens=320, vocabulary_size=2048)
config = BertConfig(
    vocab_size=corpus.vocabulary_size,
    hidden_size=32,
    num_hidden_layers=6,
    num_attention_heads=2,
    intermediate_size=128,
    num_labels=len(corpus.labels),
)


class Texts(IterableDataset):
    """Texts one after the other, as a stream of the package `datasets` yields them."""

    def __iter__(self):
        for text in corpus.train:
            yield {"input_ids": text.token_ids, "labels": text.label}


def collate(texts):
    """Pad texts to the longest of them, and no further."""
    ids = [torch.tensor(text["input_ids"]) for text in texts]
    ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    labels = torch.tensor([text["labels"] for text in texts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


args = TrainingArguments(
    "streamed_texts", max_steps=60, report_to=[], save_strategy="no", use_cpu=True
)
FillingTrainer = fill_budget(Trainer, "+120MiB", max_rows=64)
trainer = FillingTrainer(
    BertForSequenceClassification(config), args, collate, train_dataset=Texts()
)
trainer.train()
callbacks = trainer.callback_handler.callbacks
(session,) = (c.session for c in callbacks if isinstance(c, MimoseCallback))
print(session.report())
