"""Does the Trainer's callback change nothing but memory, and survive being killed?

The same fine-tuning (a BERT classifier that names a docstring's package) runs bare,
with the callback where nothing needs a plan, bare again, and with the callback within
a budget: what the callback costs is the second's time over that of the two beside it.
Then one run is killed with SIGKILL at a checkpoint and another goes on from there.

    python -m benchmarks.proofs trainer
    python -m benchmarks.proofs trainer --steps 60
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.proofs.common import (
    AMPLE_BYTES,
    Answer,
    Bar,
    Settings,
    count,
    progress,
    said_by,
)
from benchmarks.proofs.numbers import mebibytes, percent, quantile, worst
from mimose.bench.child import RunFailedError
from mimose.bench.corpus import encode_corpus, load_corpus
from mimose.bench.grid.workloads import N_TEXTS, Docstrings, collate, encoder_config
from mimose.bench.rows import Row
from mimose.bench.step_meter import MeasuredStep, RunningStep, step_meter

QUESTION = "Does the Trainer's callback change nothing but memory, and survive SIGKILL?"
OPTIONS = (count("--steps", 200, "a run"),)

_SHARE = 0.5
"""The budget, as a share of the longest bare step's growth."""
_MOST_TOKENS = 256
_SAVED_AT = 60
_WARM_STEPS = 50
"""Left out of the times: the library measures as it learns."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerRow(Row):
    """One optimizer step of one run."""

    run: str
    """``bare``, ``ample``, ``again``, ``budget`` or ``resumed``."""
    step: int
    loss: float
    start_bytes: int
    peak_bytes: int
    """As the harness saw it, over every reset by the library."""
    seconds: float
    phase: str
    kept: int
    """Layers whose activations were kept."""

    @property
    def growth_bytes(self) -> int:
        """The peak over what was held at the start."""
        return self.peak_bytes - self.start_bytes


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Train four ways, and compare."""
    runs: dict[str, list[TrainerRow]] = {}
    digests: dict[str, str] = {}

    def train(run: str, **task: Any) -> list[TrainerRow]:
        own = []
        whole = {"steps": options.steps, "folder": folder, **task}
        for said in said_by("trainer", settings, **whole):
            if "digest" in said:
                digests[run] = said["digest"]
            else:
                own.append(TrainerRow(**said, run=run, **settings.provenance()))
        progress(f"trainer {run}: {len(own)} steps")
        runs[run] = own
        return own

    with tempfile.TemporaryDirectory() as folder:
        bare = train("bare")
        needs = max(bare, key=lambda row: row.growth_bytes)
        budget = needs.start_bytes + int(_SHARE * needs.growth_bytes)
        ample = train("ample", budget=AMPLE_BYTES)
        again = train("again")
        within = train("budget", budget=budget)
        try:
            train("killed", budget=budget, saves=True, killed_after=_SAVED_AT)
        except RunFailedError:
            progress(f"trainer killed: at step {_SAVED_AT}, as it should be")
        resumed = train("resumed", budget=budget, saves=True, resumes=True)
    collecting = sum(row.phase == "collect" for row in resumed)
    bars = [
        *_equal(bare, within, digests, "budget"),
        *_equal(bare, ample, digests, "ample"),
        *_equal(bare[_SAVED_AT:], resumed, digests, "resumed"),
        Bar("budget: steps over the budget", _n_over(within, budget), 0),
        Bar("resumed: steps over the budget", _n_over(resumed, budget), 0),
        Bar("bare: steps over that budget", _n_over(bare, budget), at_least=1),
        Bar("resumed: steps spent collecting", collecting, 0),
    ]
    note = (
        f"the callback costs {percent(_cost(bare, ample, again), 2)} of a step; "
        f"the two bare runs differ by {percent(abs(_cost(bare, again, bare)), 2)}"
    )
    return Answer(
        rows=[row for own in runs.values() for row in own],
        table=[_summarise(run, own, budget) for run, own in runs.items()],
        bars=bars,
        notes=[note],
    )


def _equal(
    expected: Sequence[TrainerRow],
    actual: Sequence[TrainerRow],
    digests: Mapping[str, str],
    run: str,
) -> list[Bar]:
    losses = sum(a.loss != b.loss for a, b in zip(expected, actual, strict=False))
    weights = int(digests.get(run) != digests["bare"])
    return [
        Bar(f"{run}: steps", len(actual), at_least=len(expected)),
        Bar(f"{run}: losses that differ", losses, 0),
        Bar(f"{run}: weights at the end that differ", weights, 0),
    ]


