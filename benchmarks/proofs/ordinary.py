"""What does a session cost on a CPU, compared with an ordinary process?

A session lowers two thresholds of glibc for its process: Note: [The allocator's
thresholds] in `mimose.memory.glibc`. `mimose bench` compares strategies under the same
thresholds. Here plain training and transformers' checkpointing run in processes that no
session has touched, one way after the other, on the same batches. CPU time of the
second half of the steps counts, which other load of the machine disturbs less than
seconds.

    python -m benchmarks.proofs ordinary --threads 1
"""

from __future__ import annotations

import random
import statistics
import time
from contextlib import nullcontext
from typing import Any

import torch

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Rows, Settings, Task
from mimose.bench.zoo import ZOO
from mimose.session import attach

QUESTION = "What does a session cost on a CPU, beside an ordinary process?"
OPTIONS = (
    common.count("--steps", 60, "of each way"),
    common.count("--rounds", 3, "of all ways"),
)

_CONFIG = {"hidden_size": 96, "intermediate_size": 384, "num_hidden_layers": 6}
_ROWS, _LENGTHS = 8, (32, 256)
_WAYS = "plain", "checkpointing", "all recomputed", "all kept", "half the budget"


def ask(settings: Settings, options: Options) -> Answer:
    """Train in every way, each in a separate process, in rounds."""
    answer = Answer()
    shares: dict[str, list[float]] = {way: [] for way in _WAYS}
    for number in range(options.rounds):
        rows: dict[str, Any] = {}
        for way in _WAYS:
            task: dict[str, Any] = {"way": way, "steps": options.steps}
            if way == "half the budget":
                grown = (rows[name]["growth_bytes"] for name in _WAYS[2:4])
                task["headroom_bytes"] = int(sum(grown)) // 2
            [rows[way]] = common.measured("ordinary", settings, **task)
            shares[way].append(rows[way]["cpu_seconds"] / rows["plain"]["cpu_seconds"])
            answer.rows.append({"round": number, **rows[way]})
        common.progress(f"round {number}: done")
    of_plain = {way: statistics.median(own) for way, own in shares.items()}
    for way in _WAYS:
        own = [row for row in answer.rows if row["way"] == way]
        over = sum(row["steps_over"] for row in own)
        line = {"way": way, "CPU time of plain": of_plain[way], "steps over": over}
        answer.table.append(line)
    over = sum(row["steps_over"] for row in answer.rows)
    answer.bars = [
        Bar("CPU time, all kept, of plain", of_plain["all kept"], 1.15),
        Bar(
            "CPU time, half the budget, of transformers' checkpointing",
            of_plain["half the budget"] / of_plain["checkpointing"],
            1.0,
        ),
        Bar("steps over", over, 0),
    ]
    return answer


def work(task: Task) -> Rows:
    """Train in one way."""
    torch.manual_seed(task["seed"])
    way, lengths = task["way"], random.Random(task["seed"])
    model: Any = ZOO["bert"].build(**_CONFIG)
    optimizer = torch.optim.AdamW(model.parameters())

    def step(length: int) -> None:
        tokens = torch.ones(_ROWS, length, dtype=torch.long)
        labels = torch.zeros(_ROWS, dtype=torch.long)
        model(input_ids=tokens, labels=labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    if way == "checkpointing":
        enable = getattr(model, "activation_checkpointing_enable", None)
        (enable or model.gradient_checkpointing_enable)()  # before transformers 5.8
    for _ in range(2):
        step(_LENGTHS[1])
    is_bare = way in ("plain", "checkpointing")
    headroom = task.get("headroom_bytes", common.AMPLE_BYTES)
    planner = {"all recomputed": "full", "all kept": "none"}.get(way, "auto")
    budget = f"+{headroom}B"
    session = None if is_bare else attach(model, budget, planner=planner)
    with session or nullcontext():
        for number in range(task["steps"]):
            if number == task["steps"] // 2:
                began = time.process_time()
            step(lengths.randint(*_LENGTHS))
        seconds = time.process_time() - began
        records = [] if session is None else session.records
        growths = [record.observed_growth_bytes or 0 for record in records]
        over = sum(record.is_over for record in records)
    yield {
        "way": way,
        "cpu_seconds": seconds,
        "growth_bytes": max(growths, default=0),
        "headroom_bytes": headroom,
        "steps_over": over,
    }
