"""How far is a step's growth from what was predicted for its shape and plan?

Each model is trained on shapes it never saw before, under plans that alternate
between the planner's own, for budgets drawn at random, and random ones. The library
learns from the steps it measures (collecting ones, and fallbacks at shapes it does
not trust); a step under a plan is no such sample. Only growths from 100 MiB up
count: readings of a process's memory differ by a megabyte or so. An accelerator's are
exact: there growths from 16 MiB up count, batches are a third, and bars are closer.

    python -m benchmarks.proofs prediction
    python -m benchmarks.proofs prediction --pairs 30 --models vit
    python -m benchmarks.proofs prediction --device sim
    python -m benchmarks.proofs prediction --device sim --fine --pairs 60
    python -m benchmarks.proofs prediction --device sim --all --pairs 60
"""

from __future__ import annotations

import argparse
import json
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    device,
    flag,
    progress,
    recorded,
    said_by,
)
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, Sizes, by_name, names_of
from benchmarks.proofs.numbers import MIB, mebibytes, percent, quantile, worst
from mimose.bench.device import is_cpu
from mimose.bench.grid.strategies import menu_named
from mimose.bench.rows import Row
from mimose.planners import Marginal, Plan, PlanningProblem, lay_out, safest_plan
from mimose.planners.actions import EXACT_MENU
from mimose.planners.timeline import judge
from mimose.records import StepRecord
from mimose.session import attach

QUESTION = "How far is growth from its prediction, at unseen shapes under any plan?"
OPTIONS = (
    device("cpu"),
    count("--pairs", 300, "that count, a model"),
    flag("--fine", "plans of exact actions, mixed at random"),
    flag("--all", "plans of all actions, lossy ones and the host among them"),
)

_SPECS = by_name(
    ModelSpec("bert", {"batch": (18, 30), "length": (256, 448)}),
    ModelSpec("gpt2", {"batch": (10, 18), "length": (320, 608)}),
    ModelSpec("t5", {"batch": (9, 15), "source": (224, 384), "target": (128, 256)}),
    ModelSpec(
        "vit",
        {"batch": (32, 52), "height": (208, 336), "width": (208, 336)},
        multiple=16,
    ),
    ModelSpec("albert", {"batch": (18, 30), "length": (256, 448)}),
    ModelSpec("resnet", {"batch": (20, 32), "height": (224, 352), "width": (224, 352)}),
)
_LEAST_GROWTH_BYTES, _LEAST_DEVICE_GROWTH_BYTES = 100 * MIB, 16 * MIB
_DEVICE_BATCH = 3
"""An accelerator's batches are those of a CPU divided by this."""
GROWTHS = "predicted_growth_bytes", "observed_growth_bytes"
_TRIES = 6
"""Steps a pair, at the most."""
_BARS, _DEVICE_BARS, _DEVICE_MEDIAN_BAR = (0.02, 0.01), (0.003, 0.001), 0.0005
"""On |errors|, and on predictions that are too low."""
_FINE_BARS = (0.01, 0.01)
"""The same with more actions than keeping and recomputing."""
_MEDIANS_MISSED = 1
"""So many models may miss the bar on medians."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PairRow(Row):
    """One step at an unseen shape under a plan."""

    model: str
    step: int
    sizes: str
    """As JSON."""
    source: str
    """``"planner"`` or ``"random"``."""
    phase: str
    kept: int
    """Events whose activations were kept."""
    events: int
    menu: str
    """The session's actions, in a word."""
    plan: str = ""
    """One letter for each event's action."""
    predicted_growth_bytes: float
    observed_growth_bytes: int

    @property
    def counts(self) -> bool:
        """Whether the growth is large enough to be judged."""
        return self.observed_growth_bytes >= _least_growth(self.device)

    @property
    def error(self) -> float:
        """(observed − predicted) ÷ predicted; positive where the prediction was low."""
        return self.observed_growth_bytes / self.predicted_growth_bytes - 1


def _least_growth(device: str) -> int:
    """Return the smallest growth that is judged, on a device as rows write it."""
    return _LEAST_GROWTH_BYTES if is_cpu(device) else _LEAST_DEVICE_GROWTH_BYTES


