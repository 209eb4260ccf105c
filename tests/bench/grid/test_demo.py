"""``mimose demo``: a table, a picture, rows, and JSON as the last line."""

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

from mimose.bench.child import RunFailedError
from mimose.bench.corpus import EncodedCorpus
from mimose.bench.grid.demo import SETTINGS, demo
from mimose.bench.grid.runner import INTERRUPTED, GridRow
from mimose.bench.grid.workloads import OURS
from mimose.bench.rows import read
from mimose.usage import UsageError

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


def _last_line(text: str) -> Any:
    return json.loads(text.splitlines()[-1])


def test_leaves_rows_picture_and_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last line is JSON that names the files, and the files hold the result."""
    status = demo(SMALL, tmp_path)

    document = _last_line(capsys.readouterr().out)
    files = {name: Path(path) for name, path in document["files"].items()}
    assert status == 0
    assert document["is_complete"]
    assert [s["strategy"] for s in document["strategies"]] == [
        "none",
        "full",
        "static",
        "mimose",
    ]
    assert [s["strategy"] for s in document["limit"]] == ["none", "mimose"]
    assert {s["accuracy"] for s in document["strategies"]} == {0.25}
    assert json.loads(files["summary"].read_text(encoding="utf-8")) == document
    assert len(read(files["rows"], GridRow)) == 16 + 2 + 4
    assert files["picture"].stat().st_size > 10_000


def test_table_fits_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing in the table is cut off at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    demo(SMALL, tmp_path)

    out = capsys.readouterr().out
    table = out[: out.index("Budget:")]
    assert "…" not in table
    for name in ("none", "full", "static", "mimose"):
        assert name in table


def test_says_what_the_hard_limit_did(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plain training's death and mimose's survival are told in words."""
    demo(SMALL, tmp_path)

    out = capsys.readouterr().out
    assert "Budget: 160 MiB for a step's growth." in out
    assert (
        "Hard limit: none failed at step 2 of 4: can't allocate memory\n" in out
        and "Hard limit: mimose finished 4 of 4 steps." in out
    )


@pytest.mark.parametrize("run", ["probe", "compare", "limit"])
def test_ctrl_c_leaves_a_partial_result(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    children: Any,
    run: str,
) -> None:
    """Wherever it comes, what was measured is shown and the last line is JSON."""
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

    status = demo(SMALL, tmp_path)

    out = capsys.readouterr().out
    document = _last_line(out)
    rows = [r for r in read(tmp_path / "rows.csv", GridRow) if r.problem != INTERRUPTED]
    assert status == 130
    assert "Cut short" in out
    assert not document["is_complete"]
    assert len(rows) == {"probe": 0, "compare": 1, "limit": 16 + 2 + 1}[run]
    assert ("picture" in document["files"]) == (run == "limit")
    assert all(child.is_closed for child in children.made)


@pytest.mark.parametrize("is_limited", [False, True])
def test_an_unexpected_failure_is_an_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    children: Any,
    is_limited: bool,
) -> None:
    """Only plain training under the hard limit may fail."""
    plain = children.step

    def fail(self: Any, index: int) -> Any:
        if (self.name, self.first["is_limited"]) == ("mimose", is_limited):
            msg = "no more memory"
            raise RunFailedError(msg)
        return plain(self, index)

    monkeypatch.setattr(children, "step", fail)

    status = demo(SMALL, tmp_path)

    where = "mimose failed at step 1 of 4" if is_limited else "compare/mimose failed"
    assert status == 1
    assert f"{where}: no more memory" in capsys.readouterr().out


def test_nothing_to_compare_is_an_error(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    children: Any,
) -> None:
    """It is said in one line, and there are no rows."""
    monkeypatch.setattr(children, "plain_growth", 5)

    assert demo(SMALL, tmp_path) == 1

    said = capsys.readouterr()
    assert "mimose demo: there is nothing to plan" in said.err
    assert _last_line(said.out)["strategies"] == []


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    """It is told before anything is measured."""
    (tmp_path / "file").write_text("")

    for out in (tmp_path / "file", tmp_path / "file" / "here"):
        with pytest.raises(UsageError, match=f"--out {out}: it cannot be a folder"):
            demo(SMALL, out)
