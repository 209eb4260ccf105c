"""What does it cost that ranks agree on each forward, and does each keep its budget?

    python -m benchmarks.proofs ranks
    python -m benchmarks.proofs ranks --steps 200

Two processes train one model, sharded by `fully_shard` with two groups inside each
layer, so that a recomputation gathers weights again. Each batch has a random length,
different on each rank, so ranks have different plans at different times; they agree
before each forward. A process that hangs is ended, and the proof fails.

Peaks are those of the resident memory; readings repeat to about a MiB. The resident
memory also rises in bare training of this model, by a MiB in a hundred steps: oneDNN
caches code for GELU by shape, some 70 KiB for each length (none with
``ONEDNN_PRIMITIVE_CACHE_CAPACITY`` 0). So each length is trained once before the
session begins. What is held between steps is printed every hundred steps, with a bar.

The time of an exchange is printed twice: in training, where the faster rank waits for
the other one (as it would when weights are gathered next), and alone, when both begin
at the same time.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.numbers import MIB, percent
from mimose.bench.child import run_child
from mimose.session import Session, attach

QUESTION = "What does agreement between ranks cost, and does each keep its budget?"
DEFAULTS = {"threads": 1}
OPTIONS = (common.count("--steps", 2000, "on each rank"),)

N_RANKS = 2
_LAYERS = ["0", "1", "2"]
"""Each of two halves, a sharded group each."""
_BATCH, _LENGTHS, _WIDTH = 8, (16, 256), 64
_BUDGET = "+26MiB"
"""With everything recomputed the longest batch grows by 10 MiB, with everything kept by
23, from some 10 MiB more than what is held as the session begins."""
_STEPS_A_ROW = 100
_N_ALONE = 50
"""Exchanges timed by themselves."""
_SECONDS_A_STEP = 2.0
_SECONDS_TO_START = 120.0
_SUMMED = ("partly_recomputed", "changed", "exchanges", "over")
_MOST_SHARE = 0.02
"""The largest share of a step's time for an exchange alone."""
_LEAST_PLANNED = 0.9
_MOST_RISE_MIB = 2
"""The largest rise of what is held between steps, after the first hundred steps."""


def ask(settings: Settings, options: Options) -> Answer:
    """Train on all ranks at once; a rank that hangs is ended, which is an error."""
    limit = _SECONDS_TO_START + _SECONDS_A_STEP * options.steps
    by_rank = launched(__name__, settings, limit, steps=options.steps)
    answer = Answer()
    for rank, rows in enumerate(by_rank):
        answer.add(f"rank {rank}", rows, *judge(rows, options.steps), head="rank")
    return answer


def launched(
    module: str, settings: Settings, limit_seconds: float, /, **task: Any
) -> list[list[Row]]:
    """Return the rows of each rank of a module's ``work``, which begins with `join`.

    A rank that hangs is ended, which is an error.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        store = str(Path(folder) / "store")
        whole = {"seed": settings.seed, "store": store, **task}

        def told(rank: int) -> list[Row]:
            own = {**whole, "rank": rank}
            child = run_child(
                module, own, settings.threads, limit_seconds=limit_seconds
            )
            return [{**said, **settings.provenance()} for said in child]

        with ThreadPoolExecutor(N_RANKS) as pool:
            return list(pool.map(told, range(N_RANKS)))


def join(task: Task) -> None:
    """Be the rank of a process group that a task says."""
    store, rank = f"file://{task['store']}", task["rank"]
    distributed.init_process_group("gloo", store, rank=rank, world_size=N_RANKS)


def judge(rows: Sequence[Row], steps: int) -> common.Verdict:
    """Judge one rank's hundreds of steps; shares of a step are medians of the rows."""
    n_steps = sum(row["steps"] for row in rows)
    planned = sum(row["planned"] for row in rows) / max(1, n_steps)
    rise = (rows[-1]["resting_bytes"] - rows[0]["resting_bytes"]) / MIB
    alone, agreeing = (
        statistics.median(
            row[f"{what}_seconds"] / row["median_seconds"] for row in rows
        )
        for what in ("alone", "agreement")
    )
    line = {
        "steps": n_steps,
        "planned": percent(planned, 1),
        **{name: sum(row[name] for row in rows) for name in _SUMMED},
        "over MiB": max(r["highest_bytes"] - r["budget_bytes"] for r in rows) / MIB,
        "rise MiB": rise,
        "agreeing, of a step": percent(agreeing, 1),
        "by itself": percent(alone, 2),
    }
    return line, [
        Bar("steps that ended", n_steps, at_least=steps),
        Bar("steps over the budget", line["over"], at_most=0),
        Bar("steps under a plan", planned, at_least=_LEAST_PLANNED, is_share=True),
        Bar("MiB more held between steps", rise, at_most=_MOST_RISE_MIB),
        Bar("an exchange, of a step", alone, _MOST_SHARE, is_share=True),
    ]


