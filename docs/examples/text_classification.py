"""Tell from which module of email a docstring comes, with a small BERT."""

import email
import random
from pathlib import Path

import torch
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


def train(texts):
    """Take one step on texts padded to the longest of them, and no further."""
    longest = max(len(text.token_ids) for text in texts)
    rows = [text.token_ids + (0,) * (longest - len(text.token_ids)) for text in texts]
    ids, labels = torch.tensor(rows), torch.tensor([text.label for text in texts])
    loss = model(input_ids=ids, attention_mask=(ids != 0).long(), labels=labels).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# The longest batch with everything recomputed needs this much: no budget can be less.
by_length = sorted(corpus.train, key=lambda text: len(text.token_ids))
with mimose.attach(model, budget=1.0, planner="full") as probe:
    for _ in range(2):
        train(by_length[-8:])
least_bytes = probe.records[-1].observed_peak_bytes

draw = random.Random(0)
with mimose.attach(model, budget=least_bytes + 30 * 2**20) as session:
    for _ in range(24):
        train(draw.sample(corpus.train, 8))
print(session.report())
