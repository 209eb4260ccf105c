"""Is `mimose advise` right?

On the simulated accelerator (``--part bytes``): each method's memory is fitted to a few
batch sizes and compared with others. In seconds (``--part seconds``) the advisor is
asked about each model and memory as a user would. Then, in turns of all methods once
more, batches are timed that no fit has seen, and what was recommended and judged is
run: is a method that was said to raise the best throughput faster, and does the
recommended one give what was promised, against plain training in the same turns?

    python -m benchmarks.proofs advise --part bytes --threads 1
    python -m benchmarks.proofs advise --part seconds --threads 1 --cases bert gpt2
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.proofs.advise_models import CASES, Case
from benchmarks.proofs.common import Answer, Bar, Settings, count, progress
from benchmarks.proofs.numbers import percent
from mimose.bench.advise.advice import Advice, advise_on
from mimose.bench.advise.measure import Run
from mimose.bench.advise.methods import METHODS, PLAIN
from mimose.bench.advise.models import Model, Steady
from mimose.bench.advise.rounds import Rounds, Sized, sized
from mimose.bench.advise.settings import Settings as Question
from mimose.bench.advise.training import Point
from mimose.bench.rows import Row
from mimose.predictors import fit_series, noise_ceiling
from mimose.predictors.lines import r2_score

QUESTION = "Is what mimose advise says right?"
OPTIONS = (
    ("--part", {"choices": ("bytes", "seconds"), "default": "seconds"}),
    ("--on", {"choices": ("sim", "cpu"), "default": "sim"}),
    ("--cases", {"nargs": "+", "choices": tuple(CASES), "default": list(CASES)}),
    count("--minutes", 5, "that the advisor may take for a model"),
    count("--rounds", 7, "of turns in which its answer is checked"),
)
_MEMORY_BAR, _SECONDS_BAR, _CHOICE_BAR, _CASES_BAR = 0.99, 0.97, 0.05, 6
_METHODS = ("full", "every-2", "lean", "mimose", "accumulate")
"""Beside plain training, for seconds."""
_FITTED, _HELD_OUT = (2, 8, 32, 64, 128, 256), (4, 16, 48, 96, 192)
_LEAST_CEILING = 0.98
"""Noise that leaves less to a prediction says nothing of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdviseRow(Row):
    """One method of one model: a fit, or a verdict, or a recommendation."""

    part: str
    """``bytes``, ``seconds``, ``verdict`` or ``choice``."""
    model: str
    method: str
    budget: str = ""
    points: int = 0
    """That were not fitted."""
    r2: float | None = None
    """At these: of bytes, or of throughput."""
    ceiling: float | None = None
    """R² that noise leaves to any prediction."""
    clock_ceiling: float | None = None
    """The same without the machine's pace."""
    refused: str = ""
    """Why there is no prediction, or no verdict."""
    batch: float | None = None
    predicted: float | None = None
    """Best throughput over plain training's."""
    measured: float | None = None
    is_right: bool | None = None


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Ask about each model."""
    told = settings.provenance()
    rows: list[AdviseRow] = []
    for name in options.cases:
        part = _bytes if options.part == "bytes" else _seconds
        for found in part(CASES[name], settings, options):
            rows.append(AdviseRow(model=name, **found, **told))
    return Answer(
        rows=[*rows],
        table=[_line(row) for row in rows],
        notes=[],
        bars=list(_judge(rows, options.part)),
    )


# ------------------------------------------------------------------ bytes


def _bytes(
    case: Case, settings: Settings, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Fit each method's memory to some batches, and predict others."""
    question = _question(case, "2GiB", settings, options)
    run = Run(replace(question, device="sim"), lambda _, __: None)
    for name, method in METHODS.items():
        if method.plans:
            continue
        progress(f"{case.name}: bytes of {name}")
        with contextlib.closing(run.child(name)) as child:
            facts = child.ask(["begin", {}])
            if facts["why_not"]:
                continue
            fitting, others = (  # a part of a batch has whole samples
                [method.parts * batch for batch in each]
                for each in (_FITTED, _HELD_OUT)
            )
            held = {
                batch: child.ask(["weigh", {"batch": batch}])["peak_bytes"]
                for batch in sorted((*fitting, *others))
            }
        fitted = fit_series(fitting, [held[batch] for batch in fitting])
        predicted = [fitted.predict(batch) for batch in others]
        measured = [held[batch] for batch in others]
        yield {
            "part": "bytes",
            "method": name,
            "points": len(_HELD_OUT),
            "r2": r2_score(np.array(measured, float), np.array(predicted)),
            "refused": fitted.refused,
        }


