"""Does a model learn as much in less time if rows follow lengths?

A small BERT learns from which package of the standard library a docstring comes, until
it reaches an accuracy on held-out texts. One run has batches of a fixed number of rows,
drawn at random; the other has those of `mimose.BatchSampler`. Its learning rate is
larger by the square root of the ratio of mean rows, as the documentation advises. The
time is from the first step to the one that reaches the accuracy, with the session's
learning, but without the evaluations.

    python -m benchmarks.proofs learning --threads 2
"""

from __future__ import annotations

import contextlib
import math
import time
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import mimose
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Rows, Settings, Task
from benchmarks.proofs.numbers import mean
from mimose.bench.corpus import (
    DocstringClassifier,
    Docstrings,
    collate,
    encode_corpus,
    load_corpus,
)

QUESTION = "Does a model learn as much in less time where rows follow lengths?"
OPTIONS = (common.count("--runs", 3, "an arm"),)

_FIXED = "fixed rows"
_ROWS, _RATE = 16, 5e-4
_MOST_ROWS = 64
"""The sampler's limit: at most four times the rows, so at most twice the rate."""
_BUDGET = "+600MiB"
"""A batch of fixed rows of the longest texts needs as much with everything kept."""
_ACCURACY, _EVERY, _MOST_EPOCHS = 0.6, 512, 12
"""The accuracy to reach, the samples between evaluations, the most epochs."""
_MEANS = "seconds", "samples", "steps"
_LABELS, _TOKENS, _VOCABULARY = 12, 384, 4096


def ask(settings: Settings, options: Options) -> Answer:
    """Train both arms with the same seeds, and compare the time to the accuracy."""
    answer = Answer(path=settings.out / "learning.csv")
    for arm in (_FIXED, "rows by length"):
        rows = common.measured("learning", settings, arm=arm, runs=options.runs)
        last = [row for row in rows if row["accuracy"] >= _ACCURACY]
        line = {
            f"runs that reached {_ACCURACY:.0%}": len(last),
            **{name: mean(row[name] for row in last) for name in _MEANS},
            "steps over": max(row["over"] for row in rows),
        }
        bars = [Bar("runs that got there", len(last), at_least=options.runs)]
        answer.add(arm, rows, line, bars, head="arm")
    fixed, ours = (line["seconds"] for line in answer.table)
    if isinstance(fixed, float) and isinstance(ours, float):
        answer.notes.append(f"seconds: {ours / fixed:.2f} of fixed rows'")
    return answer


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Train one arm; yield what it can tell after every so many samples."""
    from transformers import BertConfig, BertModel

    corpus = encode_corpus(load_corpus(_LABELS), _TOKENS, _VOCABULARY)
    texts = Docstrings(corpus)
    train: Any = corpus.train
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 2}
    config = BertConfig(vocab_size=corpus.vocabulary_size, **sizes)
    for run in range(task["runs"]):
        seed = task["seed"] + run
        torch.manual_seed(seed)
        model = DocstringClassifier(BertModel(config), len(corpus.labels), 0.1).train()
        drawn: Any = BatchSampler(RandomSampler(train), _ROWS, drop_last=False)
        session = None
        with contextlib.ExitStack() as undo:
            if task["arm"] != _FIXED:
                session = undo.enter_context(mimose.attach(model, _BUDGET))
                lengths = [len(text.token_ids) for text in train]
                most = {"seed": seed, "max_rows": _MOST_ROWS}
                drawn = mimose.BatchSampler(lengths, session, **most)
            loader: DataLoader[Any] = DataLoader(
                train, batch_sampler=drawn, collate_fn=collate
            )
            for told in _train(model, loader):
                accuracy = texts.evaluate(model, 64)
                row = {"arm": task["arm"], "run": run, **told, "accuracy": accuracy}
                yield {**row, "over": session.summary().steps_over if session else 0}
                if row["accuracy"] >= _ACCURACY:
                    break


def _train(model: DocstringClassifier, loader: DataLoader[Any]) -> Rows:
    """Train by the rate that rows ask for; yield after every so many samples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
    samples = steps = 0
    seconds, asked = 0.0, _EVERY
    for _ in range(_MOST_EPOCHS):
        batches = iter(loader)
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            if batch is None:
                break
            samples, steps = samples + len(batch["labels"]), steps + 1
            for group in optimizer.param_groups:
                group["lr"] = _RATE * math.sqrt(max(1.0, samples / steps / _ROWS))
            loss = model(**batch).loss
            assert loss is not None
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds += time.perf_counter() - began
            if samples >= asked:
                asked += _EVERY
                yield {"samples": samples, "steps": steps, "seconds": seconds}
