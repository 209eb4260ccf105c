"""How far is a step's growth from the prediction for its shape and plan?

Each model trains on new shapes, by turns under the planner's plans, for random budgets,
and under random plans. The library learns from the steps that it measures (collecting
ones, and fallbacks at shapes that it does not trust); a step under a plan is no such
sample. Only growths of at least 100 MiB count, because readings of a process's memory
differ by about a megabyte. An accelerator's are exact: there growths of at least 16 MiB
count, batches are a third, and bars are tighter.

``--hard`` takes loops that break simple models of memory: batches with and without
padding, frozen layers, adapters, a second loss on an inner tensor, accumulation, and a
user's checkpointing inside a layer.

    python -m benchmarks.proofs prediction
    python -m benchmarks.proofs prediction --hard --pairs 20 --models lora
    python -m benchmarks.proofs prediction --pairs 30 --models vit
    python -m benchmarks.proofs prediction --device sim --fine --pairs 60
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, Sizes, by_name, names_of
from benchmarks.proofs.numbers import MIB, percent, quantile, worst
from mimose.bench.device import is_cpu
from mimose.bench.zoo import Batch
from mimose.planners import Plan, PlanningProblem, Search, lay_out, safest_plan
from mimose.planners.timeline import judge as laid_out
from mimose.session import attach

QUESTION = "How far is growth from its prediction, at unseen shapes under any plan?"
OPTIONS = (
    common.device("cpu"),
    common.count("--pairs", 300, "that count, a model"),
    common.flag("--fine", "plans of exact actions, mixed at random"),
    common.flag("--all", "plans of all actions, lossy ones and the host among them"),
    common.flag("--hard", "loops that are hard to predict, in place of the models"),
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
_FINE_BARS, _HARD_BARS = (0.01, 0.01), (0.02, 0.02)
"""The same with more actions than keeping and recomputing, and of hard loops."""


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
    variant, cases = {"whole": "", "selective": "_fine", "all": "_all"}[menu], [*_SPECS]
    if options.hard:
        bars, variant, cases = _HARD_BARS, "_hard", [*_HARD]
    answer = Answer(path=settings.out / f"prediction{variant}.csv")
    for name in names_of(cases, settings.models):
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


# ------------------------------------------------------------------ hard loops


class _Masked(Loop):
    """Takes the padding out of every second batch."""

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return a batch's loss."""
        if self._n_steps % 2:
            full = torch.ones_like(batch["attention_mask"])
            batch = {**batch, "attention_mask": full}
        return super().loss(batch)


def _frozen(model: nn.Module) -> Loop:
    model.get_submodule("bert.embeddings").requires_grad_(False)
    return Loop(model)


def _adapted(model: nn.Module) -> Loop:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=8, target_modules=["query", "value"], task_type="SEQ_CLS")
    return Loop(get_peft_model(model, config))


def _checkpointed(model: nn.Module) -> Loop:
    """Checkpoint the feed-forward part inside each layer, as a user might."""
    for layer in model.get_submodule("bert.encoder.layer").children():
        part: Any = layer.feed_forward_chunk
        again = functools.partial(checkpoint, part, use_reentrant=False)
        vars(layer)["feed_forward_chunk"] = again
    return Loop(model)


class _Auxiliary(Loop):
    """Adds a loss on an inner layer's output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._inner: list[torch.Tensor] = []
        layer = model.get_submodule("bert.encoder.layer.2")
        layer.register_forward_hook(lambda _m, _i, output: self._inner.append(output))

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the sum of both losses."""
        loss, inner = super().loss(batch), self._inner.pop()
        states = inner if isinstance(inner, torch.Tensor) else inner[0]
        return loss + 0.01 * states.square().mean()


_HARD: dict[str, tuple[str, Callable[[nn.Module], Loop]]] = {
    "masks": ("bert", _Masked),
    "frozen": ("bert", _frozen),
    "lora": ("bert", _adapted),
    "auxiliary": ("bert", _Auxiliary),
    "accumulation": ("gpt2", functools.partial(Loop, window=4)),
    "checkpointed": ("bert", _checkpointed),
}
"""Models, and loops of them that are hard to predict."""


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Train one model until enough pairs are there."""
    name, make = _HARD.get(task["model"], (task["model"], Loop))
    spec, least = _SPECS[name], _LEAST_GROWTH_BYTES
    if not is_cpu(task["device"]):
        least = _LEAST_DEVICE_GROWTH_BYTES
        low, high = (-(-size // _DEVICE_BATCH) for size in spec.sizes["batch"])
        spec = replace(spec, sizes={**spec.sizes, "batch": (low, high)})
    loop = make(spec.build(task["seed"], task["device"]))
    for row in _predicted(loop, spec, task, least):
        yield {"model": task["model"], "menu": task["menu"], **row}


def _predicted(loop: Loop, spec: ModelSpec, task: Task, least: int) -> Rows:
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