# ------------------------------------------------------------------ seconds


def _seconds(
    case: Case, settings: Settings, options: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Ask the advisor, then run what it has said."""
    for index, budget in enumerate(case.budgets[options.on]):
        question = _question(case, budget, settings, options)
        run = Run(question, lambda what, share: progress(f"{case.name}: {what}"))
        run.survey()
        run.time()
        advice = advise_on(run.found())
        progress(f"{case.name}: checking what was said about {budget}")
        timed = _checked(run, advice, options.rounds, with_others=index == 0)
        if index == 0:
            yield from _held_out(advice, timed, run.pace)
        yield from _verdicts(advice, timed, budget)
        yield from _choice(advice, timed, budget)


def _question(
    case: Case, budget: str, settings: Settings, options: argparse.Namespace
) -> Question:
    return Question(
        source=case.source,
        model=case.name,
        budget=budget,
        methods=_METHODS,
        device=options.on,
        threads=settings.threads,
        seed=settings.seed,
        minutes=float(options.minutes),
    )


def _checked(run: Run, advice: Advice, n_rounds: int, *, with_others: bool) -> Rounds:
    """Time, in turns, what was judged and recommended, and batches not fitted."""
    points: dict[str, list[Sized]] = {}
    for method in advice.methods:
        wanted = {int(method.best_batch)} if method.best_batch >= 1.0 else set()
        model = advice.models.get(method.name)
        if with_others and isinstance(model, Steady):
            wanted |= set(_between(advice, method.name))
        if wanted and model is not None:
            points[method.name] = [
                sized(Point(each), _about(model, each, advice.budget_bytes))
                for each in sorted(wanted)
            ]
    with contextlib.closing(run.crew()) as crew:
        rounds = Rounds(
            crew, points, run.learned, budget_bytes=advice.budget_bytes, seed=1
        )
        for _ in range(n_rounds):
            rounds.run_one()
    return rounds


def _about(model: Model, batch: int, budget_bytes: int) -> float:
    """Return the seconds of a step, as far as can be said."""
    if isinstance(model, Steady):
        return model.predict(batch)
    seconds = model.step_seconds(batch, budget_bytes)
    return seconds if math.isfinite(seconds) else 1.0


def _between(advice: Advice, name: str) -> Iterator[int]:
    """Yield batches between those that were timed, of whole parts."""
    parts = METHODS[name].parts
    found = next(m for m in advice.measurements.methods if m.method == name)
    timed = sorted(each.batch for each in found.timed if each.length is None)
    for low, high in itertools.pairwise(timed):
        middle = parts * round(math.sqrt(low * high) / parts)
        if middle not in timed:
            yield middle


def _held_out(
    advice: Advice, timed: Rounds, pace: float | None
) -> Iterator[dict[str, Any]]:
    """Compare throughput at batches that were not fitted, at the pace of the fits."""
    for name, model in advice.models.items():
        if not isinstance(model, Steady):
            continue
        batches = [batch for batch in _between(advice, name)]
        by_pace, by_clock = (
            np.array([of.get(Point(batch), []) for batch in batches]).T
            for of in (timed.seconds(name, pace), timed.by_the_clock(name))
        )
        if by_pace.ndim < 2 or len(batches) < 2:
            continue
        x = np.array(batches, float)
        rates = x / np.median(by_pace, axis=0)
        predicted = x / np.array([model.fitted.step_seconds(each) for each in batches])
        yield {
            "part": "seconds",
            "method": name,
            "points": len(batches),
            "r2": r2_score(rates, predicted),
            "ceiling": min(noise_ceiling(by_pace, x), advice.of(name).ceiling),
            "clock_ceiling": noise_ceiling(by_clock, x),
            "refused": model.refused,
        }


def _verdicts(advice: Advice, timed: Rounds, budget: str) -> Iterator[dict[str, Any]]:
    """Run every pair, whether it has a verdict or not."""
    plain = _rates(advice, timed, PLAIN)
    for method in advice.methods:
        mine = _rates(advice, timed, method.name)
        if method.name == PLAIN or plain is None or mine is None:
            continue
        ratio = statistics.median(m / p for m, p in zip(mine, plain, strict=True))
        has_verdict = bool(method.verdict) and math.isfinite(method.ratio)
        yield {
            "part": "verdict",
            "method": method.name,
            "budget": budget,
            "batch": method.best_batch,
            "predicted": method.ratio,
            "measured": ratio,
            "refused": method.no_verdict,
            "is_right": (ratio > 1.0) == (method.ratio > 1.0) if has_verdict else None,
        }


def _choice(advice: Advice, timed: Rounds, budget: str) -> Iterator[dict[str, Any]]:
    """Compare what was promised of the recommended method with what it gives."""
    choice = advice.free
    if choice is None:
        return
    mine, plain = _rates(advice, timed, choice.name), _rates(advice, timed, PLAIN)
    of_plain = advice.of(PLAIN).samples_per_second
    if mine is None:
        return
    if plain is None or not of_plain:
        promised, given = choice.samples_per_second, statistics.median(mine)
    else:
        promised = choice.samples_per_second / of_plain
        given = statistics.median(m / p for m, p in zip(mine, plain, strict=True))
    yield {
        "part": "choice",
        "method": choice.name,
        "budget": budget,
        "batch": choice.batch,
        "predicted": promised,
        "measured": given,
        "is_right": abs(given / promised - 1.0) <= _CHOICE_BAR,
    }


def _rates(advice: Advice, timed: Rounds, name: str) -> list[float] | None:
    """Return samples a second of each round at a method's best batch."""
    batch = int(advice.of(name).best_batch)
    seconds = timed.seconds(name).get(Point(batch))
    return None if not seconds else [batch / each for each in seconds]


# ------------------------------------------------------------------ telling


def _line(row: AdviseRow) -> dict[str, object]:
    told: dict[str, object] = {
        "part": row.part,
        "model": row.model,
        "method": row.method,
        "budget": row.budget,
        "R²": row.r2,
        "ceiling": row.ceiling,
        "by the clock": row.clock_ceiling,
        "batch": row.batch,
        "said": row.predicted,
        "is": row.measured,
        "right": row.is_right,
    }
    if row.part == "choice" and row.predicted and row.measured:
        told["off"] = percent(row.measured / row.predicted - 1.0, 1)
    return told


def _judge(rows: Sequence[AdviseRow], part: str) -> Iterator[Bar]:
    if part == "bytes":
        known = [row for row in rows if not row.refused]
        least = min((row.r2 or 0.0 for row in known), default=math.nan)
        yield Bar("R² of memory, the least", least, at_least=_MEMORY_BAR)
        yield Bar("series that are refused", len(rows) - len(known), 0)
        return
    able = [
        row
        for row in rows
        if row.part == "seconds"
        and not row.refused
        and (row.ceiling or 0.0) >= _LEAST_CEILING
    ]
    least = min((row.r2 or 0.0 for row in able), default=math.nan)
    all_rows = [row for row in rows if row.part == "seconds"]
    what = (
        f"R² of throughput, the least of {len(able)} of {len(all_rows)} below no noise"
    )
    yield Bar(what, least, at_least=_SECONDS_BAR)
    wrong = [row for row in rows if row.part == "verdict" and row.is_right is False]
    yield Bar("verdicts that are wrong", len(wrong), 0)
    choices = [row for row in rows if row.part == "choice"]
    yield Bar("recommendations that were run", len(choices), at_least=_CASES_BAR)
    off = [abs((row.measured or 0.0) / (row.predicted or 1.0) - 1.0) for row in choices]
    what = "recommended throughput, off by at most"
    yield Bar(what, max(off, default=math.nan), _CHOICE_BAR, is_share=True)
