"""Train a few batches, then draw what fits into which memory, and what it takes."""

from pathlib import Path

import torch
from matplotlib import pyplot
from transformers import BertConfig, BertForSequenceClassification

import mimose

torch.manual_seed(0)
config = BertConfig(
    hidden_size=128,
    num_hidden_layers=6,
    num_attention_heads=4,
    intermediate_size=512,
    vocab_size=2048,
)
model = BertForSequenceClassification(config).train()
optimizer = torch.optim.AdamW(model.parameters())

session = mimose.attach(model, budget="+400MiB")
for _ in range(20):
    rows, length = torch.randint(4, 25, ()).item(), torch.randint(32, 193, ()).item()
    batch = {
        "input_ids": torch.randint(2048, (rows, length)),
        "labels": torch.randint(2, (rows,)),
    }
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(session.report())

held = session.records[-1].start_bytes  # weights, gradients, optimizer state, libraries
lengths, many = range(32, 241, 16), range(1, 37)  # half beyond what was measured
figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
for mib in (60, 120, 240):
    options = {"dim": "input_ids.0", "budget": held + mib * 2**20, "limit": 36}
    fits = [session.largest({"input_ids.1": n}, **options) for n in lengths]
    left.step(lengths, fits, where="post", label=f"{mib} MiB for the step")
left.set(xlabel="length", ylabel="largest number of rows", title="What fits")
for length in (64, 128, 192):
    shapes = [{"input_ids.0": n, "input_ids.1": length} for n in many]
    seconds = [session.forecast(shape).settled_seconds for shape in shapes]
    speed = [n * length / s if s else None for n, s in zip(many, seconds, strict=True)]
    right.plot(many, speed, label=f"length {length}")
right.set(xlabel="rows", ylabel="tokens a second", title="What it takes")
for axes in (left, right):
    axes.legend()
Path("runs").mkdir(exist_ok=True)
figure.savefig("runs/which_batch.png")
session.detach()
