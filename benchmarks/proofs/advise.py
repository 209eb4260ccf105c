"""Is `mimose advise` right?

``--part bytes``, on the simulated accelerator, fits each method's memory to a few batch
sizes and compares the fit with other sizes. ``--part seconds`` runs the advisor for
each model and memory as a user would. Then all methods take turns once more, on batches
that no fit has seen and on the recommended ones. Are methods faster that the advisor
said raise the best throughput? Does the recommended one have the predicted advantage
over plain training in the same turns?

    python -m benchmarks.proofs advise --part bytes --threads 1
    python -m benchmarks.proofs advise --part seconds --threads 1 --cases bert gpt2

The models are so small that a step of one sample is mostly fixed time: only if
throughput changes with the batch is there anything to predict.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import r2_score
from torch import nn

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from mimose.bench.advise.advice import Advice, advise_on
from mimose.bench.advise.measure import Ladder, Run, begin
from mimose.bench.advise.methods import METHODS, PLAIN
from mimose.bench.advise.settings import Settings as Question
from mimose.bench.step_meter import step_meter
from mimose.bench.zoo import ZOO
from mimose.predictors import fit_series

_CPU = ("+400MiB", "+100MiB")
BUDGETS: Mapping[str, Mapping[str, tuple[str, str]]] = {
    "resnet": {"sim": ("+80MiB", "+13MiB"), "cpu": _CPU},
    "wide_resnet": {"sim": ("+250MiB", "+90MiB"), "cpu": _CPU},
    "vit": {"sim": ("+80MiB", "+4.5MiB"), "cpu": _CPU},
    "bert": {"sim": ("+80MiB", "+7MiB"), "cpu": _CPU},
    "gpt2": {"sim": ("+150MiB", "+9MiB"), "cpu": _CPU},
}
"""By model and device, above what a process holds before its first step: room for plain
training at batches of many sizes, and a memory in which few samples fit."""

QUESTION = "Is what mimose advise says right?"
OPTIONS = (
    ("--part", {"choices": ("bytes", "seconds"), "default": "seconds"}),
    ("--on", {"choices": ("sim", "cpu"), "default": "sim"}),
    common.some("--cases", BUDGETS),
    common.count("--minutes", 5, "that the advisor may take for a model"),
    common.count("--rounds", 7, "of turns in which its answer is checked"),
)
_MEMORY, _SECONDS, _CHOICE, _CASES = 0.99, 0.97, 0.05, 6
_METHODS = ("full", "every-2", "selective", "mimose", "accumulate")
"""Beside plain training, for seconds."""
_FITTED, _HELD_OUT = (2, 8, 32, 64, 128, 256), (4, 16, 48, 96, 192)
_TOLD = (
    *("part", "model", "method", "budget", "r2", "ceiling", "batch", "predicted"),
    *("measured", "is_right"),
)
_LEAST_CEILING = 0.98
"""Noise that leaves less to a prediction says nothing of it."""


def ask(settings: Settings, options: Options) -> Answer:
    """Ask about each model."""
    rows: list[Row] = []
    for name in options.cases:
        part = _bytes if options.part == "bytes" else _seconds
        for found in part(name, settings, options):
            rows.append({"model": name, **found, **settings.provenance()})
    bars = list(judge(rows, options.part))
    return Answer(
        rows=rows, table=[{n: row.get(n) for n in _TOLD} for row in rows], bars=bars
    )


# ------------------------------------------------------------------ measuring


def work(task: Task) -> Rows:
    """Yield a method's bytes at the batches of the task."""
    training, _ = begin(task["question"], task["method"])
    meter = step_meter(training.device)
    training.attach(None, meter)
    ladder = Ladder(training, meter, METHODS[task["method"]], math.inf)
    for batch in task["batches"]:
        ladder.weigh(batch)
    yield {"held": {each.batch: each.peak_bytes for each in ladder.found}}


