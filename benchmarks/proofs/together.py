"""Do ranks that draw their own batches end their steps together?

    python -m benchmarks.proofs together

Models train on hollow cards. All ranks wait for the slowest of a step: `slowest` is the
sum over steps of its seconds, over that of the ranks' mean.

- two: two processes, each with a card, a session and a `mimose.BatchSampler`, balanced
  and not. They exchange what their clocks say of a step. No gradients cross.
- streams: as two, of a `mimose.BatchStream` on each, whose streams have other samples,
  the second one a fifth fewer. Steps where a rank repeats one do not count.
- many: a session learns alone. Then samplers of more ranks draw an epoch, as if all
  ranks had that session's numbers. Seconds are forecasts of each batch's exact shape.
  `best` has the same batches sorted by these.
- rival: transformers' ``batch_rebalance`` for two ranks, whose batches run by turns on
  one card, with the most rows that never run out of memory, found by trial.

Rates are tokens a second of both ranks on the user's clock, `slowest` of two is on the
device's. Our second epoch compares with the rival's first: it has nothing to learn.
"""

from __future__ import annotations

import functools
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import distributed

import mimose
from benchmarks.proofs import balance, common, ranks
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.ranks import Rebalanced, Step, drawn_by, slowest, told
from benchmarks.scale.run import BUDGET, GIB, Run, build
from mimose.bench.device import SIM
from mimose.bench.rehearse.host import of_session

QUESTION = "Do ranks that draw their own batches end their steps together?"
DEFAULTS = {"seed": 3, "threads": 1, "device": SIM}
OPTIONS = (
    common.some("--parts", ("two", "streams", "many", "rival")),
    common.count("--samples", 1500, "that two ranks train"),
    common.count("--accumulated", 1, "micro-batches of the rival in a step"),
    common.RESUME,
)
_LLAMA, _BERT = balance.WORKLOAD, "bert-large"
_CARDS = {_LLAMA: balance.CARD_GIB, _BERT: 16}
_EPOCHS, _UNTIL_LEARNED, _MOST_SECONDS, _BUFFER = 2, 40, 3000.0, 256
"""Of two ranks: epochs, steps that are left out, the longest time, and the samples that
streams hold."""
_LEARNED = 120
"""Steps of one rank before more are simulated."""
_LONG, _MOST, _BARS = 52_000, 1024, {8: 1.05, 32: 1.10, 128: 1.40}
"""Samples of a long epoch, the most ranks, and bars of long epochs by ranks."""
_MANY = (
    *((_LLAMA, "log-normal", n, _LONG) for n in (2, 8, 32, 128)),
    *((_LLAMA, "log-normal", n, 165 * n) for n in (8, 32, 128, _MOST)),
    *((_LLAMA, kind, n, 165 * n) for kind in ("uniform", "equal") for n in (8, 128)),
    *((_BERT, "64 to 512", n, 7_500 * n) for n in (8, 128)),
)
"""Workloads, lengths, ranks and samples: 165 of log-normal ones are some 30 steps."""
_KINDS: Mapping[str, Callable[[random.Random, int], Sequence[int]]] = {
    "log-normal": balance.lengths_of,
    "uniform": lambda draw, n: [draw.randint(16, 4096) for _ in range(n)],
    "equal": lambda draw, n: [512] * n,
    "64 to 512": lambda draw, n: [own for (own,) in WORKLOADS[_BERT].sizes(n, 1)],
}


