"""What planning costs where many ranks train, and what waiting for the slowest costs.

On paper: what it takes 8, 64 and 1,024 ranks to agree on a plan, by formulas of
networks (`scale_network`), beside exchanges of 2 and 4 gloo processes on this machine.
And steps of so many ranks (`scale_balance`), each with a batch of its own length:
planned alone, by the safest of all ranks' plans, by one static plan; with batches as
they come, or dealt out so that those of a step are alike. Nothing is trained.

    python -m benchmarks.proofs scale
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.problems import draw_problem
from benchmarks.proofs.common import Answer, Bar, Settings, count, progress
from benchmarks.proofs.numbers import percent, quantile
from benchmarks.proofs.scale_balance import (
    accumulated,
    make_costs,
    policies,
    problem_length,
    rounded,
)
from benchmarks.proofs.scale_network import (
    NETWORKS,
    all_reduce_seconds,
    measured_seconds,
)
from mimose.bench.grid.traces import SizeTrace, bell_with_spike, long_tail
from mimose.bench.rows import Row
from mimose.run.agreement import vector_bytes

QUESTION = "What do agreeing on plans and waiting for the slowest cost many ranks?"
OPTIONS = (
    count("--steps", 64, "that are simulated"),
    count("--rounds", 400, "of exchanges that are measured"),
)

RANKS = (8, 64, 1024)
_MEASURED_RANKS = (2, 4)
_LAYERS = 24
_STEP_SECONDS = 0.5
"""For shares of a step: a billion parameters on an accelerator take about so long."""
_STATE_BYTES = 80 * 1024
"""Of what a session has learned of so many layers, as JSON: 16.8 kB were written of
five layers after ten steps."""
_LENGTHS: Mapping[str, SizeTrace] = {
    "long tail": long_tail(16, problem_length()),
    "bell, spike": bell_with_spike(64, problem_length(), 200),
}
_SHARES = (0.1, 0.3, 0.5)
_WINDOWS = (4, 16, 64)
_EACH = 4
"""Batches a rank accumulates."""
_AGREEMENT_BAR = 0.01


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaleRow(Row):
    """An exchange, or a way to plan and deal."""

    part: str
    """``"agreement"``, ``"learning"``, ``"measured"``, ``"one batch"`` or
    ``"accumulated"``."""
    ranks: int
    network: str = ""
    algorithm: str = ""
    n_bytes: int | None = None
    lengths: str = ""
    share: float | None = None
    """Of the way from the longest batch's least peak to keeping it all."""
    policy: str = ""
    seconds: float
    """Of an exchange, or a step; measured ones: the median."""
    p99_seconds: float | None = None
    over_ideal: float | None = None
    """By what share a step takes longer than if all ranks had the same to do."""
    over_ample: float | None = None
    """The same, against steps of ample memory with batches as they come."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Work out exchanges, measure some, and simulate steps."""
    told = settings.provenance()
    exchanges = [ScaleRow(**row, **told) for row in _exchanges()]
    measured = [
        ScaleRow(**_measured(n, options.rounds), **settings.provenance())
        for n in _MEASURED_RANKS
    ]
    progress("scale: exchanges measured")
    steps = [
        ScaleRow(**row, **told) for row in _simulated(settings.seed, options.steps)
    ]
    return Answer(
        rows=[*exchanges, *measured, *steps],
        table=[*map(_line, steps)],
        notes=[*map(_note, exchanges), *map(_note, measured)],
        bars=list(_judge(exchanges, steps)),
    )


def _exchanges() -> Iterator[dict[str, Any]]:
    for part, n_bytes in (
        ("agreement", vector_bytes(_LAYERS)),
        ("learning", _STATE_BYTES),
    ):
        for network in NETWORKS:
            for n_ranks in RANKS:
                yield {
                    "part": part,
                    "ranks": n_ranks,
                    "network": network.name,
                    "algorithm": network.algorithm,
                    "n_bytes": n_bytes,
                    "seconds": all_reduce_seconds(network, n_ranks, n_bytes),
                }