# ------------------------------------------------------------------ in the child


class Half(nn.Module):
    """Half a layer: two products with what is pointwise around them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same."""
        inner = torch.tanh(nn.functional.gelu(self.up(self.norm(states))))
        output: torch.Tensor = states + self.drop(self.down(inner))
        return output


def work(task: Task) -> Rows:
    """Train as one of the ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    join(task)
    rank = task["rank"]
    torch.manual_seed(task["seed"])
    mesh = init_device_mesh("cpu", (N_RANKS,))
    model = nn.Sequential(*(nn.Sequential(Half(), Half()) for _ in _LAYERS))
    for layer in model.children():
        for half in layer.children():
            fully_shard(half, mesh=mesh)
    fully_shard(model, mesh=mesh)
    generator = torch.Generator().manual_seed(1 + 1000 * task["seed"] + rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    low, high = _LENGTHS
    for length in range(high, low - 1, -1):
        _train(model, optimizer, length)
    with attach(model, _BUDGET, layers=_LAYERS) as session:
        ranks: Any = session._engine.ranks
        for first in range(0, task["steps"], _STEPS_A_ROW):
            steps = min(_STEPS_A_ROW, task["steps"] - first)
            before = ranks.use()
            times = []
            for _ in range(steps):
                waited = ranks.use().seconds
                length = int(torch.randint(low, high + 1, (), generator=generator))
                step = _train(model, optimizer, length)
                times.append((step, ranks.use().seconds - waited))
            yield {
                "rank": rank,
                "first_step": first,
                "steps": steps,
                **_read(session, steps),
                "changed": ranks.use().n_changed - before.n_changed,
                "exchanges": ranks.use().n_exchanges - before.n_exchanges,
                "median_seconds": statistics.median(step for step, _ in times),
                "agreement_seconds": statistics.median(waited for _, waited in times),
                "alone_seconds": _alone(ranks),
            }
    distributed.barrier()
    distributed.destroy_process_group()


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, length: int) -> float:
    """Train one step; return its seconds."""
    states = torch.randn(_BATCH, length, _WIDTH)
    began = time.perf_counter()
    model(states).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - began


def _read(session: Session, steps: int) -> dict[str, int]:
    records = list(session.records)[-steps:]
    return {
        "planned": sum(record.predicted_peak_bytes is not None for record in records),
        "over": sum(record.is_over for record in records),
        "budget_bytes": session.budget,
        "highest_bytes": max(record.highest_bytes or 0 for record in records),
        "partly_recomputed": sum(
            0 < record.n_recomputed < len(record.actions) for record in records
        ),
        "resting_bytes": session._engine.meter.settled_bytes(0.0),
    }


def _alone(ranks: Any) -> float:
    """Return the median of exchanges with nothing in between."""
    seconds: list[float] = []
    for _ in range(_N_ALONE):
        before = ranks.use().seconds
        ranks.check_same_setup(("an exchange by itself",))
        seconds.append(ranks.use().seconds - before)
    return statistics.median(seconds)
