"""One command for a card: what steps take there, of the card and of the host.

Each strategy trains in a separate process. Each process begins with one step of one
short sample, without a strategy. cuDNN's attention, which builds a plan for each new
shape, is on and off. Each row is written at once: after ten steps, after 60 and at
the end, so the last row of a cell (workload, strategy, cuDNN) counts. A process that
takes too long ends, and what no time is left for has a row that says so. With
``--resume`` a later run takes what is missing.

Columns with ``host`` are seconds of the processor, without the wait for the card at a
step's end; the others are the card's, synchronized. Means are of a step: ``first`` of
the first ten, ``early`` of those to the 60th, ``settled`` of all later ones; ``new`` of
the last ten that had a shape which the process had never seen, ``seen`` of the same
batches once more. Steps that ran out of memory are in no mean. On the hollow card
(``--device sim``) seconds are virtual.

    python -m benchmarks.proofs gpu --device cuda --out runs/gpu
    python -m benchmarks.proofs gpu --cells bert-large-16/whole --cudnn on
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.numbers import mean
from benchmarks.scale.fill import PLACES, Group, Place, Trials
from benchmarks.scale.models import WORKLOADS
from mimose.bench.device import SIM
from mimose.bench.usage import positive

QUESTION = "What do steps take on this card, of the card and of the host?"
DEFAULTS = {"seed": 1, "threads": 1}
_BERT, _LLAMA = "bert-large-16", "llama-8b-lora-40"
CELLS: Mapping[str, tuple[str, str, int]] = {
    f"{_BERT}/whole": (_BERT, "whole", 32),
    f"{_BERT}/hf": (_BERT, "hf", 32),
    f"{_BERT}/sampler": (_BERT, "sampler", 0),
    f"{_LLAMA}/whole": (_LLAMA, "whole", 2),
    f"{_LLAMA}/hf": (_LLAMA, "hf", 2),
    f"{_LLAMA}/sampler": (_LLAMA, "sampler", 0),
    f"{_BERT}/plain": (_BERT, "plain", 20),
}
"""Places, strategies and fixed rows, the most important first. Of plain training these
are the most that fit."""
CUDNN = {"on": {}, "off": {"TORCH_CUDNN_SDPA_DEPRIORITIZED": "1"}}
"""Environments. torch reads the variable from 2.10 on; others get a flag (`work`)."""
OPTIONS = (
    common.device(SIM),
    common.some("--cells", CELLS),
    common.some("--cudnn", CUDNN),
    ("--card", {"default": "h200", "help": "h200, h100, a100, rtx4090, a10: hollow"}),
    common.count("--steps", 120, "a process, at most"),
    ("--seconds", {"type": positive, "default": 30.0, "help": "of steps, a process"}),
    ("--limit-seconds", {"type": positive, "default": 530.0, "help": "in all"}),
    common.RESUME,
)
_BUILD_SECONDS = 75.0
"""A process may take so much longer than its steps."""
_FIRST, _EARLY = 10, 60


def ask(settings: Settings, options: Options) -> Answer:
    """Run every cell, and write each row at once."""
    ends = time.monotonic() + options.limit_seconds
    answer = Answer.begun(settings.out / "gpu.csv", resume=True)
    done = _ended(answer.rows) if options.resume else set()
    first, asked = len(answer.rows), set()
    for name, cudnn in itertools.product(options.cells, options.cudnn):
        place, strategy, rows = CELLS[name]
        task = {"place": place, "strategy": strategy, "rows": rows, "cudnn": cudnn}
        if _cell(task) in done:
            continue
        asked.add(_cell(task))
        own: Any = {"card": options.card, "steps": options.steps}
        own |= {"seconds": options.seconds, "environment": CUDNN[cudnn]}
        limit = options.seconds + _BUILD_SECONDS
        for told in common.within("gpu", settings, ends, limit, **task, **own):
            row = {**task, "why": "", **told}
            answer.add(f"{name}, cuDNN {cudnn}", [row], _line(row), (), head="cell")
    mine = answer.rows[first:]
    ours = [row for row in mine if row["strategy"] in ("whole", "sampler")]
    for what in ("over", "ooms"):
        most = max((row.get(what) or 0 for row in ours), default=0)
        answer.bars.append(Bar(f"mimose: {what}", most, 0))
    missing = len(asked - _ended(mine))
    answer.bars.append(Bar("cells that failed or were left out", missing, 0))
    return answer


def _ended(rows: Iterable[Row]) -> set[tuple[object, ...]]:
    """Return the cells that ran to their end."""
    return {_cell(row) for row in rows if row.get("ended")}


def _cell(row: Mapping[str, Any]) -> tuple[object, ...]:
    return row["place"] or "", row["strategy"], row["cudnn"]


def _line(row: Row) -> Row:
    """Return a row in short."""
    names = "first", "early", "settled", "new", "seen", "settled_host"
    found = {name: row.get(f"{name}_seconds") for name in names}
    short = {f"{name}, ms": value and 1e3 * value for name, value in found.items()}
    kept = "n_steps", "tokens_per_second", "over", "ooms", "why"
    return {**{name: row.get(name) for name in kept}, **short}


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Run a cell."""
    warnings.filterwarnings("ignore")
    if task["cudnn"] == "off":
        torch.backends.cuda.enable_cudnn_sdp(False)
    llama = Place(WORKLOADS["llama-8b-lora"], 40, 3000, "whole", 0.0)
    place = {**PLACES, _LLAMA: llama}[task["place"]]
    trials = Trials(task, place)
    is_fixed = task["strategy"] != "sampler"
    groups: list[Group] = []
    began = time.monotonic()
    with trials.strategy(task["strategy"] if is_fixed else place.actions):
        torch.accelerator.reset_peak_memory_stats()
        drawn = trials.groups("a", task["rows"]) if is_fixed else trials.drawn()
        for group in itertools.islice(drawn, task["steps"]):
            groups.append(group)
            trials.watch(group)
            if len(groups) in (_FIRST, _EARLY):
                yield _told(trials, groups)
            if time.monotonic() - began > task["seconds"]:
                break
        again = groups[-_FIRST:]
        for group in again:
            trials.watch(group)
        yield _told(trials, groups, len(again)) | {"ended": True}