def _measured(n_ranks: int, rounds: int) -> dict[str, Any]:
    n_bytes = vector_bytes(_LAYERS)
    seconds = measured_seconds(n_ranks, n_bytes, rounds)
    return {
        "part": "measured",
        "ranks": n_ranks,
        "network": "gloo on one machine",
        "algorithm": "ring",
        "n_bytes": n_bytes,
        "seconds": quantile(seconds, 0.5),
        "p99_seconds": quantile(seconds, 0.99),
    }


def _simulated(seed: int, n_steps: int) -> Iterator[dict[str, Any]]:
    problem = draw_problem(np.random.default_rng(seed), "layers", _LAYERS)
    for share in _SHARES:
        costs = make_costs(problem, share)
        for lengths, trace in _LENGTHS.items():
            for n_ranks in RANKS:
                drawn = _draw(trace, seed, n_steps * n_ranks * _EACH)
                places = drawn.reshape(n_steps, n_ranks, _EACH)
                ideal = float(costs.planned[places].mean())
                single = policies(costs, places[:, :, 0], _WINDOWS)
                ample = single["ample memory"]
                told = {"ranks": n_ranks, "lengths": lengths, "share": share}
                for policy, seconds in single.items():
                    yield {
                        **told,
                        "part": "one batch",
                        "policy": policy,
                        "seconds": seconds,
                        "over_ideal": seconds / ideal - 1.0,
                        "over_ample": seconds / ample - 1.0,
                    }
                for policy, seconds in accumulated(costs, places).items():
                    yield {
                        **told,
                        "part": "accumulated",
                        "policy": policy,
                        "seconds": seconds,
                        "over_ideal": seconds / (_EACH * ideal) - 1.0,
                    }
                progress(f"scale: {lengths}, {n_ranks} ranks, budget {share} done")


def _draw(trace: SizeTrace, seed: int, n_batches: int) -> Any:
    sizes = trace(np.random.default_rng(seed), n_batches)
    return rounded(np.array([batch["length"] for batch in sizes]))


# ------------------------------------------------------------------ telling


def _line(row: ScaleRow) -> dict[str, object]:
    return {
        "lengths": row.lengths,
        "budget": row.share,
        "ranks": row.ranks,
        "batches": row.part,
        "policy": row.policy,
        "over ideal": percent(row.over_ideal, 1),
        "over ample": percent(row.over_ample, 1),
    }


def _note(row: ScaleRow) -> str:
    micro = 1e6 * row.seconds
    said = f"{row.part}, {row.n_bytes} bytes, {row.ranks} ranks, {row.network} "
    said += f"({row.algorithm}): {micro:,.0f} µs"
    if row.p99_seconds is not None:
        said += f", p99 {1e6 * row.p99_seconds:,.0f} µs at load {row.load_average:.1f}"
    return f"{said}, {row.seconds / _STEP_SECONDS:.3%} of a step of {_STEP_SECONDS} s"


def _judge(exchanges: list[ScaleRow], steps: list[ScaleRow]) -> Iterator[Bar]:
    for row in exchanges:
        if row.part == "agreement" and row.ranks == max(RANKS):
            what = f"agreement of {row.ranks:,} ranks, {row.network} ({row.algorithm})"
            share = row.seconds / _STEP_SECONDS
            yield Bar(f"{what}: part of a step", share, _AGREEMENT_BAR, is_share=True)
    yield Bar(
        "a step of ranks that plan alone against one that agree, at the most",
        max(_ratio(steps, row, "agreed") for row in steps if row.policy == "by rank"),
        1.0 + 1e-9,
    )


def _ratio(steps: list[ScaleRow], row: ScaleRow, policy: str) -> float:
    """Return a step's seconds over another policy's, all else equal."""
    other = next(
        each
        for each in steps
        if each.policy == policy
        and (each.ranks, each.lengths, each.share)
        == (row.ranks, row.lengths, row.share)
    )
    return row.seconds / other.seconds
