"""How far is a step's growth from the prediction for its shape and plan?

Each model trains on new shapes, by turns under the planner's plans, for random budgets,
and under random plans. The library learns from the steps that it measures (collecting
ones, and fallbacks at shapes that it does not trust); a step under a plan is no such
sample. Only growths of at least 100 MiB count, because readings of a process's memory
differ by about a megabyte. An accelerator's are exact: there growths of at least 16 MiB
count, batches are a third, and bars are tighter.

    python -m benchmarks.proofs prediction
    python -m benchmarks.proofs prediction --pairs 30 --models vit
    python -m benchmarks.proofs prediction --device sim --fine --pairs 60
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, Sizes, by_name, names_of
from benchmarks.proofs.numbers import MIB, percent, quantile, worst
from mimose.bench.device import is_cpu
from mimose.planners import Plan, PlanningProblem, Search, lay_out, safest_plan
from mimose.planners.timeline import judge as laid_out
from mimose.session import attach

QUESTION = "How far is growth from its prediction, at unseen shapes under any plan?"
OPTIONS = (
    common.device("cpu"),
    common.count("--pairs", 300, "that count, a model"),
    common.flag("--fine", "plans of exact actions, mixed at random"),
    common.flag("--all", "plans of all actions, lossy ones and the host among them"),
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
_BARS, _DEVICE_BARS = (0.02, 0.01), (0.003, 0.001)
"""On |errors|, and on predictions that are too low."""
_FINE_BARS = (0.01, 0.01)
"""The same with more actions than keeping and recomputing."""


class Alternating:
    """Plans for budgets drawn at random, and random plans, in turn."""

    name = "alternating"

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._n_made = 0
        self.source = ""
        """The source of the last plan; cleared when it is read."""

    def plan(self, problem: PlanningProblem) -> Plan:
        """Make a plan; its budget is not read."""
        self._n_made += 1
        if self._n_made % 2:
            self.source = "planner"
            return Search().plan(replace(problem, budget_bytes=self._budget(problem)))
        self.source = "random"
        return laid_out(problem, self._choice(problem), planner=self.name)

    def _budget(self, problem: PlanningProblem) -> float:
        everything = np.zeros(len(problem.calls), dtype=np.intp)
        least = safest_plan(problem).peak_bytes
        most = lay_out(problem, everything).peak_bytes
        share = self._random.uniform(0.01, 1.0)
        return least + share * max(0.0, most - least)

    def _choice(self, problem: PlanningProblem) -> NDArray[np.intp]:
        """Take any allowed action for a random share of the calls; keep the rest."""
        share = self._random.random()
        chosen = []
        for allowed in problem.allowed:
            others = np.flatnonzero(allowed[1:]) + 1
            is_kept = not others.size or self._random.random() >= share
            chosen.append(0 if is_kept else self._random.choice(others.tolist()))
        return np.array(chosen, dtype=np.intp)


def ask(settings: Settings, options: Options) -> Answer:
    """Train every model, and judge its errors."""
    menu = "all" if options.all else "selective" if options.fine else "whole"
    usual = _BARS if is_cpu(settings.device) else _DEVICE_BARS
    bars = usual if menu == "whole" else _FINE_BARS
    answer = Answer(variant={"whole": "", "selective": "fine"}.get(menu, menu))
    for name in names_of(_SPECS, settings.models):
        task = {"model": name, "pairs": options.pairs, "menu": menu}
        rows = common.measured("prediction", settings, **task)
        answer.add(name, rows, *judge(options.pairs, bars, rows))
    return answer


def judge(pairs: int, bars: tuple[float, float], rows: Sequence[Row]) -> common.Verdict:
    """Judge a model's errors, of steps that grew by enough to be judged."""
    counted = [row for row in rows if row["counts"]]
    errors = [abs(row["error"]) for row in counted]
    low = quantile((max(0.0, row["error"]) for row in counted), 0.99)
    p99 = quantile(errors, 0.99)
    line = {
        "pairs": len(counted),
        "error p50": percent(quantile(errors, 0.5)),
        "error p99": percent(p99),
        "worst": percent(worst(errors)),
        "low p99": percent(low),
    }
    return line, [
        Bar("pairs that count", len(counted), at_least=pairs),
        Bar("error p99", p99, at_most=bars[0], is_share=True),
        Bar("too low, p99", low, at_most=bars[1], is_share=True),
    ]


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Train one model until enough pairs are there."""
    spec, least = _SPECS[task["model"]], _LEAST_GROWTH_BYTES
    if not is_cpu(task["device"]):
        least = _LEAST_DEVICE_GROWTH_BYTES
        low, high = (-(-size // _DEVICE_BATCH) for size in spec.sizes["batch"])
        spec = replace(spec, sizes={**spec.sizes, "batch": (low, high)})
    loop = Loop(spec.build(task["seed"], task["device"]))
    for row in predicted(loop, spec, task, least):
        yield {"model": spec.model, "menu": task["menu"], **row}


def predicted(loop: Loop, spec: ModelSpec, task: Task, least: int) -> Rows:
    """Train a loop on unseen shapes, and yield its predicted steps.

    Args:
        loop: Trains on batches of `spec`.
        spec: What batches are like.
        task: ``seed``, ``menu``, and ``pairs``: the steps of `least` and more.
        least: Bytes of growth from which a step counts.
    """
    generator = torch.Generator().manual_seed(task["seed"] + 1)
    loop.warm_up(spec.batch(spec.shortest(), generator))
    planner = Alternating(task["seed"])
    n_counted = 0
    # Steps are few and short here: a thread beside them would learn behind the last.
    how = {"meter": loop.meter, "refine": task["menu"] == "whole"}
    with attach(
        loop.model, common.AMPLE_BYTES, planner=planner, actions=task["menu"], **how
    ) as session:
        for sizes in _unseen(spec, generator, _TRIES * task["pairs"] + 20):
            planner.source = ""
            loop.step(spec.batch(sizes, generator))
            record = session.records[-1]
            if not planner.source or record.prediction_error is None:
                continue
            said = common.recorded(record, "step", "kept", "layer_calls", *GROWTHS)
            counts = said[GROWTHS[1]] >= least
            n_counted += counts
            yield {
                "sizes": json.dumps(sizes),
                "source": planner.source,
                **said,
                "error": said[GROWTHS[1]] / said[GROWTHS[0]] - 1,
                "counts": counts,
            }
            if n_counted >= task["pairs"]:
                return


def _unseen(spec: ModelSpec, generator: torch.Generator, most: int) -> Iterator[Sizes]:
    """Draw shapes, each only once."""
    seen = set()
    for _ in range(most):
        sizes = spec.draw(generator)
        key = tuple(sizes.values())
        if key not in seen:
            seen.add(key)
            yield sizes
