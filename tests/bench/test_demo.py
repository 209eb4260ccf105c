"""``mimose demo``: a table, a picture, rows, and JSON as the last line."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mimose.bench.corpus import EncodedCorpus
from mimose.bench.demo import demo
from mimose.bench.experiment import ExperimentSettings
from mimose.bench.rows import read_rows
from mimose.usage import UsageError

for needed in ("matplotlib", "rich", "tokenizers", "transformers"):
    pytest.importorskip(needed)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Make Ctrl-C interrupt, also where the shell started pytest with it ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(autouse=True)
def _no_corpus(monkeypatch: pytest.MonkeyPatch, toy_corpus: EncodedCorpus) -> None:
    """Spare the seconds that reading the standard library takes."""
    monkeypatch.setattr("mimose.bench.demo.load_corpus", lambda: None)
    monkeypatch.setattr("mimose.bench.demo.encode_corpus", lambda *_: toy_corpus)


def _last_line(text: str) -> Any:
    return json.loads(text.splitlines()[-1])


def test_leaves_rows_picture_and_summary(
    launch: Any,
    settings: ExperimentSettings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The last line is JSON that names the files, and the files hold the result."""
    status = demo(settings, tmp_path, launch)

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
    assert json.loads(files["summary"].read_text(encoding="utf-8")) == document
    assert len(read_rows(files["rows"])) == 2 + 16 + 5
    assert files["picture"].stat().st_size > 10_000


def test_table_fits_a_terminal(
    launch: Any,
    settings: ExperimentSettings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing in the table is cut off at 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")

    demo(settings, tmp_path, launch)

    out = capsys.readouterr().out
    table = out[: out.index("Budget:")]
    assert "…" not in table
    for name in ("none", "full", "static", "mimose"):
        assert name in table


def test_says_what_the_hard_limit_did(
    launch: Any,
    settings: ExperimentSettings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Plain training's death and mimose's survival are told in words."""
    demo(settings, tmp_path, launch)

    out = capsys.readouterr().out
    assert (
        "Hard limit: none failed at step 2 of 4: can't allocate memory" in out
        and "Hard limit: mimose finished 4 of 4 steps." in out
    )


@pytest.mark.parametrize("run", ["probe", "compare", "limit"])
def test_ctrl_c_leaves_a_partial_result(
    launch: Any,
    settings: ExperimentSettings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    run: str,
) -> None:
    """Wherever it comes, what was measured is shown and the last line is JSON."""

    def interrupt(runner: Any) -> None:
        if runner.task.run == run and len(runner.advanced) == 1:
            signal.raise_signal(signal.SIGINT)

    launch.on_advance = interrupt

    status = demo(settings, tmp_path, launch)

    out = capsys.readouterr().out
    document = _last_line(out)
    rows = read_rows(tmp_path / "rows.csv")
    assert status == 130
    assert "Cut short" in out
    assert not document["is_complete"]
    assert len(rows) == {"probe": 1, "compare": 2 + 4, "limit": 2 + 16 + 1}[run]
    assert ("picture" in document["files"]) == (run != "probe")
    assert all(runner.is_closed for runner in launch.runners)


def test_an_unexpected_failure_is_an_error(
    launch: Any,
    settings: ExperimentSettings,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Only plain training under the hard limit may fail."""
    from mimose.bench.process import StrategyFailedError

    def fail(runner: Any) -> None:
        if (runner.task.run, runner.task.strategy) == ("limit", "mimose"):
            msg = "no more memory"
            raise StrategyFailedError(msg)

    launch.on_advance = fail

    status = demo(settings, tmp_path, launch)

    assert status == 1
    assert "mimose failed at step 1 of 4: no more memory" in capsys.readouterr().out


def test_missing_packages_are_named(
    settings: ExperimentSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names what is missing and the extra that brings it."""
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)

    with pytest.raises(
        UsageError, match=r"matplotlib, .* are missing: pip install 'mimose\[bench\]'"
    ):
        demo(settings, tmp_path)


def test_a_folder_that_cannot_be_made(
    settings: ExperimentSettings, tmp_path: Path
) -> None:
    """It is told before anything is measured."""
    (tmp_path / "file").write_text("")

    with pytest.raises(UsageError, match=r"--out .*file/here: it cannot be a folder"):
        demo(settings, tmp_path / "file" / "here")
