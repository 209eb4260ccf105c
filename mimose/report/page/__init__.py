"""One page of a run: figures and tables in a single HTML file, from its records.

The page needs nothing but a browser: its figures are drawn when it is written, and the
page itself forbids the browser to load anything. However many steps there are, it has
some hundred marks a figure and some hundred rows a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from pathlib import Path

from mimose.exceptions import MimoseError
from mimose.records import StepRecord
from mimose.report.page.course import course
from mimose.report.page.document import document, introduction
from mimose.report.page.headline import headline
from mimose.report.page.layers import layers
from mimose.report.page.peaks import peaks, predictions
from mimose.report.page.price import price
from mimose.report.page.steps import Steps
from mimose.report.page.tables import shapes_table, unusual_table

__all__ = ["page", "write_page"]


def write_page(
    records: Sequence[StepRecord],
    path: str | PathLike[str],
    *,
    title: str = "A training run under mimose",
) -> None:
    """Write a page about a run: one HTML file that loads nothing else.

    Args:
        records: The run's records, as `mimose.record_file.read_records` returns
            them; or those of several runs, one after the other.
        path: Where to write.
        title: Stands at the top.

    Raises:
        MimoseError: There are no records.
        OSError: The file cannot be written.
    """
    if not records:
        msg = "there are no steps to write a page about"
        raise MimoseError(msg)
    Path(path).write_bytes(page(Steps(records), title=title))


def page(steps: Steps, *, title: str) -> bytes:
    """Return the page about some steps, as the file holds it.

    What is no character, such as half of a surrogate pair, becomes a question mark.

    Args:
        steps: At least one.
        title: Stands at the top.
    """
    text = document(
        title,
        introduction(headline(steps)),
        [peaks(steps), predictions(steps), layers(steps), price(steps), course(steps)],
        [shapes_table(steps), unusual_table(steps)],
        "the run's records",
    )
    return text.encode("utf-8", "replace")