def _n_over(rows: Sequence[TrainerRow], budget: int) -> int:
    return sum(row.peak_bytes > budget for row in rows)


def _cost(
    before: Sequence[TrainerRow],
    there: Sequence[TrainerRow],
    after: Sequence[TrainerRow],
) -> float:
    """Return how much longer a step takes than in two other runs.

    The median ratio, batch by batch, once the library has learned.
    """
    ratios = [
        2 * own.seconds / (one.seconds + other.seconds)
        for one, own, other in zip(before, there, after, strict=True)
    ]
    late = ratios[_WARM_STEPS:]
    return statistics.median(late) - 1.0 if late else float("nan")


def _summarise(run: str, rows: Sequence[TrainerRow], budget: int) -> dict[str, object]:
    return {
        "run": run,
        "steps": len(rows),
        "largest growth MiB": mebibytes(worst(row.growth_bytes for row in rows)),
        "steps over the budget": _n_over(rows, budget),
        "phases": dict(sorted(Counter(row.phase for row in rows).items())),
        "ms a step p50": 1000 * (quantile((row.seconds for row in rows), 0.5) or 0.0),
        "last loss": rows[-1].loss if rows else None,
    }


# ------------------------------------------------------------------ in the child


def work(task: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Fine-tune once, and tell of every step; then of the weights."""
    from transformers import Trainer, TrainingArguments

    from mimose.integrations.transformers import MimoseCallback

    torch.use_deterministic_algorithms(True)
    meter = step_meter(torch.device("cpu"))
    docstrings = Docstrings(encode_corpus(load_corpus(), _MOST_TOKENS))
    watch = _watch(meter)
    callbacks = [watch]
    planning = None
    if "budget" in task:
        planning = MimoseCallback(task["budget"], meter=meter)
        callbacks.append(planning)
    if "killed_after" in task:
        callbacks.append(_killer(task["killed_after"]))
    trainer = Trainer(
        model=_model(docstrings, task["seed"]),
        args=TrainingArguments(
            output_dir=task["folder"],
            max_steps=task["steps"],
            per_device_train_batch_size=N_TEXTS,
            learning_rate=3e-3,
            warmup_steps=10,
            logging_steps=1,
            save_strategy="steps" if task.get("saves") else "no",
            save_steps=_SAVED_AT,
            report_to=[],
            use_cpu=True,
            seed=task["seed"],
            disable_tqdm=True,
        ),
        train_dataset=docstrings.corpus.train,
        data_collator=collate,
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=task.get("resumes", False))
    losses = {
        entry["step"]: entry["loss"]
        for entry in trainer.state.log_history
        if "loss" in entry
    }
    session = None if planning is None else planning.session
    records = [] if session is None else list(session.records)
    model: Any = trainer.model
    n_layers = model.config.num_hidden_layers
    for index, (step, measured) in enumerate(watch.steps):
        record = records[index] if records else None
        yield {
            "step": step,
            **measured._asdict(),
            "loss": losses[step],
            "phase": "" if record is None else record.phase,
            "kept": n_layers if record is None else record.actions.count("keep"),
        }
    whole = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    yield {"digest": hashlib.sha256(whole).hexdigest()}


def _model(docstrings: Docstrings, seed: int) -> torch.nn.Module:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    config: Any = BertConfig(**encoder_config(docstrings.corpus))
    config.num_labels = len(docstrings.corpus.labels)
    model: torch.nn.Module = BertForSequenceClassification(config)
    return model


def _watch(meter: Any) -> Any:
    """Return a callback that reads every step's memory and time."""
    from transformers import TrainerCallback

    class Watch(TrainerCallback):
        """Reads memory and time around every optimizer step."""

        def __init__(self) -> None:
            self.steps: list[tuple[int, MeasuredStep]] = []
            self._running: RunningStep | None = None

        def on_step_begin(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            """Start a new peak."""
            self._running = RunningStep(meter, torch.device("cpu"))

        def on_step_end(
            self, args: Any, state: Any, control: Any, **kwargs: Any
        ) -> None:
            """Read what the step reached."""
            assert self._running is not None
            self.steps.append((state.global_step, self._running.end()))

    return Watch()


def _killer(after: int) -> Any:
    """Return a callback that kills the process once a step's checkpoint is written."""
    from transformers import TrainerCallback

    class Killer(TrainerCallback):
        """Stands for a machine that went away."""

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            """Send SIGKILL to this process."""
            if state.global_step >= after:
                os.kill(os.getpid(), signal.SIGKILL)

    return Killer()
