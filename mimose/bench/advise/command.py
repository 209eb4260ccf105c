"""``mimose advise`` and `mimose.advise`: measure, answer, and write files."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mimose.bench.advise.advice import Advice, advise_on
from mimose.bench.advise.measure import measure, read
from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.settings import Settings
from mimose.bench.advise.source import saved
from mimose.bench.advise.text import headline, recipe, text
from mimose.bench.usage import UsageError
from mimose.budget import parse_budget
from mimose.exceptions import AdviceError, BudgetError

_INTERRUPTED = 130
_MEASURED, _ANSWER = "measured.json", "advice.json"


def ask(settings: Settings, out: Path, as_json_alone: bool) -> tuple[int, list[str]]:
    """Measure and answer.

    Args:
        settings: The question.
        out: The folder for ``measured.json`` and ``advice.json``.
        as_json_alone: Whether the answer is one line of JSON.

    Returns:
        The exit status, and the lines to write.

    Raises:
        UsageError: The model cannot be made or trained.
        OSError: The folder cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    found = measure(settings, _show_progress)
    found.write(out / _MEASURED)
    status = _INTERRUPTED if found.is_interrupted else 0
    return status, _lines(advise_on(found), out, as_json_alone)


def again(
    path: Path, out: Path, budget: str | None, as_json_alone: bool
) -> tuple[int, list[str]]:
    """Answer from the readings of an earlier run.

    Args:
        path: Its ``measured.json``.
        out: The folder for ``advice.json``.
        budget: Another budget; None for that of the run.
        as_json_alone: Whether the answer is one line of JSON.

    Raises:
        UsageError: The budget is relative to memory that is not known any more, or the
            file has other content.
        OSError: A file cannot be read or written.
    """
    try:
        found = read(path)
        memory_bytes = None if budget is None else parse_budget(budget, None)
    except (BudgetError, ValueError) as error:
        raise UsageError(str(error)) from error
    return 0, _lines(advise_on(found, memory_bytes), out, as_json_alone)


def advise(
    model: nn.Module | str,
    sample: Any = None,
    budget: float | str = 0.8,
    *,
    minutes: float = 5.0,
    methods: Sequence[str] | None = None,
    device: str | torch.device | None = None,
    dtype: str = "float32",
    optimizer: str = "adamw",
    threads: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = True,
) -> Advice:
    """Measure whether saving memory pays for a model, and with which method.

    Plain training and each method are measured at a few batch sizes, in separate
    processes that take turns: first memory, then seconds. ``print`` the answer to read
    it. In a script, call this below ``if __name__ == "__main__":`` or in a function.

    Source: PAPAYA (Liu et al., "An Evaluation of Memory Optimization Methods for
    Training Neural Networks").

    Args:
        model: The model, or ``"module:function"``, a function without arguments that
            returns ``(model, sample)``. A copy of a model is trained. Memory that this
            process holds on a device is missing for the measured processes.
        sample: One batch: a mapping of keyword arguments, a tuple of arguments, or a
            single tensor. The first dimension of each tensor is the batch.
        budget: The memory that training may use, as for `mimose.attach`.
        minutes: The longest time to measure.
        methods: Names of methods, as in ``mimose advise --list``; None for all.
        device: The device to train on; None for that of the model, or the CPU.
        dtype: ``"float32"``, or ``"bfloat16"`` for autocast.
        optimizer: ``"adamw"`` or ``"sgd"``.
        threads: Threads of torch; None for as many as this process has.
        seed: Seed of the weights, if a function makes the model, and of the turns.
        out: A folder for the answer and the readings; None to write nothing.
        progress: Whether to show the progress on the standard error.

    Returns:
        The answer.

    Raises:
        AdviceError: The model cannot be made, saved or trained, or a name is unknown.
    """
    own = "cpu"
    if isinstance(model, nn.Module):
        own = str(next((each.device for each in model.parameters()), own))
    try:
        if isinstance(model, str) and sample is not None:
            msg = f"{model} returns the sample too: leave sample out"
            raise UsageError(msg)
        if not isinstance(model, str) and sample is None:
            msg = "give a sample: one batch, such as {'input_ids': ..., 'labels': ...}"
            raise UsageError(msg)
        with (
            nullcontext(model)
            if isinstance(model, str)
            else saved(model, sample) as source
        ):
            settings = Settings(
                source=source,
                model=model if isinstance(model, str) else type(model).__name__,
                budget=budget,
                methods=tuple(METHODS if methods is None else methods),
                device=own if device is None else str(device),
                dtype=dtype,
                optimizer=optimizer,
                threads=threads or torch.get_num_threads(),
                seed=seed,
                minutes=minutes,
            )
            found = measure(
                settings, _show_progress if progress else lambda _, __: None
            )
    except UsageError as error:
        raise AdviceError(str(error)) from error
    advice = replace(advise_on(found), in_words=text)
    if out is not None:
        Path(out).mkdir(parents=True, exist_ok=True)
        found.write(Path(out) / _MEASURED)
        _lines(advice, Path(out), as_json_alone=True)
    return advice


def as_json(advice: Advice) -> dict[str, Any]:
    """Return the answer as JSON values; infinite numbers and nan become None.

    Args:
        advice: The answer.

    Returns:
        The fields of `Advice`; ``headline``, one line; ``code``, for each method in
        ``use``; ``fits``, each method's two series; ``measurements``, without readings.
    """
    conditions = asdict(advice.measurements)
    del conditions["methods"]
    answer = {
        "headline": headline(advice),
        "answer": advice.answer,
        "use": advice.use,
        "budget_bytes": advice.budget_bytes,
        "at_sample": advice.at_sample and asdict(advice.at_sample),
        "free": advice.free and asdict(advice.free),
        "methods": [asdict(each) for each in advice.methods],
        "fits": {
            name: {"memory": asdict(m.memory), "seconds": asdict(m.fit)}
            for name, m in advice.models.items()
        },
        "code": {name: recipe(name, advice.budget_bytes) for name in advice.use},
        "measurements": conditions,
    }
    found: dict[str, Any] = json.loads(
        json.dumps(answer), parse_constant=lambda _: None
    )
    return found


def _lines(advice: Advice, out: Path, as_json_alone: bool) -> list[str]:
    """Write the answer as JSON to its file; return the lines for the terminal."""
    out.mkdir(parents=True, exist_ok=True)
    answer = json.dumps(as_json(advice))
    (out / _ANSWER).write_text(f"{answer}\n", encoding="utf-8")
    if as_json_alone:
        return [answer]
    return [text(advice), "", f"answer as JSON: {out / _ANSWER}"]


def _show_progress(what: str, share: float) -> None:
    """Show the progress; in a terminal, over the line before."""
    end = "\r" if sys.stderr.isatty() else "\n"
    sys.stderr.write(f"{f'mimose advise: {share:4.0%}, {what}':79}{end}")
    sys.stderr.flush()
