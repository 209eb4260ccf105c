"""Rows that follow lengths: who trains the most tokens a second within a memory?

``python -m benchmarks.fill`` trains models of real size on hollow cards of their true
size (see `benchmarks.sim.hollow`), on samples of log-normal lengths, and prints one
table: real tokens a second of

- a: the largest fixed number of rows that never runs out, drawn at random;
- b: the largest budget of tokens that never runs out, batches of like lengths;
- c: `mimose.BatchSampler`, told nothing, in a session told nothing;
- d: the best found by trial over budgets of tokens, each under a session's plans.

What a and b search for by trial, c has to learn. They keep everything; where the
longest sample does not fit so, they checkpoint everything by transformers' own; where
that does not fit either, they compute the loss in chunks besides (a session whose plans
recompute every layer). Of c, all steps are trained from the first on, and an
out-of-memory error anywhere counts. Sessions run forward and backward by
`Session.step`, as trainers do: a step that runs out of memory is run again, and told.
Rates are those of the card's clock, optimizer steps included, after the first steps.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import math
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import mimose
from benchmarks.scale.models import WORKLOADS, Sizes, Workload
from benchmarks.scale.run import Run, build
from mimose.bench.child import run_child
from mimose.bench.rows import Row, RowsFile, RunSettings, read
from mimose.planners import Plan, PlanningProblem, everywhere

_LLAMA = replace(
    WORKLOADS["llama-8b-lora"], spans=((1, 32768),), median=512.0, spread=1.3
)
PLACES: Mapping[str, tuple[Workload, int, int, str, float]] = {
    "bert-large-16": (WORKLOADS["bert-large"], 16, 16000, "whole", 2.2),
    "bert-large-24": (WORKLOADS["bert-large"], 24, 16000, "whole", 2.2),
    "t5-large-24": (WORKLOADS["t5-large"], 24, 8000, "whole", 2.5),
    "llama-8b-lora-40": (_LLAMA, 40, 3000, "selective", 1.5),
    "llama-8b-lora-80": (_LLAMA, 80, 3000, "selective", 1.5),
}
"""Workload, GiB, samples of an epoch, the session's actions, and by how much c is to
pass a."""
_GRID = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96)
"""Rows that are tried, and, times the longest sample, budgets of tokens."""
_WARM = 12
"""Steps that rates of fixed rows and budgets leave out."""
_UNTIL_SETTLED = 40
"""The same of sessions, which learn in them."""
_MOST_STEPS = 150
_LIKE = 1.08
"""Samples go together whose first lengths lie within such a factor."""

Group = Sequence[Sizes]


@dataclass(frozen=True, kw_only=True, slots=True)
class FillRow(Row):
    """One trial."""

    place: str
    part: str
    """``a`` to ``d``."""
    strategy: str
    size: int
    """Rows, or the budget of tokens; 0 where the sampler chooses."""
    tokens_per_second: float | None
    """Real ones, of the card's time; None where it ran out of memory."""
    tokens_per_second_all: float | None
    """The same with the first steps."""
    rows: float | None
    """Of a batch, in the mean."""
    padding: float | None
    """The share of all tokens."""
    first_padding: float | None
    """The share of those of the first size."""
    n_steps: int
    ooms: int
    over: int | None = None
    reruns: int | None = None
    """Steps that ran out of memory and that the session ran again."""
    settled: int | None = None
    """Batches drawn when the sampler's rows did not change any more."""
    why: str = ""
    """What ended it."""


# --------------------------------------------------------------------- the trials


class _Everything:
    """Recomputes every layer, where the budget asks for it with the loss in chunks."""

    name = "everything"

    def plan(self, problem: PlanningProblem) -> Plan:
        """Return the plan."""
        return everywhere("recompute").plan(problem)


