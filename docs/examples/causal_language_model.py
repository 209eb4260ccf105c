"""Train a small GPT-2 on asyncio's docstrings, two batches to an optimizer step."""

import asyncio
import random
from pathlib import Path

import torch
from transformers import GPT2Config, GPT2LMHeadModel

import mimose
from mimose.bench.corpus import read_docstrings, train_tokenizer

torch.manual_seed(0)
docstrings = read_docstrings(Path(asyncio.__file__).parent)
tokenizer = train_tokenizer((d.text for d in docstrings), vocabulary_size=512)
tokenizer.enable_truncation(320)
texts = sorted((tokenizer.encode(d.text).ids for d in docstrings), key=len)

config = GPT2Config(
    vocab_size=512,
    n_embd=32,
    n_layer=6,
    n_head=2,
    bos_token_id=2,
    eos_token_id=3,
)
model = GPT2LMHeadModel(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def collate(texts):
    """Pad a batch to its longest text; padding is no part of the loss."""
    longest = max(map(len, texts))
    ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts])
    mask = (ids != 0).long()
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def train(batches):
    """Add up the gradients of several batches, then step."""
    for batch in batches:
        (model(**collate(batch)).loss / len(batches)).backward()
    optimizer.step()
    optimizer.zero_grad()


# The longest batches with everything recomputed need this much.
with mimose.attach(model, budget=1.0, planner="full") as probe:
    for _ in range(2):
        train([texts[-6:], texts[-6:]])
least_bytes = probe.records[-1].observed_peak_bytes

draw = random.Random(0)
with mimose.attach(model, budget=least_bytes + 30 * 2**20) as session:
    for _ in range(12):  # each forward has its plan
        train([draw.sample(texts, 3), draw.sample(texts, 6)])
print(session.report())
