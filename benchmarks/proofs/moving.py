"""Is a budget that changes kept in every step, and is no plan made twice?

One process measures the longest batch with everything recomputed and with everything
kept. Another trains on batches of mixed lengths within budgets between the two; the
budget changes every fifth step, drawn from six. Each length needs one plan within each
budget. Another one is needed only if the allowance for fragmentation changed by 1%, and
with it what tensors may hold, or after an out-of-memory error, which makes all plans
invalid. All other plans after the first hundred steps count as made twice.

    python -m benchmarks.proofs moving

The simulated device is hollow: bytes are exact, and nothing is computed. Its segments
have a fixed size, and lengths are mixed. If fragmentation exceeds the allowance, a step
runs out of memory, also in its backward, so `Session.step` runs it. The lowest budget
is 1.3 times the least that the longest batch needs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.loop import Loop
from benchmarks.proofs.models import ModelSpec, by_name, names_of
from benchmarks.proofs.numbers import mebibytes, percent, quantile
from mimose.bench.device import SIM, kind_of
from mimose.bench.zoo import Batch
from mimose.session import Session, attach

QUESTION = "Is a budget that moves kept in every step, and is no plan made twice?"
OPTIONS = (common.device(SIM), common.count("--steps", 1000, "a model"))

_SPECS = by_name(
    ModelSpec(
        "bert",
        {"batch": (32, 32), "length": (64, 512)},
        multiple=32,
        changes={
            "hidden_size": 768,
            "num_hidden_layers": 12,
            "intermediate_size": 3072,
        },
    ),
)
_EVERY, _N_BUDGETS, _LOWEST = 5, 6, 1.3
_SETTLED, _MOVED, _SHARE_BAR = 100, 0.01, 0.01


def ask(settings: Settings, options: Options) -> Answer:
    """Train every model while its budget moves."""
    answer = Answer(path=settings.out / "moving.csv")
    for name in names_of(_SPECS, settings.models):
        task: dict[str, Any] = {"model": name, "steps": options.steps}
        (found,) = common.said_by("moving", settings, part="probe", **task)
        rows = common.measured("moving", settings, part="train", **task, **found)
        answer.add(name, rows, *judge(rows, options.steps))
    return answer


def judge(rows: Sequence[Row], steps: int) -> common.Verdict:
    """Judge the steps of a model."""
    budgets = [row["budget_bytes"] for row in rows]
    moves = sum(row["has_moved"] for row in rows)
    planned = [row for row in rows if row["phase"] == "plan"]
    made = [row for row in planned if not row["cache_hit"]]
    known: dict[tuple[int, int], float] = {}
    twice, again = 0, sum(row["retries"] for row in rows)
    for row in rows:
        shape, now = (row["length"], row["budget_bytes"]), row["fragmentation"]
        if row["retries"]:
            known.clear()
        elif row in made:
            is_same = shape in known and abs(known[shape] / now - 1) < _MOVED
            twice += is_same and row["step"] >= _SETTLED
            known[shape] = now
    over = sum(row["peak_bytes"] > row["budget_bytes"] for row in rows)
    used = [r["peak_bytes"] / r["budget_bytes"] for r in planned if "r" in r["plan"]]
    line = {
        "steps": len(rows),
        "budgets, MiB": f"{mebibytes(min(budgets))} to {mebibytes(max(budgets))}",
        "over": over,
        "planned": len(planned),
        "made": len(made),
        "plans": len({(row["length"], row["plan"]) for row in planned}),
        "made twice": twice,
        "run again": again,
        "use p50": percent(quantile(used, 0.5), 1),
    }
    return line, [
        Bar("steps done", len(rows), at_least=steps),
        Bar("moves of the budget", moves, at_least=steps // _EVERY),
        Bar("steps over", over, 0),
        Bar("run again, of steps", again / len(rows), _SHARE_BAR, is_share=True),
        Bar("plans made again, of steps", twice / len(rows), _SHARE_BAR, is_share=True),
    ]


# ------------------------------------------------------------------ in the child


class _Loop(Loop):
    """Has the session run a step, and again if it runs out of memory in backward."""

    session: Session | None = None

    def forward_and_backward(self, batch: Batch) -> None:
        """Run one step."""
        run = partial(super().forward_and_backward, batch)
        run() if self.session is None else self.session.step(run)


def work(task: Task) -> Rows:
    """Do one part: ``"probe"`` or ``"train"``."""
    if kind_of(task["device"]) == SIM:
        device = torch.get_device_module(SIM)
        device.set_hollow(device.CARDS["h100"])
    spec, generator = _SPECS[task["model"]], torch.Generator().manual_seed(task["seed"])
    loop = _Loop(spec.build(task["seed"], task["device"]))
    loop.warm_up(spec.batch(spec.shortest(), generator))
    if task["part"] == "probe":
        peaks = {}
        for planner in ("full", "none"):
            with attach(loop.model, planner=planner, meter=loop.meter):
                for _ in range(2):
                    loop.meter.resting_bytes()
                    step = loop.step(spec.batch(spec.longest(), generator))
            peaks[planner] = step.peak_bytes
        yield {"least_bytes": int(_LOWEST * peaks["full"]), "most_bytes": peaks["none"]}
        return
    least, most, choose = task["least_bytes"], task["most_bytes"], random.Random(1)
    step_bytes = (most - least) // (_N_BUDGETS - 1)
    budgets = [least + i * step_bytes for i in range(_N_BUDGETS)]
    with attach(loop.model, budgets[-1], meter=loop.meter) as session:
        loop.session = session
        for number in range(task["steps"]):
            has_moved = number % _EVERY == 0
            if has_moved:
                others = [each for each in budgets if each != session.budget]
                session.budget = choose.choice(others)
            sizes, before = spec.draw(generator), session.summary()
            took = loop.step(spec.batch(sizes, generator))
            record = session.records[-1]
            yield {
                **{"model": spec.model, "length": sizes["length"]},
                "plan": "".join(action[0] for action in record.actions),
                **common.recorded(record, "step", "phase", "cache_hit", "budget_bytes"),
                **{"retries": record.retries, "peak_bytes": took.peak_bytes},
                **{"has_moved": has_moved, "fragmentation": before.fragmentation},
            }
