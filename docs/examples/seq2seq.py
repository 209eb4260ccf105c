"""Train a small T5 to go on with a docstring that was cut somewhere."""

import asyncio
import random
from pathlib import Path

import torch
from transformers import T5Config, T5ForConditionalGeneration

import mimose
from mimose.bench.corpus import read_docstrings, train_tokenizer

torch.manual_seed(0)
docstrings = read_docstrings(Path(asyncio.__file__).parent)
tokenizer = train_tokenizer((d.text for d in docstrings), vocabulary_size=512)
tokenizer.enable_truncation(256)
texts = sorted((tokenizer.encode(d.text).ids for d in docstrings), key=len)[-160:]

config = T5Config(
    vocab_size=512,
    d_model=64,
    d_ff=256,
    d_kv=32,
    num_heads=2,
    num_layers=3,
    decoder_start_token_id=0,
)
model = T5ForConditionalGeneration(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def pad(texts, filler):
    """Pad to the longest."""
    longest = max(map(len, texts))
    return torch.tensor([text + [filler] * (longest - len(text)) for text in texts])


def train(texts, share):
    """Cut the texts: source and target lengths are two sizes of one shape."""
    ids = pad([text[: int(share * len(text))] for text in texts], 0)
    labels = pad([text[int(share * len(text)) :] for text in texts], -100)
    mask = (ids != 0).long()
    model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


# The longest texts with everything recomputed need this much.
with mimose.attach(model, budget=1.0, planner="full") as probe:
    for share in (0.2, 0.8):
        train(texts[-8:], share)
least_bytes = max(record.observed_peak_bytes for record in probe.records)

draw = random.Random(0)
with mimose.attach(model, budget=least_bytes + 40 * 2**20) as session:
    for _ in range(24):
        train(draw.sample(texts, 8), draw.uniform(0.2, 0.8))
print(session.report())
