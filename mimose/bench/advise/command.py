"""``mimose advise``: measure, answer, and leave files."""

from __future__ import annotations

import json
from pathlib import Path

from mimose.bench.advise.advice import Advice, advise_on
from mimose.bench.advise.measure import measure
from mimose.bench.advise.measured import read
from mimose.bench.advise.page import page
from mimose.bench.advise.progress import Progress
from mimose.bench.advise.settings import Settings
from mimose.bench.advise.told import as_json
from mimose.bench.advise.words import text
from mimose.budget import parse_budget
from mimose.exceptions import BudgetError
from mimose.report.columns import terminal_width
from mimose.usage import UsageError

_INTERRUPTED = 130


def ask(settings: Settings, out: Path, as_json_alone: bool) -> tuple[int, list[str]]:
    """Measure and answer.

    Args:
        settings: The question.
        out: The folder for ``measured.json``, ``advice.json`` and ``advice.html``.
        as_json_alone: Whether the answer is one line of JSON.

    Returns:
        The exit status, and the lines to write.

    Raises:
        UsageError: The model cannot be made or trained.
        OSError: The folder cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    progress = Progress(60.0 * settings.minutes)
    try:
        found = measure(settings, progress)
    finally:
        progress.close()
    found.write(out / "measured.json")
    advice = advise_on(found)
    leave(advice, out)
    status = _INTERRUPTED if found.is_interrupted else 0
    return status, _lines(advice, out, as_json_alone)


def again(
    path: Path, out: Path, budget: str | None, as_json_alone: bool
) -> tuple[int, list[str]]:
    """Answer from the readings of a run that is over.

    Args:
        path: Its ``measured.json``.
        out: The folder for ``advice.json`` and ``advice.html``.
        budget: Another one; None for the one that was measured.
        as_json_alone: Whether the answer is one line of JSON.

    Raises:
        UsageError: The budget is relative to what nobody knows any more, or the file is
            something else.
        OSError: A file cannot be read or written.
    """
    try:
        found = read(path)
        memory_bytes = None if budget is None else parse_budget(budget, None)
    except (BudgetError, ValueError) as error:
        raise UsageError(str(error)) from error
    advice = advise_on(found, memory_bytes)
    leave(advice, out)
    return 0, _lines(advice, out, as_json_alone)


def leave(advice: Advice, out: Path) -> None:
    """Write the page and the answer.

    Args:
        advice: The answer.
        out: The folder, which is made if it is not there.

    Raises:
        OSError: It cannot be written.
    """
    out.mkdir(parents=True, exist_ok=True)
    answer = json.dumps(as_json(advice))
    (out / "advice.json").write_text(f"{answer}\n", encoding="utf-8")
    (out / "advice.html").write_bytes(page(advice))


def _lines(advice: Advice, out: Path, as_json_alone: bool) -> list[str]:
    if as_json_alone:
        return [json.dumps(as_json(advice))]
    files = [f"page: {out / 'advice.html'}", f"answer: {out / 'advice.json'}"]
    return [text(advice, terminal_width()), *files]
