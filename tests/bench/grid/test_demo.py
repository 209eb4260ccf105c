"""``mimose demo``: a table, words, a picture, rows and a summary."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("rich")
pytest.importorskip("tokenizers")
pytest.importorskip("transformers")

from mimose.bench.corpus import OURS, EncodedCorpus
from mimose.bench.grid.demo import SETTINGS, demo
from mimose.bench.grid.runner import INTERRUPTED, GridRow
from mimose.bench.rows import read

LENGTHS = (15, 40, 18, 8)  # 20 is the longest that plain training can take
SMALL = replace(
    SETTINGS, steps=len(LENGTHS), trace=tuple({"length": n} for n in LENGTHS)
)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Make Ctrl-C interrupt, also where the shell started pytest with it ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(autouse=True)
def _no_work(
    monkeypatch: pytest.MonkeyPatch, children: Any, toy_corpus: EncodedCorpus
) -> None:
    """Spare the seconds that reading the standard library takes; nothing fails."""
    monkeypatch.setattr(OURS, "_corpus", toy_corpus)
    monkeypatch.setattr(children, "fails", {})


def _summary(folder: Path) -> Any:
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def test_leaves_rows_picture_and_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Words for people, within 80 columns; the files hold the result."""
    monkeypatch.setenv("COLUMNS", "80")
    assert demo(SMALL, tmp_path) == 0

    out, log = capsys.readouterr()
    assert len(log.splitlines()) <= 11
    assert "22 of 22 steps, about 0:00:00 left" in log  # plain training ran 2 of 4
    document = _summary(tmp_path)
    files = {name: Path(path) for name, path in document["files"].items()}
    assert document["is_complete"]
    assert [s["strategy"] for s in document["strategies"]] == list(SMALL.strategies)
    assert {s["accuracy"] for s in document["strategies"]} == {0.25}
    assert document["limit"] == {"none": 1, "mimose": 4}
    assert len(read(files["rows"], GridRow)) == 16 + 2 + 4
    assert files["picture"].stat().st_size > 10_000
    assert "…" not in out[: out.index("Budget:")]
    assert "{" not in out


@pytest.mark.parametrize("run", ["probe", "limit"])
def test_ctrl_c_leaves_a_partial_result(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    children: Any,
    run: str,
) -> None:
    """Wherever it comes, what was measured is shown."""
    command = "probe" if run == "probe" else "step"
    plain = getattr(children, command)

    def interrupt(self: Any, **arguments: Any) -> Any:
        is_limited = self.first["is_limited"] and self.name == "mimose"
        if run == "probe" or (
            arguments["index"] == 1 and is_limited == (run == "limit")
        ):
            signal.raise_signal(signal.SIGINT)
        return plain(self, **arguments)

    monkeypatch.setattr(children, command, interrupt)

    assert demo(SMALL, tmp_path) == 130

    document = _summary(tmp_path)
    rows = [r for r in read(tmp_path / "rows.csv", GridRow) if r.problem != INTERRUPTED]
    assert "Cut short" in capsys.readouterr().out
    assert not document["is_complete"]
    assert len(rows) == {"probe": 0, "limit": 16 + 2 + 1}[run]
    assert ("picture" in document["files"]) == (run == "limit")
    assert all(child.is_closed for child in children.made)
