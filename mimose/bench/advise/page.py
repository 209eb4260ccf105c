"""The answer as one HTML page that loads nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from mimose.bench.advise.advice import Advice
from mimose.bench.advise.conditions import warnings
from mimose.bench.advise.methods import PLAIN
from mimose.bench.advise.phrases import called
from mimose.bench.advise.picture import picture
from mimose.bench.advise.recipe import recipe, recommended
from mimose.bench.advise.short import short_answer
from mimose.bench.advise.table import COLUMNS, rows
from mimose.bench.advise.why import how_fitted, how_to_read
from mimose.bench.advise.words import title, verdict
from mimose.report.page.document import document
from mimose.report.page.tables import Cell, Table

_WHAT = "what it does"


def page(advice: Advice) -> bytes:
    """Return the page, as a file holds it.

    Args:
        advice: The answer.
    """
    text = document(
        title(advice),
        _introduction(advice),
        [picture(advice)],
        [_methods(advice), how_fitted(advice)],
        "what mimose advise measured",
        _closing(advice),
    )
    return text.encode("utf-8", "replace")


def _introduction(advice: Advice) -> Iterator[str]:
    yield f'<p class="verdict">{escape(short_answer(advice))}</p>'
    n_warnings = len(list(warnings(advice)))
    said = verdict(advice)
    for each in said[:n_warnings]:
        yield f'<p class="note"><strong>{escape(each)}</strong></p>'
    for name in recommended(advice):
        if name == PLAIN:
            continue
        code = "\n".join(recipe(name, advice.budget_bytes))
        yield f"<p>To train with {escape(called(name))}, write</p>"
        yield f"<pre>{escape(code)}</pre>"
    yield from _paragraphs(said[n_warnings:])


def _closing(advice: Advice) -> Iterator[str]:
    yield '<section id="reading">\n<h2>How to read this</h2>'
    yield from _paragraphs(how_to_read(advice))
    yield "</section>"


def _paragraphs(said: Sequence[str]) -> Iterator[str]:
    yield from (f"<p>{escape(each)}</p>" for each in said)


def _methods(advice: Advice) -> Table:
    """Put all methods into a table that can be sorted by numbers."""
    return Table(
        "methods",
        "All methods",
        "Your batch takes: seconds of a step with the batch that was asked about. "
        "Best batch: the one of the most samples a second. × plain: that throughput "
        "as a multiple of plain training's best, and between what numbers it lies. "
        "– is not known; ~ is estimated from smaller batches.",
        (*COLUMNS, _WHAT),
        [
            (*_cells(advice, row), (each.what, each.what))
            for row, each in zip(rows(advice), advice.methods, strict=True)
        ],
    )


def _cells(advice: Advice, row: Sequence[str]) -> Iterator[Cell]:
    """Yield cells with what each is sorted by."""
    method = advice.of(row[0])
    largest = math.inf if method.largest_batch is None else method.largest_batch
    low = method.interval[0] if method.interval else math.nan
    numbers = {
        "largest batch": -1.0 if method.why_not else float(largest),
        "longest input": float(method.longest or -1),
        "your batch takes": method.sample_seconds,
        "best batch": method.best_batch,
        "samples/s": method.samples_per_second,
        "× plain": method.ratio,
        "between": low,
    }
    for name, text in zip(COLUMNS, row, strict=True):
        yield text, _sortable(numbers[name]) if name in numbers else text


def _sortable(number: float) -> float:
    """Return a number that a browser can sort by."""
    if math.isnan(number):
        return -1.0
    return min(number, 1e300)
