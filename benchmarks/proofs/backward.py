"""Does a plain loop end where checkpointing everything would not?

A backward of a plain loop cannot run again. Each run trains 16 layers with few large
blocks of memory on batches of random lengths, with a budget that binds. A run ends if a
step runs out of memory and the same length fits with every layer checkpointed, in the
same bytes.

    python -m benchmarks.proofs backward
    PYTORCH_ALLOC_CONF=expandable_segments:True python -m benchmarks.proofs backward

The card is a hollow H100 that has 5% more memory than the budget. True-size models run
in the same loop under ``python -m benchmarks.scale --strategies whole --steps 20000``.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import mimose
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.numbers import mean
from mimose.bench.device import SIM
from mimose.memory.wall import has_expandable_segments
from mimose.sim import use

QUESTION = "Does a plain loop end where checkpointing everything would not?"

_GIB, _WIDTH, _ROWS, _N_LAYERS = 2**30, 1024, 8, 16
_SHORTEST, _LONGEST = 200, 3000
_SHARES = (0.4, 0.5, 0.7)
"""Budgets, as shares of what the longest batch grows by with everything kept."""
_LARGER = 1.05
"""The card's memory, as a multiple of the budget."""


class _Mlp(nn.Module):
    """Widens, an activation, narrows."""

    def __init__(self, times: int = 4) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(_WIDTH)
        self.up = nn.Linear(_WIDTH, times * _WIDTH)
        self.down = nn.Linear(times * _WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, length, width) to the same."""
        wide = functional.relu(self.up(self.norm(x)))
        return torch.add(x, self.down(wide))


class _Gated(_Mlp):
    """Multiplies with a gate, as a Llama's."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(_WIDTH, 4 * _WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, length, width) to the same."""
        inner = self.norm(x)
        wide = functional.silu(self.gate(inner)) * self.up(inner)
        return torch.add(x, self.down(wide))


class _Convolution(_Mlp):
    """Convolves along the length, between two transposes."""

    def __init__(self) -> None:
        super().__init__(times=2)
        wide = 2 * _WIDTH
        self.depth = nn.Conv1d(wide, wide, 5, padding=2, groups=wide)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, length, width) to the same."""
        inner = self.depth(self.up(self.norm(x)).transpose(1, 2)).transpose(1, 2)
        return torch.add(x, self.down(functional.gelu(inner)))


def _encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(_WIDTH, 16, 4 * _WIDTH, batch_first=True)


_LAYERS: dict[str, Callable[[], nn.Module]] = {
    "mlp": _Mlp,
    "encoder": _encoder,
    "gated": _Gated,
    "convolution": _Convolution,
    "one huge block": partial(_Mlp, times=16),
}
OPTIONS = (
    common.count("--steps", 500, "a run"),
    common.count("--seeds", 7, "for each layer and budget"),
    common.some("--layers", _LAYERS),
)
DEFAULTS = {"device": SIM}


class _Net(nn.Module):
    """Layers in a row, checkpointed if asked for."""

    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(_N_LAYERS))
        self.is_checkpointed = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (rows, length, width) to the same."""
        for layer in self.layers:
            is_again = self.is_checkpointed
            x = checkpoint(layer, x, use_reentrant=False) if is_again else layer(x)
        return x


def ask(settings: Settings, options: Options) -> Answer:
    """Train each kind of layer within each budget, with each seed."""
    kind = "expandable" if has_expandable_segments() else "fixed"
    answer = Answer(path=settings.out / f"backward_{kind}.csv")
    for layer in options.layers:
        rows: list[Row] = []
        for seed in range(options.seeds):
            task = {"layer": layer, "steps": options.steps, "draw": seed}
            rows += common.measured("backward", settings, **task)
        answer.add(layer, rows, *_judged(rows), head="layer")
    return answer


def _judged(rows: Sequence[Row]) -> common.Verdict:
    n_steps = sum(row["steps"] for row in rows)
    ends, over = (sum(row[name] for row in rows) for name in ("ends", "over"))
    line = {
        "runs": len(rows),
        "steps": n_steps,
        "ends": ends,
        "over": over,
        "run again": sum(row["reruns"] for row in rows),
        "headroom used": mean(row["used"] for row in rows if row["used"]),
        "allowance": mean(row["fragmentation"] for row in rows),
        "seconds": sum(row["seconds"] for row in rows),
    }
    return line, [Bar("runs that end", ends, 0), Bar("steps over", over, 0)]


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Train a kind of layer within each budget."""
    device: Any = use()
    device.set_total_memory(400 * _GIB)
    device.set_hollow(device.CARDS["h100"])
    drawn = random.Random(task["draw"])
    with torch.device(SIM):
        model = _Net(_LAYERS[task["layer"]]).train()
    optimizer = torch.optim.AdamW(model.parameters())

    def step(length: int) -> None:
        batch = torch.zeros(_ROWS, length, _WIDTH, device=SIM)
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def limit(n_bytes: float) -> None:
        gc.collect()
        torch.accelerator.empty_cache()
        device.set_total_memory(int(n_bytes))
        device.set_limit(None)

    for _ in range(2):  # the first one makes the optimizer's state
        step(_LONGEST)
    torch.accelerator.reset_peak_memory_stats()
    start = torch.accelerator.memory_allocated()
    step(_LONGEST)
    growth = torch.accelerator.max_memory_allocated() - start
    for share in _SHARES:
        lengths = [drawn.randint(_SHORTEST, _LONGEST) for _ in range(task["steps"])]
        budget = int(start + share * growth)
        limit(_LARGER * budget)
        began, failed = device.clock(), []
        with mimose.attach(model, budget, refine=False) as session:
            for length in lengths:
                try:
                    step(length)
                except (torch.OutOfMemoryError, mimose.MimoseError):
                    failed.append(length)
                    optimizer.zero_grad()
            summary = session.summary()
            used = [
                record.observed_growth_bytes / (budget - record.start_bytes)
                for record in session.records
                if record.phase == "plan"
                and record.n_recomputed
                and record.observed_growth_bytes
            ]
        seconds = device.clock().since(began).seconds
        limit(budget)
        model.is_checkpointed, n_fitting = True, 0
        for length in failed:
            try:
                step(length)
                n_fitting += 1
            except torch.OutOfMemoryError:
                optimizer.zero_grad()
        model.is_checkpointed = False
        limit(400 * _GIB)
        yield {
            **{"layer": task["layer"], "draw": task["draw"], "share": share},
            **{"steps": len(lengths), "ends": n_fitting, "ooms": len(failed)},
            **{"over": summary.steps_over, "reruns": summary.retries},
            **{"flushes": summary.flushes, "fragmentation": summary.fragmentation},
            **{"used": mean(used), "seconds": seconds},
        }
