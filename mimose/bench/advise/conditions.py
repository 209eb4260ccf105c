"""Under which conditions was measured, and what was left out, in words."""

from __future__ import annotations

from collections.abc import Iterator

from mimose.bench.advise.advice import Advice
from mimose.bench.advise.effects import is_beyond
from mimose.bench.advise.phrases import called, listed
from mimose.predictors import LEAST_ROUNDS
from mimose.report.page.looks import counted, format_seconds

_BUSY = 0.5
"""Of the threads: with so much load when measuring ends others took part of the CPU."""


def warnings(advice: Advice) -> Iterator[str]:
    """Say that measuring did not come to its end, or was too short for the noise."""
    of = advice.measurements
    if of.is_interrupted:
        after = counted(of.n_rounds, "whole round") if of.n_rounds else "no round"
        yield (
            f"Measuring was interrupted after {after} of timings: what follows is from "
            f"what there was by then."
        )
    n_rounds = _least_readings(advice)
    if 0 < n_rounds < LEAST_ROUNDS:
        yield (
            f"All that is said of speed is from {counted(n_rounds, 'round')}, and "
            f"how noisy these were cannot be told from fewer than {LEAST_ROUNDS}: take "
            f"it for a first idea, and give it more minutes."
        )


def conditions(advice: Advice) -> Iterator[str]:
    """Say how was measured, on what, and how busy that was."""
    of = advice.measurements
    device = of.machine.get("device", of.device)
    n_rounds = _least_readings(advice)
    how = (
        f"Seconds are medians of {counted(n_rounds, 'round')} in which all methods "
        f"took turns"
        if n_rounds
        else "No seconds were measured"
    )
    yield (
        f"{how}; measuring took {format_seconds(of.taken_seconds)} of the "
        f"{format_seconds(of.promised_seconds)} it was given, on {device}, "
        f"{counted(of.threads, 'thread')}, {of.dtype}, optimizer {of.optimizer}, with "
        f"a load average of {of.load_average:g} at the end{_busy(advice)}."
    )


def left_out(advice: Advice) -> Iterator[str]:
    """Say what there was no time for, and which answers reach beyond what was run."""
    notes = advice.measurements.notes
    if notes:
        yield f"Left out: {'; '.join(notes)}."
    beyond = [
        f"{called(each.name)} {each.largest_batch:,} (run up to {each.highest:g})"
        for each in advice.methods
        if not each.why_not and is_beyond(each)
    ]
    if beyond:
        yield (
            f"Not run but followed on from smaller batches, and so less certain: the "
            f"largest batch of {listed(beyond)}."
        )


def _least_readings(advice: Advice) -> int:
    """Return how often the size was timed that was timed least; 0 without any."""
    return min(
        (
            len(each.rounds)
            for method in advice.measurements.methods
            for each in method.timed
        ),
        default=0,
    )


def _busy(advice: Advice) -> str:
    """Warn of a machine that did something else as well."""
    of = advice.measurements
    if of.device != "cpu" or of.load_average <= of.threads * (1.0 + _BUSY):
        return ""
    return (
        ": more than the threads that trained, so something else ran too, which makes "
        "seconds longer and noisier"
    )