def _bytes(name: str, settings: Settings, options: Options) -> Rows:
    """Fit each method's memory to common.some batches, and predict others."""
    question = asdict(_question(name, "2GiB", settings, options))
    for method in METHODS.values():
        if method.plans or method.name == "sdpa":  # plain training's own line
            continue
        common.progress(f"{name}: bytes of {method.name}")
        fitting, others = (
            [method.parts * batch for batch in each] for each in (_FITTED, _HELD_OUT)
        )
        task = {"device": "sim", "method": method.name, "question": question}
        told = common.said_by(
            "advise", settings, batches=sorted(fitting + others), **task
        )
        held = {int(batch): n for each in told for batch, n in each["held"].items()}
        fitted = fit_series(fitting, [held[batch] for batch in fitting])
        predicted = np.array([fitted.predict(batch) for batch in others])
        yield {
            "part": "bytes",
            "method": method.name,
            "points": len(others),
            "r2": r2_score(np.array([held[each] for each in others], float), predicted),
            "refused": fitted.refused,
        }


def _seconds(name: str, settings: Settings, options: Options) -> Rows:
    """Ask the advisor, then run what it has said."""
    for index, budget in enumerate(BUDGETS[name][options.on]):
        question = _question(name, budget, settings, options)
        with contextlib.closing(
            Run(question, lambda what, _: common.progress(f"{name}: {what}"))
        ) as run:
            run.survey()
            run.time()
            advice, pace = advise_on(run.found()), run.pace
            run.readings = {}
            batches: dict[str, list[int]] = {}
            for each, model in advice.models.items():
                wanted = {int(advice.of(each).best_batch)} - {0}
                if index == 0 and not METHODS[each].plans:
                    wanted |= set(_between(model.sizes, model.parts))
                batches[each] = sorted(wanted)
            run.rounds({n: of for n, of in batches.items() if of}, options.rounds)
            timed = {each: run.seconds(each, pace) for each in run.readings}
        if index == 0:
            yield from _held_out(advice, timed)
        yield from _judged(advice, timed, budget)


def _question(name: str, budget: str, settings: Settings, options: Options) -> Question:
    told: dict[str, Any] = {"budget": budget, "methods": _METHODS}
    told |= {"minutes": float(options.minutes)}
    told |= {"device": "sim" if options.part == "bytes" else options.on}
    told |= {"threads": settings.threads, "seed": settings.seed}
    return Question(source=f"{__name__}:{name}", model=name, **told)


def _between(timed: Sequence[float], parts: int) -> Iterator[int]:
    """Yield batches between those that were timed, of whole parts."""
    for low, high in itertools.pairwise(timed):
        middle = parts * round(math.sqrt(low * high) / parts)
        if middle not in timed:
            yield middle


_Timed = Mapping[str, Mapping[int, Sequence[float]]]


def _held_out(advice: Advice, timed: _Timed) -> Rows:
    """Compare throughput at batches that were not fitted, at the pace of the fits."""
    for name, model in advice.models.items():
        batches = [] if METHODS[name].plans else [*_between(model.sizes, model.parts)]
        took = np.array([timed.get(name, {}).get(each, []) for each in batches]).T
        if took.ndim < 2 or len(batches) < 2:
            continue
        x = np.array(batches, float)
        predicted = x / np.array([model.fit.predict(each) for each in batches])
        yield {
            "part": "seconds",
            "method": name,
            "points": len(batches),
            "r2": r2_score(x / np.median(took, axis=0), predicted),
            "ceiling": _noise_ceiling(x / took),
            "refused": model.memory.refused or model.fit.refused,
        }


def _noise_ceiling(rates: NDArray[np.float64]) -> float:
    """Return the R² that noise leaves to a prediction: of every second round's medians.

    Args:
        rates: (n_rounds, n_points) samples a second.
    """
    one, other = (np.median(rates[first::2], axis=0) for first in (0, 1))
    return float(r2_score(other, one))