class _Trials:
    """Trains epochs of one workload on one card, as often as asked."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self.place: str = task["place"]
        self.workload, self.gib, n, self.actions, _ = PLACES[self.place]
        self.seed: int = task["seed"]
        self.samples = list(self.workload.sizes(n, self.seed))
        self.run: Run = build(self.workload, {**task, "gib": self.gib})
        self.run.train(tuple(low for low, _ in self.workload.spans), 1)
        self.longest = self.workload.longest

    @contextlib.contextmanager
    def strategy(self, name: str) -> Iterator[mimose.Session | None]:
        """Train under a strategy within the block."""
        model: Any = self.run.model
        try:
            if name == "hf":
                model.gradient_checkpointing_enable()
            if name in ("plain", "hf"):
                yield None
                return
            planner: Any = _Everything() if name == "chunks" else "auto"
            actions = "whole" if name == "chunks" else name
            with mimose.attach(
                model, planner=planner, actions=actions, refine=False
            ) as session:
                yield session
        finally:
            if name == "hf":
                model.gradient_checkpointing_disable()
            self.release()

    def release(self) -> None:
        """Let go of what a failed step holds."""
        self.run.optimizer.zero_grad()
        gc.collect()
        torch.accelerator.empty_cache()

    def step(self, group: Group, session: mimose.Session | None = None) -> float:
        """Train a batch; return the card's seconds."""
        before = self.run.card.clock()
        self.run.train(_padded(group), len(group), session)
        return float(self.run.card.clock().since(before).seconds)

    def try_out(
        self,
        strategy: str,
        part: str,
        size: int,
        groups: Iterable[Group] | Callable[[mimose.Session], Iterable[Group]],
        warm: int,
    ) -> dict[str, Any]:
        """Train batches until one runs out of memory; return a row's columns."""
        steps: list[tuple[Group, float]] = []
        why, over, reruns = "", None, None
        with self.strategy(strategy) as session:
            if callable(groups):
                assert session is not None
                groups = groups(session)
            try:
                for group in groups:
                    steps.append((group, self.step(group, session)))
                    if len(steps) >= _MOST_STEPS:
                        break
            except (torch.OutOfMemoryError, mimose.InfeasibleBudgetError) as error:
                why = f"{type(error).__name__} at {len(group)} x {_padded(group)}"
            if session is not None:
                over = session.summary().steps_over
                reruns = session.summary().retries
        told = {"strategy": strategy, "part": part, "size": size, "over": over}
        told["reruns"] = reruns
        return told | numbers(steps, warm, why)

    def heaviest_first(self, groups: list[Group]) -> list[Group]:
        """Put the batches that take the most memory first, then the others."""
        heavy = sorted(groups, key=lambda g: -math.prod((len(g), sum(_padded(g)))))[:2]
        heavy += sorted(groups, key=lambda g: -sum(_padded(g)))[:2]
        return [*heavy, *groups]

    def search(self, part: str) -> Iterator[dict[str, Any]]:
        """Yield the trial of the largest size that never runs out, by strategy."""
        for strategy in ("plain", "hf", "chunks"):
            sizes = [s for s in _GRID if s * sum(self.longest) < 1_000_000]
            while sizes:  # halve the grid by the heaviest batches alone
                low, high = 0, len(sizes)
                while low < high:
                    middle = (low + high) // 2
                    groups = self.heaviest_first(self.groups(part, sizes[middle]))[:4]
                    if self.try_out(strategy, part, 0, groups, 0)["ooms"]:
                        high = middle
                    else:
                        low = middle + 1
                sizes = sizes[:low]
                if not sizes:
                    break
                groups = self.heaviest_first(self.groups(part, sizes[-1]))
                size = sizes[-1] if part == "a" else sizes[-1] * sum(self.longest)
                told = self.try_out(strategy, part, size, groups, _WARM)
                if not told["ooms"]:
                    yield told
                    return
                sizes.pop()

    def groups(self, part: str, size: int) -> list[Group]:
        """Return an epoch of fixed rows (a), or of so many longest samples' tokens."""
        rng = random.Random(self.seed)
        samples = list(self.samples)
        rng.shuffle(samples)
        if part == "a":
            return [samples[i : i + size] for i in range(0, len(samples), size)]
        groups = list(of_tokens(samples, size * sum(self.longest)))
        rng.shuffle(groups)
        return groups

    def oracle(self, first: int) -> Iterator[dict[str, Any]]:
        """Yield trials of larger and larger budgets of tokens under a session.

        Args:
            first: The first of them.
        """
        rates = [0.0]
        for size in _GRID[_GRID.index(round(first / sum(self.longest))) :: 2]:
            groups, most = self.groups("d", size), size * sum(self.longest)
            told = self.try_out(self.actions, "d", most, groups, _UNTIL_SETTLED)
            yield told
            rates.append(told["tokens_per_second"] or 0.0)
            if rates[-1] < 0.99 * max(rates):
                return

    def ours(self) -> dict[str, Any]:
        """Return the row of the sampler's own batches."""
        settled: list[int] = []

        def drawn(session: mimose.Session) -> Iterator[Group]:
            lengths = [list(column) for column in zip(*self.samples, strict=True)]
            names = ("input_ids.1", "labels.1")
            sampler = mimose.BatchSampler(
                dict(zip(names, lengths, strict=True))
                if len(lengths) > 1
                else lengths[0],
                session,
                seed=self.seed,
            )
            for batch in sampler:
                if sampler.is_settled and not settled:
                    settled.append(sampler.n_drawn)
                yield [self.samples[at] for at in batch]

        told = self.try_out(self.actions, "c", 0, drawn, _UNTIL_SETTLED)
        return told | {"settled": settled[0] if settled else None}


