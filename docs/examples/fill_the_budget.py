"""Draw batches whose rows follow their lengths, as many as the budget holds."""

import email
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import mimose
from mimose.bench.corpus import encode_corpus, load_corpus

torch.manual_seed(0)
corpus = encode_corpus(
    load_corpus(n_labels=8, root=Path(email.__file__).parent),
    max_tokens=320,
    vocabulary_size=2048,
)
config = BertConfig(
    vocab_size=corpus.vocabulary_size,
    hidden_size=32,
    num_hidden_layers=6,
    num_attention_heads=2,
    intermediate_size=128,
    num_labels=len(corpus.labels),
)
model = BertForSequenceClassification(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def collate(texts):
    """Pad texts to the longest of them, and no further."""
    longest = max(len(text.token_ids) for text in texts)
    rows = [text.token_ids + (0,) * (longest - len(text.token_ids)) for text in texts]
    ids, labels = torch.tensor(rows), torch.tensor([text.label for text in texts])
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


session = mimose.attach(model, budget="+120MiB")
sampler = mimose.BatchSampler(
    [len(text.token_ids) for text in corpus.train], session, max_rows=64
)
loader = DataLoader(corpus.train, batch_sampler=sampler, collate_fn=collate)
for batch in loader:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(session.report())
session.detach()