def _judged(advice: Advice, timed: _Timed, budget: str) -> Rows:
    """Yield each verdict, and the recommended method, beside what was measured."""

    def rates(name: str) -> list[float]:
        batch = int(advice.of(name).best_batch)
        return [batch / each for each in timed.get(name, {}).get(batch, [])]

    def times_plain(name: str) -> float:
        pairs = zip(rates(name), rates(PLAIN), strict=True)
        return statistics.median(mine / plain for mine, plain in pairs)

    for method in advice.methods:
        if method.name == PLAIN or not (rates(method.name) and rates(PLAIN)):
            continue
        told: dict[str, Any]
        ratio, said = times_plain(method.name), method.ratio
        is_right = (ratio > 1.0) == (said > 1.0) if method.verdict else None
        told = {"part": "verdict", "budget": budget, "method": method.name}
        told |= {"batch": method.best_batch, "refused": method.no_verdict}
        yield {**told, "predicted": said, "measured": ratio, "is_right": is_right}
    choice, bare = advice.free, advice.of(PLAIN).samples_per_second
    if choice is None or not rates(choice.name):
        return
    promised, given = choice.samples_per_second, statistics.median(rates(choice.name))
    if rates(PLAIN):
        promised, given = promised / bare, times_plain(choice.name)
    is_right = abs(given / promised - 1.0) <= _CHOICE
    told = {"part": "choice", "budget": budget, "method": choice.name}
    told |= {"batch": choice.batch, "predicted": promised, "measured": given}
    yield {**told, "is_right": is_right}


# ------------------------------------------------------------------ reporting


def judge(rows: Sequence[Row], part: str) -> Iterator[Bar]:
    """Hold rows to their bars."""
    if part == "bytes":
        known = [row["r2"] for row in rows if not row["refused"]]
        yield Bar("R² of memory, the least", min(known, default=None), at_least=_MEMORY)
        yield Bar("series that are refused", len(rows) - len(known), 0)
        return
    series = [row for row in rows if row["part"] == "seconds"]
    quiet = [row for row in series if row["ceiling"] >= _LEAST_CEILING]
    able = [row["r2"] for row in quiet if not row["refused"]]
    of = f"{len(able)} of {len(series)} below no noise"
    least = min(able, default=None)
    yield Bar(f"R² of throughput, the least of {of}", least, at_least=_SECONDS)
    verdicts = [row["is_right"] for row in rows if row["part"] == "verdict"]
    yield Bar("verdicts that are wrong", verdicts.count(False), 0)
    choices = [row for row in rows if row["part"] == "choice"]
    yield Bar("recommendations that were run", len(choices), at_least=_CASES)
    off = [abs(row["measured"] / row["predicted"] - 1.0) for row in choices]
    what = "recommended throughput, off by at most"
    yield Bar(what, max(off, default=None), _CHOICE, is_share=True)


# ------------------------------------------------------------------ models

_LAYERS = {"num_hidden_layers": 4, "num_labels": 10}


def resnet(width: int = 16) -> tuple[nn.Module, Any]:
    """Return a ResNet of basic blocks on images of 32 pixels."""
    widths = [width, 2 * width, 4 * width, 8 * width]
    how: Any = {"hidden_sizes": widths, "embedding_size": width, "num_labels": 10}
    return ZOO["resnet"].build(**how), _images()


def wide_resnet() -> tuple[nn.Module, Any]:
    """Return the same, twice as wide."""
    return resnet(32)


def vit() -> tuple[nn.Module, Any]:
    """Return a vision transformer on images of 32 pixels."""
    how: Any = {**_LAYERS, "image_size": 32, "patch_size": 8}
    how |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return ZOO["vit"].build(**how), _images()


def bert() -> tuple[nn.Module, Any]:
    """Return a BERT on texts of 16 tokens."""
    ids, labels = torch.randint(1000, (64, 16)), torch.randint(10, (64,))
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}
    return ZOO["bert"].build(vocab_size=1000, use_cache=False, **_LAYERS), batch


def gpt2() -> tuple[nn.Module, Any]:
    """Return a GPT-2 on texts of 16 tokens."""
    ids, tokens = torch.randint(1000, (64, 16)), {"bos_token_id": 0, "eos_token_id": 0}
    model = ZOO["gpt2"].build(vocab_size=1000, n_layer=4, use_cache=False, **tokens)
    return model, {"input_ids": ids, "labels": ids}


def _images() -> dict[str, torch.Tensor]:
    labels = torch.randint(10, (64,))
    return {"pixel_values": torch.rand(64, 3, 32, 32), "labels": labels}
