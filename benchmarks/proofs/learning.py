"""Does a model learn as much in less time if rows follow lengths?

A small BERT learns from which package of the standard library a docstring comes, until
it reaches an accuracy on held-out texts. One run has batches of a fixed number of rows,
drawn at random; the other has those of `mimose.BatchSampler`. Its learning rate is
larger by the square root of the ratio of mean rows, as the documentation advises. The
time is from the first step to the one that reaches the accuracy, with the session's
learning, but without the evaluations.

    python -m benchmarks.proofs learning --threads 2

With several ranks both runs have the sampler's batches: those that the ranks train in
one step have like predicted seconds, or are drawn at random. One process trains the
batches of a step in turn, and steps by the mean over all samples. A step takes the CPU
time of the slowest rank, and of drawing and the optimizer. In its first run each arm
tries several learning rates; the others have the one that was fastest.

    python -m benchmarks.proofs learning --ranks 4 --threads 1
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler

import mimose
from benchmarks.proofs import common, together
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.numbers import mean
from mimose.bench.corpus import (
    DocstringClassifier,
    collate,
    encode_corpus,
    load_corpus,
)

QUESTION = "Does a model learn as much in less time where rows follow lengths?"
OPTIONS = (
    common.count("--runs", 3, "an arm"),
    common.count("--ranks", 1, "that share a step"),
)

_FIXED, _RANDOM = "fixed rows", "ranks at random"
_ARMS = {False: (_FIXED, "rows by length"), True: (_RANDOM, "ranks alike")}
"""The arms, by whether there are several ranks."""
_ROWS, _RATE = 16, 5e-4
_RATES = 2.0, 4.0, 8.0
"""Factors of the rate that several ranks try."""
_MOST_ROWS = 64
"""The limit for all ranks: at most four times the rows, so at most twice the rate."""
_BUDGET = "+600MiB"
"""A batch of fixed rows of the longest texts needs as much with everything kept."""
_ACCURACY, _LOSS = 0.6, 1.25
"""What one rank has to reach on the held-out texts, and several: loss is less noisy."""
_EVERY, _MOST_EPOCHS = 256, 12
"""The samples between evaluations, the most epochs."""
_MEANS = "rate", "seconds", "samples", "steps", "waiting", "slowest_tokens"
_LABELS, _TOKENS, _VOCABULARY = 12, 384, 4096


def ask(settings: Settings, options: Options) -> Answer:
    """Train both arms with the same seeds, and compare the time to the target."""
    several = options.ranks > 1
    path = settings.out / f"learning{'_ranks' * several}.csv"
    answer, arms = Answer(path=path), _ARMS[several]
    rates = {arm: _RATES if several else (1.0,) for arm in arms}
    rows: list[Row] = []
    for run, arm in itertools.product(range(options.runs), arms):
        found: list[Row] = []
        for rate in rates[arm]:
            task = {"arm": arm, "run": run, "rate": rate, "ranks": options.ranks}
            rows += common.measured("learning", settings, **task)
            found.append(rows[-1])
            common.progress(f"{arm}, run {run}: {rows[-1]}")
        best = min(found, key=lambda row: (not row["reached"], row["seconds"]))
        rates[arm] = (best["rate"],)
    for arm in arms:
        own = [row for row in rows if row["arm"] == arm]
        last = [r for r in own if r["reached"] and r["rate"] == rates[arm][0]]
        line = {
            "runs that got there": len(last),
            **{name: mean(row[name] for row in last) for name in _MEANS},
            "steps over": max(row["over"] for row in own),
        }
        bars = [Bar("runs that got there", len(last), at_least=options.runs)]
        answer.add(arm, own, line, bars, head="arm")
    before, ours = (line["seconds"] for line in answer.table)
    if isinstance(before, float) and isinstance(ours, float):
        answer.notes.append(f"seconds: {ours / before:.2f} of {arms[0]}")
    return answer


# ------------------------------------------------------------------ in the child


class _Ranks(mimose.BatchSampler):
    """Yields the batches of all ranks, step by step, in one process."""

    _drawn: Sequence[list[int]] = ()

    def __iter__(self) -> Iterator[list[int]]:
        for own in super().__iter__():
            yield own
            for batch in self._drawn[1:]:
                found = self._lengths[batch]
                sizes = *found.sum(axis=0).tolist(), *found.max(axis=0).tolist()
                self._unreported.append((len(batch), *sizes))
                self._report()
                yield batch

    def _choose(self) -> Any:
        step = super()._choose()
        self._drawn = [self._order[batch].tolist() for batch in step.batches]
        return step


def work(task: Task) -> Rows:
    """Train one run; yield what it can tell after every so many samples."""
    from transformers import BertConfig, BertModel

    corpus = encode_corpus(load_corpus(_LABELS), _TOKENS, _VOCABULARY)
    train: Any = corpus.train
    held_out = sorted(corpus.held_out, key=lambda text: len(text.token_ids))
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 256}
    sizes |= {"num_hidden_layers": 4, "num_attention_heads": 2}
    config = BertConfig(vocab_size=corpus.vocabulary_size, **sizes)
    ranks, seed = task["ranks"], task["seed"] + task["run"]
    torch.manual_seed(seed)
    model = DocstringClassifier(BertModel(config), len(corpus.labels), 0.1).train()
    drawn: Any = BatchSampler(RandomSampler(train), _ROWS, drop_last=False)
    session = None
    with contextlib.ExitStack() as undo:
        if task["arm"] != _FIXED:
            session = undo.enter_context(mimose.attach(model, _BUDGET))
            undo.enter_context(together.alone(ranks))
            lengths = [len(text.token_ids) for text in train]
            own: dict[str, Any] = {"seed": seed, "max_rows": _MOST_ROWS // ranks}
            own |= {"balance": task["arm"] != _RANDOM, "rank": 0, "world_size": ranks}
            drawn = _Ranks(lengths, session, **own)
        loader = DataLoader(train, batch_sampler=drawn, collate_fn=collate)
        for told in _train(model, loader, task["rate"], ranks):
            loss, accuracy = _held_out(model, held_out)
            reached = accuracy >= _ACCURACY if ranks == 1 else loss <= _LOSS
            over = session.summary().steps_over if session else 0
            row = {**told, "loss": loss, "accuracy": accuracy, "reached": reached}
            yield {**task, **row, "over": over}
            if reached:
                break


def _held_out(model: DocstringClassifier, texts: list[Any]) -> tuple[float, float]:
    """Return the mean loss of texts, and the share that is named correctly."""
    loss, right = 0.0, 0
    model.eval()
    with torch.no_grad():
        for batch in (collate(texts[i : i + 64]) for i in range(0, len(texts), 64)):
            told = model(**batch)
            loss += len(batch["labels"]) * float(told.loss)
            right += int((told.logits.argmax(dim=-1) == batch["labels"]).sum())
    model.train()
    return loss / len(texts), right / len(texts)


def _train(
    model: DocstringClassifier, loader: DataLoader[Any], rate: float, ranks: int
) -> Rows:
    """Train by the rate that rows ask for; yield after every so many samples."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate * _RATE)
    clock = time.perf_counter if ranks == 1 else time.thread_time
    samples = steps = tokens = 0
    seconds, slowest, trained, asked = 0.0, 0.0, 0.0, _EVERY
    for _ in range(_MOST_EPOCHS):
        batches = iter(loader)
        while True:
            began = clock()
            step = list(itertools.islice(batches, ranks))
            if not step:
                break
            total = sum(len(batch["labels"]) for batch in step)
            samples, steps = samples + total, steps + 1
            tokens += max(batch["input_ids"].numel() for batch in step)
            more = math.sqrt(max(1.0, samples / steps / _ROWS))
            for group in optimizer.param_groups:
                group["lr"] = rate * _RATE * more
            ends = [clock()]
            for batch in step:
                loss = model(**batch).loss
                assert loss is not None
                (loss * (len(batch["labels"]) / total)).backward()
                ends.append(clock())
            optimizer.step()
            optimizer.zero_grad()
            took = [end - start for start, end in itertools.pairwise(ends)]
            slowest, trained = slowest + max(took), trained + sum(took)
            seconds += clock() - began - sum(took) + max(took)
            if samples >= asked:
                asked += _EVERY
                told = {"samples": samples, "steps": steps, "seconds": seconds}
                told |= {"waiting": 1.0 - trained / ranks / slowest}
                yield told | {"slowest_seconds": slowest, "slowest_tokens": tokens}
