"""Do ranks that draw their own batches end their steps together?

    python -m benchmarks.proofs together
    python -m benchmarks.proofs together --parts two

Llama-8B with LoRA trains on hollow cards, on samples of log-normal lengths.

- two: two processes, each with a card, a session and a `mimose.BatchSampler`, with its
  balance and without. At a step's end they exchange what their clocks say of it; the
  step takes the slower one's. No gradients cross.
- many: a session learns alone. Then samplers of more ranks draw an epoch, all ranks
  with that session's numbers. Seconds are forecasts of each batch's exact shape.
- rival: transformers' ``batch_rebalance`` for two ranks whose batches run one after the
  other on one card, with the most rows that never run out of memory, found by trial,
  plainly and under transformers' checkpointing; `accumulated` micro-batches a step.

Rates are real tokens a second of both ranks on the user's clock, waits included; those
of the second epoch compare with the rival's. `slowest` is the sum over steps of the
slowest rank's seconds over that of the mean, on the device's clock or by forecasts.
"""

from __future__ import annotations

import math
import random
import statistics
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from numpy.typing import NDArray
from torch import distributed

import mimose
from benchmarks.proofs import balance, common, ranks
from benchmarks.proofs.common import Answer, Bar, Options, Rows, Settings, Task
from benchmarks.scale.fill import PLACES, Group, Trials
from benchmarks.scale.host import of_session
from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.run import BUDGET, GIB, Run, build
from benchmarks.sim.hollow import Clock
from mimose.bench.device import SIM

QUESTION = "Do ranks that draw their own batches end their steps together?"
DEFAULTS = {"seed": 3, "threads": 1, "device": SIM}
_PARTS = "two", "many", "rival"
OPTIONS = (
    common.some("--parts", _PARTS),
    common.count("--samples", 1500, "that two ranks train"),
)
_EPOCHS, _UNTIL_LEARNED = 2, 40
_SECONDS = 3000.0
"""The longest time of two ranks."""
_LEARNED = 120
"""Steps that one rank learns from before more are simulated."""
_STEPS, _FEWEST = 32, 2000
"""Steps of an epoch of many ranks, and its fewest samples."""
_MANY = {"log-normal": (2, 8, 32, 128, 1024), "uniform": (8, 128), "BERT": (8, 128)}
_BARS = {8: 1.05, 32: 1.10, 128: 1.40}
_ACCUMULATED = 1, 4
_TRIALS = 10_000
"""Steps of a trial, at most: more than its epochs have."""


class _Step(NamedTuple):
    """What a step took, by rank."""

    device: Sequence[float]
    user: Sequence[float]
    n_tokens: int


def _summed(steps: Sequence[_Step]) -> dict[str, Any]:
    """Return columns of such steps, in which all ranks wait for the slowest."""
    found = {"n_steps": len(steps)}
    for clock, name in ((0, "slowest"), (1, "user_slowest")):
        seconds = np.array([step[clock] for step in steps])
        found[name] = seconds.max(axis=1).sum() / seconds.mean(axis=1).sum()
    waited = sum(max(step.user) for step in steps)
    return {**found, "tokens_per_second": sum(s.n_tokens for s in steps) / waited}


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Do a part; yield its rows.

    Args:
        task: ``part``, ``samples``, ``seed`` and ``device``; of two ranks also
            ``balance``, ``rank`` and ``store``.
    """
    warnings.filterwarnings("ignore")
    yield from {"two": _two, "many": _many, "rival": _rival}[task["part"]](task)


def _build(task: Task, name: str = balance.WORKLOAD, gib: int = 80) -> Run:
    return build(WORKLOADS[name], {**task, "gib": gib, "card": "h100"})


def _two(task: Task) -> Rows:
    """Train as one of two ranks; the first one tells."""
    ranks.join(task)
    run, n_ooms = _build(task), 0
    lengths = balance.lengths_of(random.Random(task["seed"]), task["samples"])
    budget = int(BUDGET * balance.CARD_GIB * GIB)
    steps: list[list[_Step]] = []
    drawn: list[list[int]] = []
    with (
        mimose.attach(run.model, budget, refine=False) as session,
        run.charged(of_session(session)),
    ):
        sampler = mimose.BatchSampler(
            lengths, session, seed=task["seed"], balance=task["balance"]
        )
        for _ in range(_EPOCHS):
            steps.append([])
            drawn.append([])
            for batch in sampler:
                before = run.card.clock()
                try:
                    run.train((max(lengths[at] for at in batch),), len(batch))
                except torch.OutOfMemoryError:
                    n_ooms += 1
                    run.optimizer.zero_grad()
                clock = run.card.clock().since(before)
                told: list[Any] = [None] * ranks.N_RANKS
                own = clock.seconds, clock.user, batch, n_ooms
                distributed.all_gather_object(told, own)
                device, user, batches, ooms = zip(*told, strict=True)
                both = [at for batch in batches for at in batch]
                n_tokens = sum(lengths[at] for at in both)
                steps[-1].append(_Step(device, user, n_tokens))
                drawn[-1].extend(both)
    distributed.barrier()
    distributed.destroy_process_group()
    if task["rank"] == 0:
        whole = sum(sorted(own) == list(range(len(lengths))) for own in drawn)
        learned = [step for epoch in steps for step in epoch][_UNTIL_LEARNED:]
        told_of = {"second": steps[-1], "": learned}
        found = {
            f"{when}_{name}".lstrip("_"): value
            for when, own_steps in told_of.items()
            for name, value in _summed(own_steps).items()
        }
        yield {"balance": task["balance"], **found, "ooms": sum(ooms), "whole": whole}


_many = _rival = _two
