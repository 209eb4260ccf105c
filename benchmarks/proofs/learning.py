"""Does a model learn as much in less time where rows follow lengths?

A small BERT learns from which package of the standard library a docstring comes, until
it tells so many of the texts held out: in batches of a fixed number of rows, drawn at
random, and in those of `mimose.BatchSampler`, whose learning rate is larger by the root
of the factor by which its rows are more in the mean, as the documentation advises. It
counts all time between the first step and the one that reached the accuracy, without
what asking for it takes, and the session's learning with it.

    python -m benchmarks.proofs learning --threads 2
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, RandomSampler

import mimose
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Settings
from mimose.bench.corpus import (
    DocstringClassifier,
    EncodedText,
    collate,
    encode_corpus,
    load_corpus,
)

QUESTION = "Does a model learn as much in less time where rows follow lengths?"
OPTIONS = (common.count("--runs", 3, "an arm"),)

_ROWS, _RATE = 16, 5e-4
_MOST_ROWS = 64
"""Of the sampler: four times the rows, twice the rate at most."""
_BUDGET = "+600MiB"
"""Fixed rows of the longest texts need as much with everything kept."""
_ACCURACY, _EVERY, _MOST_EPOCHS = 0.6, 512, 12
"""Asked for after so many samples."""
_LABELS, _TOKENS, _VOCABULARY = 12, 384, 4096


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train both arms with the same seeds, and compare the time to the accuracy."""
    answer, seconds = Answer(), dict[str, list[float]]()
    for arm in ("fixed rows", "rows by length"):
        rows = common.measured("learning", settings, arm=arm, runs=options.runs)
        last = [row for row in rows if row["accuracy"] >= _ACCURACY]
        seconds[arm] = [row["seconds"] for row in last]
        line = {
            f"runs that reached {_ACCURACY:.0%}": len(last),
            "seconds": _mean(seconds[arm]),
            "samples": _mean([row["samples"] for row in last]),
            "steps": _mean([row["steps"] for row in last]),
            "padding": _mean([row["padding"] for row in last]),
            "steps over": max(row["over"] for row in rows),
        }
        bars = [Bar("runs that got there", len(last), at_least=options.runs)]
        answer.add(arm, rows, line, bars, head="arm")
    fixed, ours = map(_mean, seconds.values())
    if fixed and ours:
        answer.notes.append(
            f"time to {_ACCURACY:.0%}: {ours / fixed:.2f} of fixed rows'"
        )
    return answer


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train one arm; yield what it can tell after every so many samples."""
    from transformers import BertConfig, BertModel

    corpus = encode_corpus(load_corpus(_LABELS), _TOKENS, _VOCABULARY)
    config = BertConfig(
        vocab_size=corpus.vocabulary_size,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=256,
    )
    for run in range(task["runs"]):
        torch.manual_seed(task["seed"] + run)
        model = DocstringClassifier(BertModel(config), len(corpus.labels), 0.1).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=_RATE)
        train: Any = list(corpus.train)
        if task["arm"] == "fixed rows":
            order = RandomSampler(train)
            loader: DataLoader[Any] = DataLoader(
                train, _ROWS, sampler=order, collate_fn=collate
            )
            yield from _train(run, model, optimizer, loader, corpus.held_out, None)
            continue
        with mimose.attach(model, _BUDGET) as session:
            lengths = [len(text.token_ids) for text in train]
            drawn = mimose.BatchSampler(
                lengths, session, seed=task["seed"] + run, max_rows=_MOST_ROWS
            )
            loader = DataLoader(train, batch_sampler=drawn, collate_fn=collate)
            yield from _train(run, model, optimizer, loader, corpus.held_out, session)


def _train(
    run: int,
    model: DocstringClassifier,
    optimizer: torch.optim.Optimizer,
    loader: DataLoader[Any],
    held_out: Sequence[EncodedText],
    session: mimose.Session | None,
) -> Iterator[dict[str, Any]]:
    """Train until the accuracy is reached, by the rate that rows ask for."""
    samples = steps = tokens = held = 0
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
            tokens += int(batch["attention_mask"].sum())
            held += batch["input_ids"].numel()
            if samples < asked:
                continue
            asked += _EVERY
            accuracy = _accuracy(model, held_out)
            yield {
                "run": run,
                "samples": samples,
                "steps": steps,
                "seconds": seconds,
                "padding": 1.0 - tokens / held,
                "accuracy": accuracy,
                "over": 0 if session is None else session.summary().steps_over,
            }
            if accuracy >= _ACCURACY:
                return


@torch.no_grad()
def _accuracy(model: DocstringClassifier, texts: Sequence[EncodedText]) -> float:
    by_length = sorted(texts, key=lambda text: len(text.token_ids))
    model.eval()
    right = 0
    for at in range(0, len(by_length), 64):
        batch = collate(by_length[at : at + 64])
        labels = batch.pop("labels")
        right += int((model(**batch).logits.argmax(1) == labels).sum())
    model.train()
    return right / len(by_length)