def ask(settings: Settings, options: Options) -> Answer:
    """Train on two ranks, simulate more, and search the rival's rows."""
    answer = Answer.begun(settings.out / "together.csv", resume=options.resume)
    for part in options.parts:
        if all(row["part"] != part for row in answer.rows):
            for row in _measured(part, settings, options):
                answer.add(part, [row], {}, (), head="part")
    answer.table, rows = [*map(_line, answer.rows)], answer.rows
    for row in rows:
        answer.bars += _bars(row) if row["part"] != "rival" else []
        if row.get("ranks") == _MOST:
            n, steps, all_bytes = row["rounds"], row["steps"], _MOST * row["sent_bytes"]
            answer.notes.append(
                f"a rank of {_MOST} sends {row['sent_bytes']} bytes in a round, gets "
                f"{all_bytes}; {n} rounds in {steps} steps, later one in 64"
            )
    ours = {row["balance"]: row for row in rows if row["part"] == "two"}
    theirs = [row["rate"] for row in rows if row["part"] == "rival"]
    if ours:
        gain = ours[True]["rate"] / ours[False]["rate"]
        answer.bars.append(Bar("tokens a second, over random", gain, at_least=1.25))
    if ours and theirs:
        gain, what = ours[True]["second_rate"] / max(theirs), "batch_rebalance"
        answer.bars.append(Bar(f"tokens a second, over {what}", gain, at_least=1.1))
    return answer


def _measured(part: str, settings: Settings, options: Options) -> Iterator[Row]:
    task = {"device": settings.device, "samples": options.samples, "part": part}
    task["accumulated"] = options.accumulated
    kinds: Mapping[str, Any] = {"two": (True, False), "streams": (None,)}
    for is_balanced in kinds.get(part, ()):
        own = {**task, "balance": is_balanced}
        yield from ranks.launched(__name__, settings, _MOST_SECONDS, **own)[0]
    for workload in {"many": (_LLAMA, _BERT), "rival": (_LLAMA,)}.get(part, ()):
        for said in common.said_by("together", settings, **task, workload=workload):
            yield {**said, **settings.provenance()}


def _line(row: Row) -> dict[str, object]:
    first = "part", "balance", "ranks", "lengths", "samples", "strategy", "accumulated"
    then = "rows", "steps", "slowest", "best", "random", "rate", "second_rate"
    return {name: row[name] for name in (*first, *then) if row.get(name) is not None}


def _bars(row: Row) -> list[Bar]:
    if row["part"] in ("two", "streams"):
        name = "two, balanced" if row["balance"] else "two, random"
        name = "streams" if row["part"] == "streams" else name
        bars = [Bar(f"{name}: out of memory", row["ooms"], at_most=0)]
        bars.append(Bar(f"{name}: whole epochs", row["whole"], at_least=_EPOCHS))
        most = 1.04 if row["balance"] else None
        most = 1.10 if row["part"] == "streams" else most
    else:
        name = f"{row['ranks']} ranks, {row['samples']} samples, {row['lengths']}"
        bars = [Bar(f"{name}: random / balanced", row["random_times"], at_least=1.0)]
        most = _BARS.get(row["ranks"]) if row["samples"] == _LONG else None
    if most is not None:
        bars.append(Bar(f"{name}: slowest / mean", row["slowest"], at_most=most))
    return bars


def work(task: Task) -> Rows:
    """Do a ``part``; yield its rows."""
    warnings.filterwarnings("ignore")
    of = {"two": _two, "streams": _two, "many": _many, "rival": _rival}
    own = of[task["part"]]
    for row in own(task):
        yield {"part": task["part"], **row}


