"""How much host time does a step take, compared with bare and checkpointed training?

If an accelerator waits for the host, a step's Python code determines its speed. A BERT
of twenty-four layers, so small that arithmetic takes almost no time, trains by turns
under the library, without and with `Session.step`, bare, and with transformers'
checkpointing. CPU time of the process
counts, which other load of the machine disturbs less than seconds. Ratios are medians
over rounds.

    python -m benchmarks.proofs stepcost --threads 1
    python -m benchmarks.proofs stepcost --threads 1 --device sim --out docs/results/sim

The simulated device is hollow: a step takes only the host's time there.
"""

from __future__ import annotations

import copy
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.playback import Playback
from mimose.bench.device import SIM
from mimose.bench.zoo import ZOO
from mimose.session import attach

QUESTION = "What does a step take of the host, beside bare and checkpointed ones?"
OPTIONS = (
    common.device("cpu"),
    common.count("--rounds", 40, "of each plan"),
    common.count("--steps", 5, "a round"),
)

_N_LAYERS = 24
_CONFIG = {"num_hidden_layers": _N_LAYERS, "hidden_size": 16, "intermediate_size": 32}
_PLANS: Mapping[str, tuple[str, str, float]] = {
    "keep all": ("k", "bare", 1.15),
    "recompute all": ("r", "checkpointed", 1.0),
}
"""What each layer does; beside what its CPU time is held, and how many times as much it
may take."""
_WARM_UP_STEPS = 40


def ask(settings: Settings, options: Options) -> Answer:
    """Time every plan, all in one process."""
    task = {"rounds": options.rounds, "steps": options.steps}
    rows = common.measured("stepcost", settings, **task)
    answer = Answer(path=settings.out / "stepcost.csv")
    for name in _PLANS:
        own = [row for row in rows if row["plan"] == name]
        answer.add(name, own, *judge(name, own), head="plan")
    return answer


def judge(name: str, rows: Sequence[Row]) -> common.Verdict:
    """Judge the rounds of one plan."""

    def median(column: str, beside: str | None = None) -> float:
        own = [row[column] / (row[beside] if beside else 1.0) for row in rows]
        return float(statistics.median(own))

    _, other, most = _PLANS[name]
    ways = ("bare", "checkpointed", "attached", "stepped")
    line = {
        **{f"{way} ms": 1e3 * median(f"{way}_seconds") for way in ways},
        **{f"{way} calls": rows[0][f"{way}_calls"] for way in ways},
        **{
            f"{way} of {other}": median(f"{way}_seconds", f"{other}_seconds")
            for way in ways[2:]
        },
    }
    bars = [(f"{way} of {other}", most) for way in ways[2:]]
    return line, [Bar(f"CPU time, {name}", line[name], most) for name, most in bars]


# ------------------------------------------------------------------ in the child


def work(task: Task) -> Rows:
    """Time the plans."""
    torch.manual_seed(task["seed"])
    device = torch.device(task["device"])
    if device.type == SIM:
        sim = torch.get_device_module(SIM)
        sim.set_hollow(sim.CARDS["h100"])
    model = ZOO["bert"].build(**_CONFIG).to(device)
    checkpointed: Any = copy.deepcopy(model)
    enable = getattr(checkpointed, "activation_checkpointing_enable", None)
    (enable or checkpointed.gradient_checkpointing_enable)()  # before transformers 5.8
    bare = copy.deepcopy(model)
    ways = {"bare": bare, "checkpointed": checkpointed, "attached": model}
    playback = Playback()
    playback.tell("k" * _N_LAYERS)
    how: Any = {"planner": playback, "actions": "whole"}
    with attach(model, common.AMPLE_BYTES, **how) as session:
        for number in range(_WARM_UP_STEPS):  # on other shapes, until plans come
            _step(model, (4, 8, 12, 16)[number % 4])
        for length, (name, (action, _, _)) in enumerate(_PLANS.items(), 5):
            # Another shape, and so another plan
            playback.tell(action * _N_LAYERS)
            steps: dict[str, Callable[[], object]] = {
                way: partial(_step, each, length) for way, each in ways.items()
            }
            steps["stepped"] = partial(session.step, steps["attached"])
            for step in steps.values():
                step()
            playback.settle(session, steps["attached"])
            calls = {f"{way}_calls": _calls(step) for way, step in steps.items()}
            for index in range(task["rounds"]):
                seconds = {
                    f"{way}_seconds": _cpu_seconds(step, task["steps"])
                    for way, step in steps.items()
                }
                yield {"plan": name, "round": index, **seconds, **calls}


def _step(model: nn.Module, length: int) -> None:
    device = next(model.parameters()).device
    tokens = torch.ones(2, length, dtype=torch.long, device=device)
    labels = torch.zeros(2, dtype=torch.long, device=device)
    model(input_ids=tokens, attention_mask=tokens, labels=labels).loss.backward()
    model.zero_grad(set_to_none=True)


def _cpu_seconds(call: Callable[[], object], times: int) -> float:
    began = time.process_time()
    for _ in range(times):
        call()
    return (time.process_time() - began) / times


def _calls(step: Callable[[], object]) -> int:
    """Count the functions that a step calls in this thread, Python's and others."""
    n_calls = 0

    def note(frame: object, event: str, _: object) -> None:
        nonlocal n_calls
        del frame
        n_calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(before)
    return n_calls