class Alternating:
    """Plans for budgets drawn at random, and random plans, in turn."""

    name = "alternating"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._n_made = 0
        self.source = ""
        """Of the last plan; whoever reads it empties it."""

    def plan(self, problem: PlanningProblem) -> Plan:
        """Make a plan; its budget is not read."""
        self._n_made += 1
        if self._n_made % 2:
            self.source = "planner"
            return Marginal().plan(replace(problem, budget_bytes=self._budget(problem)))
        self.source = "random"
        return judge(problem, self._choice(problem), planner=self.name)

    def _budget(self, problem: PlanningProblem) -> float:
        everything = np.zeros(len(problem.events), dtype=np.intp)
        least = safest_plan(problem).peak_bytes
        most = lay_out(problem, everything).peak_bytes
        share = self._random.uniform(0.01, 1.0)
        return least + share * max(0.0, most - least)

    def _choice(self, problem: PlanningProblem) -> NDArray[np.intp]:
        share = self._random.random()
        if len(problem.actions) > len(EXACT_MENU.names):
            return self._mixed(problem, share)
        recomputed = [self._random.random() < share for _ in problem.events]
        return np.array(recomputed, dtype=np.intp) * problem.allowed[:, 1]

    def _mixed(self, problem: PlanningProblem, share: float) -> NDArray[np.intp]:
        """Choose any action for about so many events, and keep the others."""
        chosen = [
            self._random.choice(np.flatnonzero(allowed).tolist())
            if self._random.random() < share
            else 0
            for allowed in problem.allowed
        ]
        return np.array(chosen, dtype=np.intp)


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train every model, and judge its errors."""
    menu = "all" if options.all else "fine" if options.fine else "exact"
    answer = Answer(variant="" if menu == "exact" else menu)
    rows: list[PairRow] = []
    for name in names_of(_SPECS, settings.models):
        own, others = [], Counter[str]()
        task = {"model": name, "pairs": options.pairs, "menu": menu}
        for said in said_by("prediction", settings, **task):
            if "other" in said:
                others[said["other"]] += 1
            else:
                own.append(PairRow(**said, **settings.provenance()))
                if len(own) % 50 == 0:
                    progress(f"prediction {name}: {len(own)} pairs")
        rows += own
        bars = _judge(own, options.pairs, settings.device, is_fine=menu != "exact")
        answer.add(name, own, _summarise(own, others), bars)
    if not is_cpu(settings.device) and menu == "exact":
        answer.bars.append(_medians_bar(rows))
    return answer


def _summarise(rows: Sequence[PairRow], others: Mapping[str, int]) -> dict[str, object]:
    counted = [row for row in rows if row.counts]
    errors = [abs(row.error) for row in counted]
    growths = [row.observed_growth_bytes for row in counted]
    return {
        "pairs": len(counted),
        "random": sum(row.source == "random" for row in counted),
        "growth p50 MiB": mebibytes(quantile(growths, 0.5)),
        "error p50": percent(quantile(errors, 0.5)),
        "error p99": percent(quantile(errors, 0.99)),
        "worst": percent(worst(errors)),
        "low p99": percent(_low(counted)),
        "lowest": percent(worst(row.error for row in counted)),
        "too small": len(rows) - len(counted),
        "steps besides": dict(others),
    }


def _low(rows: Sequence[PairRow]) -> float | None:
    return quantile((max(0.0, row.error) for row in rows), 0.99)


def _judge(
    rows: Sequence[PairRow], pairs: int, device: str, *, is_fine: bool
) -> list[Bar]:
    counted = [row for row in rows if row.counts]
    error = quantile((abs(row.error) for row in counted), 0.99)
    least = _least_growth(device) // MIB
    usual = _BARS if is_cpu(device) else _DEVICE_BARS
    error_bar, low_bar = _FINE_BARS if is_fine else usual
    return [
        Bar(f"pairs of {least} MiB and more", len(counted), at_least=pairs),
        Bar("error p99", error, at_most=error_bar, is_share=True),
        Bar("too low, p99", _low(counted), at_most=low_bar, is_share=True),
    ]


def _medians_bar(rows: Sequence[PairRow]) -> Bar:
    """Judge the models' median errors: all but one are to be close."""
    models = {row.model for row in rows}
    errors = [
        quantile((abs(r.error) for r in rows if r.model == name and r.counts), 0.5)
        for name in models
    ]
    close = sum(error is not None and error <= _DEVICE_MEDIAN_BAR for error in errors)
    what = f"models with an error p50 of at most {percent(_DEVICE_MEDIAN_BAR)}"
    missed = _MEDIANS_MISSED if len(models) == len(_SPECS) else 0
    return Bar(what, close, at_least=len(models) - missed)


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train one model until enough pairs are there."""
    spec = _spec_on(task["model"], task["device"])
    least = _least_growth(task["device"])
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    loop = Loop(spec.build(task["seed"], task["device"]))
    loop.warm_up(spec.batch(spec.shortest(), generator))
    planner = Alternating(task["seed"])
    n_counted = 0
    # Steps are few and short here: a thread beside them would learn behind the last.
    how = {"meter": loop.meter, "refine": task["menu"] == "exact"}
    with attach(
        loop.model, AMPLE_BYTES, planner=planner, actions=task["menu"], **how
    ) as session:
        for sizes in _unseen(spec, generator, _TRIES * task["pairs"] + 20):
            planner.source = ""
            loop.step(spec.batch(sizes, generator))
            said = _pair(session.records[-1], planner.source)
            told = {"model": spec.model, "sizes": json.dumps(sizes)}
            plan = menu_named(task["menu"]).codes(session.records[-1].actions)
            yield {**said, **told, "menu": task["menu"], "plan": plan}
            n_counted += said.get("observed_growth_bytes", 0) >= least
            if n_counted >= task["pairs"]:
                return


def _spec_on(model: str, device: str) -> ModelSpec:
    """Return a model's spec; on an accelerator with batches of a third."""
    spec = _SPECS[model]
    if is_cpu(device):
        return spec
    low, high = (-(-size // _DEVICE_BATCH) for size in spec.sizes["batch"])
    return replace(spec, sizes={**spec.sizes, "batch": (low, high)})


def _unseen(spec: ModelSpec, generator: torch.Generator, most: int) -> Iterator[Sizes]:
    """Draw shapes, each only once."""
    seen = set()
    for _ in range(most):
        sizes = spec.draw(generator)
        key = tuple(sizes.values())
        if key not in seen:
            seen.add(key)
            yield sizes


def _pair(record: StepRecord, source: str) -> dict[str, Any]:
    """Return a row's fields if the step ran under a plan made for it, else why not."""
    if not source or record.prediction_error is None:
        return {"other": record.phase}
    return {
        **recorded(record, "step", "phase", "kept", "events", *GROWTHS),
        "source": source,
    }
