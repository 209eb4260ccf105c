"""`mimose.advise`: the question asked from Python."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mimose.bench.advise.advice import Advice, advise_on
from mimose.bench.advise.measure import measure
from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.progress import Progress
from mimose.bench.advise.settings import Settings
from mimose.bench.advise.source import saved
from mimose.exceptions import AdviceError
from mimose.usage import UsageError


def advise(
    model: nn.Module | str,
    sample: Any = None,
    budget: float | str = 0.8,
    *,
    minutes: float = 5.0,
    methods: Sequence[str] | None = None,
    lengths: Sequence[int] = (),
    device: str | torch.device | None = None,
    dtype: str = "float32",
    optimizer: str = "adamw",
    threads: int | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    progress: bool = True,
) -> Advice:
    """Tell whether saving memory pays for a model, and with which method.

    Plain training and each method are measured at a few batch sizes: memory in a
    process for each method, seconds in two processes in which methods take turns.
    ``print`` the answer to read it. In a script, call it
    below ``if __name__ == "__main__":`` or in a function. After PAPAYA (Liu et al., "An
    Evaluation of Memory Optimization Methods for Training Neural Networks").

    Args:
        model: The model, or ``"module:function"`` of a function that takes nothing and
            returns ``(model, sample)``. Of a model a copy is trained; what this process
            itself holds of a device is not there for the measured ones.
        sample: One batch as the model is called with: a mapping of keyword arguments,
            a tuple of arguments, or the one tensor. The first dimension of each tensor
            is the batch; the second one of token ids is the length.
        budget: The memory that training may use, as for `mimose.attach`.
        minutes: That measuring may take.
        methods: Names as ``mimose advise --list`` shows them; None for all.
        lengths: Tokens of the batches to come, padded, one for each; the answer is then
            about these as well.
        device: Where to train; None for the model's own, or the CPU.
        dtype: ``"float32"``, or ``"bfloat16"`` for autocast.
        optimizer: ``"adamw"`` or ``"sgd"``.
        threads: For torch; None for as many as here.
        seed: Of weights, where a function makes the model, and of the turns.
        out: A folder for the page and the readings; None to write nothing.
        progress: Whether to show how far it is, on the standard error.

    Returns:
        The answer.

    Raises:
        AdviceError: The model cannot be made, saved or trained, or a name is not known.
    """
    with _told_as_advice(), _sourced(model, sample) as source:
        settings = Settings(
            source=source,
            model=model if isinstance(model, str) else type(model).__name__,
            budget=budget,
            methods=tuple(METHODS if methods is None else methods),
            device=str(_device(model) if device is None else device),
            dtype=dtype,
            optimizer=optimizer,
            threads=threads or torch.get_num_threads(),
            seed=seed,
            minutes=minutes,
            lengths=tuple(int(length) for length in lengths),
        )
        told = Progress(60.0 * minutes) if progress else None
        try:
            found = measure(settings) if told is None else measure(settings, told)
        finally:
            if told is not None:
                told.close()
    if out is None:
        return advise_on(found)
    from mimose.bench.advise.command import leave

    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    found.write(folder / "measured.json")
    advice = advise_on(found)
    leave(advice, folder)
    return advice


@contextlib.contextmanager
def _told_as_advice() -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        raise AdviceError(str(error)) from error


@contextlib.contextmanager
def _sourced(model: nn.Module | str, sample: Any) -> Iterator[str]:
    if isinstance(model, str):
        if sample is not None:
            msg = f"{model} makes the sample as well: leave sample out"
            raise UsageError(msg)
        yield model
        return
    if sample is None:
        msg = "give a sample: one batch, as the model is called with"
        raise UsageError(msg)
    with saved(model, sample) as path:
        yield path


def _device(model: nn.Module | str) -> torch.device:
    if isinstance(model, str):
        return torch.device("cpu")
    first = next(model.parameters(), None)
    return torch.device("cpu") if first is None else first.device
