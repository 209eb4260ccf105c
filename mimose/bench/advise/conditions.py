"""Under which conditions was measured, and what was left out, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator

from mimose.bench.advise.advice import Advice
from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.phrases import called, listed
from mimose.bench.advise.ties import n_readings
from mimose.predictors import LEAST_ROUNDS
from mimose.report.page.looks import counted, format_seconds

_UNTIMED = re.compile(
    r"(?P<method>\S+) was not timed at (?P<size>.*), for lack of time"
)
"""A note of `Rounds`, which is told at the end; others stand at the top."""
_FEW = "too little time for seven rounds"
"""A note of `Rounds` that the number of rounds, always told, makes superfluous."""
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
    n_rounds = least_readings(advice)
    if 0 < n_rounds < LEAST_ROUNDS:
        yield (
            f"Too little time: speed was measured in {counted(n_rounds, 'round')} "
            f"only, and it takes {LEAST_ROUNDS} to tell how noisy they are. Take what "
            f"follows for a first idea, and give it more minutes."
        )
    notes = [each for each in of.notes if not _UNTIMED.fullmatch(each)]
    notes = [each for each in notes if not each.startswith(_FEW)]
    if notes:
        yield f"Please note: {'; '.join(notes)}."


def conditions(advice: Advice) -> Iterator[str]:
    """Say how was measured, on what, and how busy that was."""
    of = advice.measurements
    device = of.machine.get("device", of.device)
    n_rounds = least_readings(advice)
    how = (
        f"Seconds are medians of {counted(n_rounds, 'round')} in which all methods "
        f"took turns{_at_pace(advice)}"
        if n_rounds
        else "No seconds were measured"
    )
    yield (
        f"{how}; measuring took {format_seconds(of.taken_seconds)} of the "
        f"{format_seconds(of.promised_seconds)} it was given, on {device}, "
        f"{counted(of.threads, 'thread')}, {of.dtype}, optimizer {of.optimizer}, with "
        f"a load average of {of.load_average:g} at the end{_busy(advice)}."
    )


def _at_pace(advice: Advice) -> str:
    """Say whether they were set against the machine's pace, where it was read."""
    by_pace = advice.measurements.by_pace
    if by_pace is None:
        return ""
    if by_pace:
        return ", each step set against the machine's pace around it"
    return ", by the clock, which scattered less than the machine's pace made it"


def left_out(advice: Advice) -> Iterator[str]:
    """Say which sizes were not timed."""
    sizes: dict[str, list[str]] = {}
    for note in advice.measurements.notes:
        found = _UNTIMED.fullmatch(note)
        if found:
            sizes.setdefault(found["method"], []).append(found["size"])
    said = [
        f"{called(method) if method in METHODS else method} at {listed(of)}"
        for method, of in sizes.items()
    ]
    if said:
        yield f"Not timed, to have time for more rounds: {'; '.join(said)}."


def least_readings(advice: Advice) -> int:
    """Return how often the method was timed that was timed least; 0 without any."""
    counts = (n_readings(method) for method in advice.measurements.methods)
    return min((count for count in counts if count), default=0)


def _busy(advice: Advice) -> str:
    """Warn of a machine that did something else as well."""
    of = advice.measurements
    if of.device != "cpu" or of.load_average <= of.threads * (1.0 + _BUSY):
        return ""
    return (
        ": more than the threads that trained, so something else ran too, which makes "
        "seconds longer and noisier"
    )
