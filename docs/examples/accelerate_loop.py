"""Train under accelerate, gradients accumulated over two batches of random tokens."""

import random

import torch
from accelerate import Accelerator
from transformers import BertConfig, BertForTokenClassification

import mimose

torch.manual_seed(0)
config = BertConfig(
    vocab_size=256,
    hidden_size=32,
    num_hidden_layers=6,
    num_attention_heads=2,
    intermediate_size=128,
    num_labels=2,
)
model = BertForTokenClassification(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)


def collate(lengths):
    """Pad random tokens to the longest; the label says whether a token is odd."""
    mask = (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()
    ids = torch.randint(1, 256, mask.shape) * mask
    labels = (ids % 2).masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


draw = random.Random(0)
lengths = [min(320, int(draw.lognormvariate(4, 0.7))) for _ in range(24 * 8)]
loader = torch.utils.data.DataLoader(lengths, batch_size=8, collate_fn=collate)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


def train(batches):
    """Take a step after every second batch."""
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            optimizer.step()
            optimizer.zero_grad()


# Attach to the model itself, not to what `prepare` may have wrapped around it.
bare = accelerator.unwrap_model(model)
with mimose.attach(bare, budget=1.0, planner="full") as probe:
    train([collate([320] * 8)] * 4)
least_bytes = probe.records[-1].observed_peak_bytes

with mimose.attach(bare, budget=least_bytes + 40 * 2**20) as session:
    train(loader)
accelerator.print(session.report())
