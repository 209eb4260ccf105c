"""Does anything grow in a long run: memory, step time, threads, files, objects, margin?

It has two parts, both on the hollow card, where steps take only the host's time:

- tiny: a small model; rows drift up and down by a factor of ten, the budget changes
  every 25 steps, the loop aborts a step between forward and backward every 50, an
  evaluation runs every 100, and an allocation fails every 1,000.
- hollow: BERT-large on 24 GiB, batches drawn by `mimose.BatchSampler`, epoch by epoch.

    python -m benchmarks.proofs longrun --part tiny --steps 100000

A row is a hundredth of the run. The first half may learn; growth in the second half is
judged. Seconds are CPU time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import math
import os
import random
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import mimose
from benchmarks.proofs import common, faults
from benchmarks.proofs.common import Answer, Bar, Settings
from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.run import build
from mimose.bench.device import SIM

QUESTION = "Does anything grow in a long run?"
OPTIONS = (
    ("--part", {"choices": ("tiny", "hollow"), "default": "tiny"}),
    common.count("--steps", 100_000, "of the run"),
)

_LOOKS = 100
_ROWS, _BLOCKS = (20_000, 200_000), 4
_LIKE = 2_000
"""Rows are its multiples: hollow kernels remember what they did for each shape."""
_MOVES, _BREAKS, _EVALUATES, _FAULTS = 25, 50, 100, 1000
_LOWEST, _N_BUDGETS = 1.4, 6
_GIB, _SAMPLES, _PADDED = 24, 16_000, 32
_RSS_BAR, _OBJECTS_BAR, _SECONDS_BAR, _MARGIN_BAR = 2**20, 0.01, 1.1, 0.01


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Run it, and compare the halves."""
    settings, rows = replace(settings, device=SIM), []
    part, steps = options.part, options.steps
    for row in common.said_by("longrun", settings, part=part, steps=steps):
        rows.append({"part": part, **row, **settings.provenance()})
        common.progress(", ".join(f"{name} {value}" for name, value in row.items()))
    answer = Answer(rows=list(rows), path=settings.out / f"longrun_{part}.csv")
    answer.table = [*map(common.short, rows[:: max(1, _LOOKS // 10)])]
    answer.bars = judge(rows, steps)
    return answer


def judge(rows: list[dict[str, Any]], steps: int) -> list[Bar]:
    """Judge what the second half added to the first."""
    half, last = rows[len(rows) // 2], rows[-1]
    quarter = len(rows) // 4
    early, late = (
        median(row["seconds"] for row in part)
        for part in (rows[quarter : 2 * quarter], rows[-quarter:])
    )
    names = "rss", "objects", "threads", "files", "margin"
    more = {name: last[name] - half[name] for name in names}
    objects = more["objects"] / half["objects"]
    return [
        Bar("steps done", last["step"], at_least=steps),
        Bar("resident bytes, second half", more["rss"], _RSS_BAR),
        Bar("objects, second half", objects, _OBJECTS_BAR, is_share=True),
        *(Bar(f"{name} more", more[name], 0) for name in ("threads", "files")),
        Bar("step time, last ÷ second quarter", late / early, _SECONDS_BAR),
        Bar("margin more", more["margin"], _MARGIN_BAR, is_share=True),
        Bar("steps over", last["over"], 0),
    ]


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Train, and look at the process a hundred times."""
    steps, begin = task["steps"], time.process_time()
    run: Iterator[mimose.Session] = {"tiny": _tiny, "hollow": _hollow}[task["part"]](
        task
    )
    every, previous = max(1, steps // _LOOKS), 0
    for step, session in enumerate(run, start=1):
        if step % every and step != steps:
            continue
        seconds = (time.process_time() - begin) / (step - previous)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        summary = session.summary()
        with open("/proc/self/statm", encoding="ascii") as file:  # noqa: PTH123
            rss = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        yield {
            "step": step,
            "rss": rss,
            "seconds": round(seconds, 6),
            "threads": threading.active_count(),
            "files": len(list(Path("/proc/self/fd").iterdir())),
            "objects": len(gc.get_objects()),
            "state": len(json.dumps(session.state_dict())),
            "margin": round(summary.margin, 4),
            "phases": dict(summary.phases),
            "over": summary.steps_over,
        }
        previous, begin = step, time.process_time()
        if step == steps:
            return


class _Broken(RuntimeError):
    """The loop breaks a step off."""


def _tiny(task: Mapping[str, Any]) -> Iterator[mimose.Session]:
    """Yield behind each step of the small model."""
    device: Any = torch.get_device_module(SIM)
    device.set_hollow(device.CARDS["h100"])
    draw = random.Random(task["seed"])
    model = faults.model(_BLOCKS).to(SIM)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(rows: int, *, broken: bool = False) -> None:
        loss = model(torch.empty(rows, faults.WIDTH, device=SIM)).square().mean()
        if broken:
            raise _Broken
        loss.backward()

    peaks = []
    for planner in ("full", "none"):
        with mimose.attach(model, planner=planner) as session:
            for _ in range(3):
                step(_ROWS[1])
                optimizer.step()
                optimizer.zero_grad()
            peaks.append(session.peak_bytes)
        device.empty_cache()
    least, most = int(_LOWEST * peaks[0]), peaks[1]
    budgets = [least + i * (most - least) // _N_BUDGETS for i in range(_N_BUDGETS)]
    low, high = map(math.log, _ROWS)
    with mimose.attach(model, most) as session:
        for number in range(task["steps"]):
            drift = 0.5 + 0.4 * math.sin(number / 3000) + draw.gauss(0, 0.08)
            rows = int(math.exp(low + (high - low) * min(1.0, max(0.0, drift))))
            rows = -(-rows // _LIKE) * _LIKE
            if number % _MOVES == 0:
                session.budget = draw.choice(budgets)
            is_broken = number % _BREAKS == 0
            if number % _FAULTS == 1:
                device.fail_allocation(draw.randrange(1, 80))
            try:
                session.step(partial(step, rows, broken=is_broken))
                device.fail_allocation(0)
                optimizer.step()
            except _Broken:
                pass
            optimizer.zero_grad()
            if number % _EVALUATES == 0:
                model.eval()
                with torch.no_grad():
                    model(torch.empty(rows, faults.WIDTH, device=SIM))
                model.train()
            yield session


def _hollow(task: Mapping[str, Any]) -> Iterator[mimose.Session]:
    """Yield behind each step of BERT-large, whose batches are drawn by the session."""
    workload, seed = WORKLOADS["bert-large"], task["seed"]
    run = build(workload, {**task, "gib": _GIB, "card": "h100"})
    lengths = [sizes[0] for sizes in workload.sizes(_SAMPLES, seed)]
    run.train((min(lengths),), 1)
    with mimose.attach(run.model, actions="whole") as session:
        sampler = mimose.BatchSampler(lengths, session, seed=seed)
        for epoch in range(task["steps"]):
            sampler.set_epoch(epoch)
            for batch in sampler:
                longest = max(lengths[at] for at in batch)
                run.train((-(-longest // _PADDED) * _PADDED,), len(batch), session)
                yield session