def _padded(group: Group) -> Sizes:
    return tuple(map(max, zip(*group, strict=True)))


def of_tokens(samples: Iterable[Sizes], most: int) -> Iterator[Group]:
    """Yield batches of like lengths of at most so many tokens, padding counted."""

    def place(sizes: Sizes) -> tuple[float, ...]:
        band = int(math.log(sizes[0], _LIKE))
        return (band, *(size if band % 2 else -size for size in sizes[1:]), sizes[0])

    by_length = place if len(next(iter(samples))) > 1 else None
    group: list[Sizes] = []
    for sample in sorted(samples, key=by_length):
        if group and (len(group) + 1) * sum(_padded([*group, sample])) > most:
            yield group
            group = []
        group.append(sample)
    yield group


def numbers(
    steps: Sequence[tuple[Group, float]], warm: int, why: str
) -> dict[str, Any]:
    """Return what a row tells of steps.

    Args:
        steps: Batches, and the card's seconds.
        warm: How many of the first the rate leaves out.
        why: What ended them; "" for nothing.
    """

    def rate(of: Sequence[tuple[Group, float]]) -> float | None:
        seconds = sum(seconds for _, seconds in of)
        return sum(sum(map(sum, group)) for group, _ in of) / seconds if of else None

    real = sum(sum(map(sum, group)) for group, _ in steps)
    held = sum(len(group) * sum(_padded(group)) for group, _ in steps)
    first = sum(sum(sizes[0] for sizes in group) for group, _ in steps)
    first_held = sum(len(group) * _padded(group)[0] for group, _ in steps)
    late = steps[warm:]
    return {
        "tokens_per_second": None if why else rate(late),
        "tokens_per_second_all": rate(steps),
        "rows": sum(len(group) for group, _ in late) / len(late) if late else None,
        "padding": 1.0 - real / held if held else None,
        "first_padding": 1.0 - first / first_held if held else None,
        "n_steps": len(steps),
        "ooms": int(bool(why)),
        "why": why,
    }