def _two(task: Task) -> Rows:
    """Train as one of two ranks; the first one tells."""
    ranks.join(task)
    run, budget = _built(task, _LLAMA)
    n, rank, is_stream = task["samples"], task["rank"], task["part"] == "streams"
    lengths = balance.lengths_of(random.Random(task["seed"]), (1 + is_stream) * n)
    n_ooms, steps, drawn = 0, list[list[Step]](), list[list[int]]()
    with mimose.attach(run.model, budget, refine=False) as session:
        seed = task["seed"]
        sampler: Any
        if is_stream:
            whose = range(rank * n, rank * n + (n if rank == 0 else n * 4 // 5))
            how = {"length": lengths.__getitem__, "collate_fn": list, "seed": seed}
            sampler = mimose.BatchStream(whose, session, buffer=_BUFFER, **how)
        else:
            how = {"seed": seed, "balance": task["balance"]}
            sampler = mimose.BatchSampler(lengths, session, **how)
        run.charge = of_session(session)
        for _ in range(_EPOCHS):
            steps, drawn = [*steps, []], [*drawn, []]
            for batch in sampler:
                before = run.card.clock()
                try:
                    run.train((max(lengths[at] for at in batch),), len(batch))
                except torch.OutOfMemoryError:
                    n_ooms += 1
                    run.optimizer.zero_grad()
                clock = run.card.clock().since(before)
                found: list[Any] = [None] * ranks.N_RANKS
                is_again = is_stream and sampler.is_repeated
                own = clock.seconds, clock.user, batch, n_ooms, is_again
                distributed.all_gather_object(found, own)
                device, user, batches, ooms, again = zip(*found, strict=True)
                new = [
                    b for b, is_old in zip(batches, again, strict=True) if not is_old
                ]
                both = [*itertools.chain(*new)]
                drawn[-1] += both
                if not any(again):
                    n_tokens = sum(lengths[at] for at in both)
                    steps[-1].append(Step(device, user, n_tokens))
    distributed.barrier()
    distributed.destroy_process_group()
    if rank == 0:
        n_all = n + n * 4 // 5 if is_stream else n
        whole = sum(sorted(own) == list(range(n_all)) for own in drawn)
        learned = [*itertools.chain(*steps)][_UNTIL_LEARNED:]
        both_told = {**told(learned), **told(steps[-1], "second_")}
        own_told = {"balance": task["balance"], "ooms": sum(ooms), "whole": whole}
        yield {**own_told, **both_told}


def _built(task: Task, name: str) -> tuple[Run, int]:
    """Return a workload on its card, and a session's budget."""
    run = build(WORKLOADS[name], {**task, "gib": _CARDS[name], "card": "h100"})
    return run, int(BUDGET * _CARDS[name] * GIB)


def _many(task: Task) -> Rows:
    """Learn as one rank; then draw as many."""
    run, budget = _built(task, task["workload"])
    draw = random.Random(task["seed"])
    cases = [case[1:] for case in _MANY if case[0] == task["workload"]]
    with mimose.attach(run.model, budget, refine=False) as session:
        run.charge = of_session(session)
        lengths = _KINDS[cases[0][0]](draw, 300 * _LEARNED)
        for batch in itertools.islice(mimose.BatchSampler(lengths, session), _LEARNED):
            run.train((max(lengths[at] for at in batch),), len(batch))
        seconds = functools.cache(balance.Forecasts(session).seconds)
        for kind, n, n_samples in cases:
            lengths, found = _KINDS[kind](draw, n_samples), []
            for is_balanced in (True, False):
                steps, sent = drawn_by(lengths, session, n, balance=is_balanced)
                asked = [[seconds(*each) for each in step] for step in steps]
                found.append(np.array(asked))
            ours, at_random = found
            yield {
                **{"lengths": kind, "ranks": n, "samples": n_samples},
                **{"steps": len(ours), "slowest": slowest(ours)},
                "best": slowest(np.sort(ours, axis=None).reshape(-1, n)),
                "random": slowest(at_random),
                "random_times": at_random.max(axis=1).sum() / ours.max(axis=1).sum(),
                **{"rounds": len(sent), "sent_bytes": 8 * max(sent)},
            }


def _rival(task: Task) -> Rows:
    """Search the most rows of ``batch_rebalance``."""
    lengths = balance.lengths_of(random.Random(task["seed"]), task["samples"])
    own = {"n_ranks": ranks.N_RANKS, "n_accumulated": task["accumulated"]}
    trials = Rebalanced({**task, "card": "h100"}, lengths, **own)
    for strategy in ("plain", "hf"):
        rows, steps = trials.most(strategy)
        if rows:
            named = {"strategy": strategy, "accumulated": task["accumulated"]}
            yield {**named, "rows": rows, **told(steps)}
