"""The answer for somebody who reads: paragraphs and a table, at any width."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from mimose.bench.advise import answers, coming, conditions, effects
from mimose.bench.advise.advice import Advice
from mimose.bench.advise.methods import PLAIN
from mimose.bench.advise.phrases import called
from mimose.bench.advise.recipe import recipe, recommended
from mimose.bench.advise.short import short_answer
from mimose.bench.advise.table import COLUMNS, FEWER, Row, rows
from mimose.budget import format_bytes
from mimose.report.columns import named, wrapped
from mimose.report.columns import table as aligned

Paragraph = Callable[[Advice], Iterator[str]]
"""Yields what there is to say, a paragraph each; nothing where there is nothing."""

PARAGRAPHS: Sequence[Paragraph] = (
    conditions.warnings,
    coming.at_your_lengths,
    answers.at_your_batch,
    answers.without_a_plan,
    answers.at_any_batch,
    effects.accumulation,
    answers.at_other_memory,
    effects.batches,
    effects.lengths,
    effects.speeds,
    effects.lossy,
    effects.without_verdict,
    conditions.left_out,
    conditions.conditions,
)
"""In the order in which they are read."""


def verdict(advice: Advice) -> list[str]:
    """Say what the answer is, a paragraph each, in words that need no paper.

    Args:
        advice: The answer.
    """
    return [said for paragraph in PARAGRAPHS for said in paragraph(advice)]


def table(advice: Advice) -> list[Row]:
    """Return the table of all methods, the names of the columns first.

    Args:
        advice: The answer.
    """
    return [COLUMNS, *rows(advice)]


def title(advice: Advice) -> str:
    """Say in a line what was asked."""
    return (
        f"Should {advice.measurements.model} be trained with a memory-saving method, "
        f"in {format_bytes(advice.budget_bytes)}?"
    )


def _to_write(advice: Advice) -> list[str]:
    """Return the methods to choose from; for plain training nothing is to write."""
    return [name for name in recommended(advice) if name != PLAIN]


def code(advice: Advice, width: int) -> list[str]:
    """Write what to write to train as is recommended.

    Args:
        advice: The answer.
        width: Columns; code that is longer stays as it is, to be copied.
    """
    lines = []
    for name in _to_write(advice):
        lines += wrapped(f"To train with {called(name)}, write", width)
        lines += [f"  {line}".rstrip() for line in recipe(name, advice.budget_bytes)]
    return lines


def text(advice: Advice, width: int) -> str:
    """Write the answer for a terminal.

    Args:
        advice: The answer.
        width: Columns of the terminal.
    """
    methods = [(each.name, each.what) for each in advice.methods]
    parts = [
        wrapped(title(advice), width),
        wrapped(short_answer(advice), width),
        *(wrapped(said, width) for said in verdict(advice)),
        *([code(advice, width)] if _to_write(advice) else []),
        [
            *wrapped("All methods (– is not known, ~ is estimated)", width),
            *aligned(table(advice), width, fewer=FEWER),
        ],
        [*wrapped("What each does", width), *named(methods, width)],
    ]
    return "\n\n".join("\n".join(part) for part in parts)