def work(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the trials of a place; yield a row's columns for each.

    Args:
        task: ``place``, ``part``, ``first`` (the budget of tokens that the oracle
            begins with), ``card``, ``device`` and ``seed``.
    """
    warnings.filterwarnings("ignore")
    trials = _Trials(task)
    if task["part"] == "c":
        yield trials.ours()
    elif task["part"] == "d":
        yield from trials.oracle(task["first"])
    else:
        yield from trials.search(task["part"])


# --------------------------------------------------------------------- the command


def main(arguments: list[str] | None = None) -> int:
    """Run what is asked for, print the table and write the rows down."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fill",
        description="Tokens a second of rows that follow lengths, on a hollow card.",
    )
    add = parser.add_argument
    add("--places", nargs="+", default=list(PLACES), choices=PLACES)
    add("--parts", nargs="+", default=list("abcd"), choices=list("abcd"))
    add("--card", default="h100", help="h200, h100, a100, rtx4090 or a10")
    add("--seed", type=int, default=1)
    add("--out", default="docs/results/fill/fill.csv", help="where rows are kept")
    add("--resume", action="store_true", help="keep the rows that are there")
    options = parser.parse_args(arguments)
    settings = RunSettings(seed=options.seed, threads=1, device="sim")
    path = Path(options.out)
    rows = read(path, FillRow) if options.resume and path.exists() else []
    file = RowsFile(path, FillRow, goes_on=bool(rows))
    for place in options.places:
        for part in options.parts:
            own = {row.part: row for row in rows if row.place == place}
            if part in own:
                continue
            task = {"place": place, "part": part, "device": "sim"}
            task |= {"card": options.card, "seed": options.seed}
            task["first"] = own["b"].size if "b" in own else 0
            for told in run_child("benchmarks.fill", task, settings.threads):
                row = FillRow(place=place, **told, **settings.provenance())
                file.append([row])
                rows.append(row)
                sys.stdout.write(_line(row) + "\n")
                sys.stdout.flush()
    file.close()
    sys.stdout.write(table(rows))
    return 0


def _line(row: FillRow) -> str:
    rate = row.tokens_per_second
    return (
        f"{row.place:18} {row.part} {row.strategy:7} {row.size:7} "
        f"{f'{rate:9.0f}' if rate else '        –'} tokens/s "
        f"({row.tokens_per_second_all or 0:.0f} from the first step on) "
        f"{row.rows or 0:6.1f} rows padding {row.padding or 0:.1%} "
        f"({row.first_padding or 0:.1%}) {row.n_steps} steps over {row.over} "
        f"reruns {row.reruns} {row.why}"
    )


def table(rows: Iterable[FillRow]) -> str:
    """Return what c reaches of a, b and d, a line a place."""
    lines = [
        "| place | a | b | c | d | c/a (bar) | c/b | c/d | ooms | reruns | over |\n"
    ]
    rows = list(rows)
    for place in dict.fromkeys(row.place for row in rows):
        of_place = [row for row in rows if row.place == place]
        best = {
            part: max(
                (row for row in of_place if row.part in parts),
                key=lambda row: row.tokens_per_second or 0.0,
                default=None,
            )
            for part, parts in {"a": "a", "b": "b", "c": "c", "d": "bd"}.items()
        }
        rates = {p: (r.tokens_per_second or 0.0) if r else 0.0 for p, r in best.items()}
        cells = [f"{rates[part]:.0f}" for part in "abcd"]
        for part in ("a", "b", "d"):
            bar = f" ({PLACES[place][-1]})" if part == "a" else ""
            ratio = rates["c"] / rates[part] if rates[part] else math.nan
            cells.append(f"{ratio:.2f}{bar}")
        own = best["c"]
        told = (own.ooms, own.reruns, own.over) if own else ("–",) * 3
        cells += map(str, told)
        lines.append(f"| {place} | {' | '.join(cells)} |\n")
    return "".join(lines)


if __name__ == "__main__":
    sys.exit(main())
