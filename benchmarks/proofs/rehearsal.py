"""Is a card what its rehearsal said?

Each workload trains in a session twice, in separate processes: on the hollow card of
that name, and on the device. Steps, lengths and budget are the same. A plan is the same
if every layer gets the same action; behind the tenth step both have learned.

    python -m benchmarks.proofs rehearsal --device cuda --card h200
"""

from __future__ import annotations

import time
from itertools import chain

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.numbers import mean, quantile
from benchmarks.scale.models import WORKLOADS
from benchmarks.scale.run import GIB, build
from mimose.bench.child import RunFailedError
from mimose.bench.device import SIM
from mimose.bench.rehearse.host import of_session
from mimose.session import attach

QUESTION = "Is a card what its rehearsal said?"
DEFAULTS = {"seed": 1, "threads": 1}
_PLACES = {"bert-large": 16, "llama-8b-lora": 40}
"""Workloads, and the GiB of their cards."""
OPTIONS = (
    common.device(SIM),
    common.some("--workloads", _PLACES),
    ("--card", {"default": "h200", "help": "h200, h100, a100, rtx4090, a10"}),
    common.count("--steps", 60, "a process"),
    ("--limit-seconds", {"type": float, "default": 530.0, "help": "in all"}),
)
_FIRST, _SHARE = 10, 0.9


def ask(settings: Settings, options: Options) -> Answer:
    """Train each workload on both, and compare step by step."""
    ends = time.monotonic() + options.limit_seconds
    answer = Answer(path=settings.out / "rehearsal.csv")
    for workload in options.workloads:
        if time.monotonic() > ends:
            answer.bars.append(Bar(f"{workload}: left out, no time was left", None, 0))
            continue
        task = {"workload": workload, "gib": _PLACES[workload], "card": options.card}
        task |= {"steps": options.steps}
        pair = []
        for device in (SIM, settings.device):
            try:
                told = common.said_by("rehearsal", settings, **task, on=device)
                pair.append(list(told))
            except RunFailedError as error:
                common.progress(f"{workload} on {device}: {error}")
        rows = [{**row, **settings.provenance()} for row in chain(*pair)]
        if len(pair) < 2:
            answer.bars.append(Bar(f"{workload}: ran on both", None, 0))
            continue
        found = _compared(*pair)
        answer.add(workload, rows, found, (), head="workload")
        answer.bars += [
            Bar(f"{workload}: peak reserved off", found["peak"], 0.01, is_share=True),
            Bar(f"{workload}: same plans behind the tenth step", found["plans"],
                at_least=_SHARE, is_share=True),
            Bar(f"{workload}: seconds off", abs(found["seconds"]), 0.25, is_share=True),
        ]  # fmt: skip
    return answer


def _compared(rehearsed: list[Row], real: list[Row]) -> Row:
    """Return by how much a card differs from its rehearsal, as shares."""
    late = list(zip(rehearsed[_FIRST:], real[_FIRST:], strict=True))
    peaks = [max(row["reserved"] for row in rows) for rows in (rehearsed, real)]
    seconds = [mean(row["seconds"] for row in rows[_FIRST:]) for rows in
               (rehearsed, real)]  # fmt: skip
    off = [abs(here["observed"] / there["observed"] - 1.0) for here, there in late]
    return {
        "peak": abs(peaks[0] / peaks[1] - 1.0),
        "observed, p99": quantile(off, 0.99),
        "plans": sum(a["actions"] == b["actions"] for a, b in late) / len(late),
        "seconds": (seconds[0] or 0.0) / (seconds[1] or 1.0) - 1.0,
        "over on the card": sum(row["over"] for row in real),
    }


def work(task: Task) -> Rows:
    """Train; yield what each step took.

    Args:
        task: As for `benchmarks.scale.run.build`, with ``on`` in place of the device.
    """
    workload = WORKLOADS[task["workload"]]
    run = build(workload, {**task, "device": task["on"]})
    budget = int(0.95 * task["gib"] * GIB)
    with (
        attach(run.model, budget, refine=False) as session,
        run.charged(of_session(session)),
    ):
        for sizes in workload.sizes(task["steps"], task["seed"]):
            before = run.card.clock()
            run.train(sizes)
            passed = run.card.clock().since(before)
            record = session.records[-1]
            yield {
                **{name: task[name] for name in ("workload", "gib", "card", "on")},
                "sizes": "x".join(map(str, sizes)),
                "actions": " ".join(record.actions),
                "observed": record.observed_peak_bytes,
                "reserved": record.reserved_peak_bytes,
                "over": record.is_over,
                "seconds": passed.user,
            }
