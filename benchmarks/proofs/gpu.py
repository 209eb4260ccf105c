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
batches once more. Steps that ran out of memory are in no mean. Rows of ``attention``
time one call forward, its backward (in autograd's thread) and a backward that first
recomputes the forward there, at new shapes and once more. On the hollow card
(``--device sim``) seconds are virtual, and those of ``attention`` are the host's.

    python -m benchmarks.gpu --device cuda --out runs/gpu
    python -m benchmarks.gpu --cells attention bert-large-16/whole --cudnn on
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.numbers import mean, quantile
from mimose.bench.child import RunFailedError, run_child
from mimose.bench.device import SIM, kind_of
from mimose.exceptions import first_line
from mimose.sim import use
from mimose.usage import positive

if TYPE_CHECKING:
    from benchmarks.scale.fill import Group, Trials

QUESTION = "What do steps take on this card, of the card and of the host?"
DEFAULTS = {"seed": 1, "threads": 1}
_ATTENTION = "attention"
_BERT, _LLAMA = "bert-large-16", "llama-8b-lora-40"
CELLS: Mapping[str, tuple[str, str, int]] = {
    _ATTENTION: ("", _ATTENTION, 0),
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
_LEAST_SECONDS = 20.0
"""With less than this left no process is begun."""
_LEFT_OUT = "left out: "
_FIRST, _EARLY = 10, 60
_CASES = {
    "bert-large, 32 rows": (32, 16, 64, False),
    "llama-8b, 2 rows": (2, 32, 128, True),
}
"""Rows, heads and their width, and whether it is causal."""
_WARM, _LENGTHS = 128, tuple(range(201, 501, 37))


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
        own = {"card": options.card, "steps": options.steps, "seconds": options.seconds}
        for row in _rows(settings, task, own, ends - time.monotonic()):
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


def _rows(
    settings: Settings, task: Task, own: Task, left_seconds: float
) -> Iterator[Row]:
    """Run one process; how it ended is a row where it did not end well."""
    why = ""
    if left_seconds < _LEAST_SECONDS:
        why = f"{_LEFT_OUT}no time was left"
    else:
        whole = {**task, **own, "seed": settings.seed, "device": settings.device}
        limit_seconds = min(own["seconds"] + _BUILD_SECONDS, left_seconds)
        options = {"environment": CUDNN[task["cudnn"]], "limit_seconds": limit_seconds}
        try:
            for told in run_child(__name__, whole, settings.threads, **options):
                yield {**task, "why": "", **told, **settings.provenance()}
        except RunFailedError as error:
            why = first_line(error)
    if why:
        yield {**task, "why": why, **settings.provenance()}


def _line(row: Row) -> Row:
    """Return a row in short."""
    if row["strategy"] == _ATTENTION:
        return {"case": row.get("case"), "why": row["why"]} | {
            name: 1e3 * row[name] for name in _TIMES if row.get(name)
        }
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
    if task["strategy"] == _ATTENTION:
        yield from _attention(task)
    else:
        yield from _trained(task)


def _trained(task: Task) -> Rows:
    from benchmarks.scale.fill import PLACES, Place, Trials
    from benchmarks.scale.models import WORKLOADS

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


_TIMES = tuple(
    f"{part}_{which}_seconds"
    for part in ("forward", "backward", "recompute")
    for which in ("new", "seen")
)


def _attention(task: Task) -> Rows:
    device = task["device"]
    if kind_of(device) == SIM:
        sim = use()
        sim.set_hollow(sim.CARDS[task["card"]])
    for case, (rows, heads, width, is_causal) in _CASES.items():

        def attend(*given: torch.Tensor, causal: bool = is_causal) -> torch.Tensor:
            q, k, v = (each.transpose(1, 2) for each in given)
            return scaled_dot_product_attention(q, k, v, is_causal=causal)

        found: dict[str, list[float]] = defaultdict(list)
        options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
        for length, which in itertools.product((_WARM, *_LENGTHS), ("new", "seen")):
            shape = rows, length, heads, width
            given = [torch.zeros(shape, **options).requires_grad_() for _ in range(3)]
            calls = "forward", "backward", "recompute"
            seconds, out = _timed(attend, *given)
            times = [seconds, _timed(out.backward, out.detach())[0]]
            out = checkpoint(attend, *given, use_reentrant=False)
            times.append(_timed(out.backward, out.detach())[0])
            for name, seconds in zip(calls, times, strict=True):
                if length != _WARM:  # kernels are loaded in it
                    found[f"{name}_{which}_seconds"].append(seconds)
        q, k, v = (each.transpose(1, 2) for each in given)
        chosen = torch._fused_sdp_choice(q, k, v, is_causal=is_causal)
        backend = torch.nn.attention.SDPBackend(chosen).name
        medians = {name: quantile(found[name], 0.5) for name in _TIMES}
        told = {"case": case, "backend": backend, "n_new": len(_LENGTHS)}
        yield {**told, **medians, "ended": case == [*_CASES][-1]}


def _timed(call: Callable[..., Any], *given: torch.Tensor) -> tuple[float, Any]:
    torch.accelerator.synchronize()
    began = time.perf_counter()
    found = call(*given)
    torch.accelerator.synchronize()
    return time.perf_counter() - began, found
