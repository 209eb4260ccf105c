"""All methods as rows of text, for the terminal and for the page."""

from __future__ import annotations

import math

from mimose.bench.advise.advice import Advice, MethodAdvice
from mimose.bench.advise.effects import largest_cell, longest_text
from mimose.bench.advise.methods import PLAIN
from mimose.bench.advise.phrases import (
    UNKNOWN,
    batch_text,
    interval_text,
    rate_text,
    ratio_text,
)
from mimose.report.page.looks import format_seconds

COLUMNS = (
    "method",
    "verdict",
    "largest batch",
    "longest input",
    "your batch takes",
    "best batch",
    "samples/s",
    "× plain",
    "between",
    "gradients",
)
FEWER = ((0, 1, 2, 3, 4, 5, 6, 7, 9), (0, 1, 2, 4, 6, 7), (0, 1, 2, 6, 7), (0, 1, 2, 7))
"""Columns where the terminal has no room for all."""
Row = tuple[str, ...]


def rows(advice: Advice) -> list[Row]:
    """Return a row of `COLUMNS` for each method, in the order of reports."""
    return [_row(advice, each) for each in advice.methods]


def verdict_word(method: MethodAdvice) -> str:
    """Say in a word or two what a method does to throughput."""
    if method.why_not:
        return "not known"
    if method.name == PLAIN:
        return UNKNOWN
    if method.verdict:
        return "faster" if method.verdict == "raises" else "slower"
    return "in the noise" if method.interval else "not known"


def _row(advice: Advice, method: MethodAdvice) -> Row:
    gradients = "exact" if method.is_exact else "changed"
    if method.why_not:
        unknown = (UNKNOWN,) * (len(COLUMNS) - 3)
        return (method.name, verdict_word(method), *unknown, gradients)
    fits = math.isfinite(method.sample_seconds)
    rate = method.samples_per_second
    sample = "does not fit"
    if fits:
        sample = format_seconds(method.sample_seconds)
    elif method.no_time or math.isnan(method.sample_seconds):
        sample = UNKNOWN
    return (
        method.name,
        verdict_word(method),
        largest_cell(method),
        UNKNOWN if method.longest is None else longest_text(advice, method),
        sample,
        batch_text(method.best_batch) if rate else UNKNOWN,
        rate_text(rate) if rate else UNKNOWN,
        "only it fits" if math.isinf(method.ratio) else ratio_text(method.ratio),
        interval_text(method),
        gradients,
    )