def _told(trials: Trials, groups: Sequence[Group], n_again: int = 0) -> Row:
    """Return the columns of the steps so far; `n_again` of the last ran once more."""
    steps = trials.run.steps
    shapes = [(len(group), trials.sizes(group)) for group in groups]
    last = range(len(groups) - n_again, len(groups))
    new = [at for at in last if shapes.index(shapes[at]) == at]
    spans: Mapping[str, Iterable[int]] = {
        "first": range(min(_FIRST, len(groups))),
        "early": range(_FIRST, min(_EARLY, len(groups))),
        "settled": range(_EARLY, len(groups)),
        "new": new,
        "seen": [at + n_again for at in new],
    }
    rated = [at for at in range(_FIRST, len(groups)) if not steps[at]["failed"]]
    seconds = sum(steps[at]["user_seconds"] for at in rated)
    real = sum(sum(map(sum, groups[at])) for at in rated)
    padded = sum(shapes[at][0] * sum(shapes[at][1]) for at in rated)
    told: Row = {"gib": trials.place.gib, "n_steps": len(groups), "n_new": len(new)}
    for name, span in spans.items():
        kept = [steps[at] for at in span if not steps[at]["failed"]]
        told[f"{name}_seconds"] = mean(step["user_seconds"] for step in kept)
        told[f"{name}_host_seconds"] = mean(step["cpu_seconds"] for step in kept)
    told |= {
        "tokens_per_second": real / seconds if seconds else None,
        "padded_tokens_per_second": padded / seconds if seconds else None,
        "rows_a_step": mean(float(shapes[at][0]) for at in rated),
        "reserved_bytes": max(step["reserved_bytes"] for step in steps),
        "ooms": trials.run.n_ooms,
        "settled_at": trials.settled,
    }
    if trials.session is not None:
        summary = trials.session.summary()
        told |= {"over": summary.steps_over, "reruns": summary.retries}
        told["reserved_bytes"] = trials.session.peak_bytes
    return told
