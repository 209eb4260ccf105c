"""The command line."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mimose.cli.main import main
from mimose.records import Records, StepRecord

_Output = pytest.CaptureFixture[str]
_COMMANDS = ("demo", "advise", "bench", "report")


def _write_run(path: Path, *peaks: int | None) -> Path:
    """Write the records of a run with such peaks, of a budget of 1000."""
    records = Records(path)
    for step, peak in enumerate(peaks):
        sizes, actions = {"ids.1": 10 + step}, ("keep", "recompute")
        done = (step, sizes, "plan", actions, 1000, 100, 500.0, peak)
        records.close(StepRecord(*done, events=("a#0", "b#0"), seconds=0.5))
    records.close_file()
    return path


def _expect_usage_error(error: str, capsys: _Output, *arguments: str | Path) -> None:
    """Expect exit status 2, with one line that says this, and nothing else."""
    assert main([str(argument) for argument in arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"mimose {arguments[0]}: ")
    assert 1 == shown.err.count("\n")
    assert re.search(error, shown.err)


@pytest.mark.parametrize("command", ["", *_COMMANDS])
def test_help_has_examples_and_exit_statuses(command: str, capsys: _Output) -> None:
    """Each help shows lines to copy, tells what the statuses mean, and fits."""
    with pytest.raises(SystemExit, match="0"):
        main([*command.split(), "--help"])

    shown = capsys.readouterr().out
    assert f"\n  mimose {command}" in shown
    assert re.search(r"\nexit status:\n  0  ", shown, re.IGNORECASE)
    assert max(map(len, shown.splitlines())) <= 88


@pytest.mark.parametrize(
    ("command", "option", "text"),
    [
        ("bench", "--steps", "-1"),
        ("demo", "--threads", ""),
        ("bench", "--budgets", "nan"),
    ],
)
def test_options_are_refused_in_plain_words(
    command: str, option: str, text: str, capsys: _Output
) -> None:
    """The last line says what the option has to be, and names no function of ours."""
    with pytest.raises(SystemExit, match="2"):
        main([command, f"{option}={text}"])

    error = capsys.readouterr().err.splitlines()[-1]
    assert f"mimose {command}: error: argument {option}: must be " in error
    assert repr(text) in error


# ------------------------------------------------------------------ report


@pytest.mark.parametrize(("peaks", "status"), [([400, 900, None], 0), ([400, 1001], 1)])
def test_report_leaves_a_page_and_numbers(
    peaks: list[int | None], status: int, tmp_path: Path, capsys: _Output
) -> None:
    """It ends with words; JSON is in a file, and alone on the terminal if asked for."""
    path = _write_run(tmp_path / "a [red] run.jsonl", *peaks)
    page, numbers = (path.with_suffix(s) for s in (".html", ".numbers.json"))

    assert main(["report", str(path)]) == status
    lines = capsys.readouterr().out.splitlines()
    assert [f"page: {page}", f"numbers: {numbers}"] == lines[-2:]
    said = json.loads(numbers.read_text(encoding="utf-8"))
    assert len(peaks) == said["steps"]
    assert said["steps_over"] == status
    assert main(["report", str(path), "--json"]) == status
    assert said == json.loads(capsys.readouterr().out)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("nowhere.jsonl", None, "cannot read .*nowhere.jsonl: No such file"),
        ("empty.jsonl", b"", "empty.jsonl has no record"),
        ("other.jsonl", b"{}\n", "other.jsonl, line 1: not a step's record"),
    ],
)
def test_records_that_cannot_be_read(
    name: str, content: bytes | None, error: str, tmp_path: Path, capsys: _Output
) -> None:
    """One line says what is wrong, and nothing is written."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    error = error.replace("cannot read", "cannot read or write")
    _expect_usage_error(error, capsys, "report", path)
    assert [] == list(tmp_path.glob("*.html"))


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    """Nor a package that an extra installs: it can be looked at on a small machine."""
    path = _write_run(tmp_path / "run.jsonl", 400)
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys(['rich', 'matplotlib']))\n"
        f"from mimose.cli.main import main\nmain(['report', {str(path)!r}])\n"
        f"sys.exit('torch' in sys.modules)"
    )
    assert 0 == subprocess.run([sys.executable, "-c", code], check=False).returncode


def test_a_reader_may_leave(tmp_path: Path) -> None:
    """As ``head`` does: no complaint, and the status of a program that it ended."""
    path = _write_run(tmp_path / "run.jsonl", 400, 1001)
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "mimose", "report", str(path)],
        check=False,
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(writer)
    assert (141, "") == (done.returncode, done.stderr)
    assert (tmp_path / "run.html").is_file()


# ------------------------------------------------------------------ demo and bench

needs_bench = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("filelock", "matplotlib", "rich", "tokenizers", "transformers")
    ),
    reason="needs mimose[bench]",
)


@needs_bench
def test_demo_gets_its_options_and_may_print_json_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: _Output
) -> None:
    """What it leaves is printed in place of what it says, never what was there."""
    given: list[Any] = []

    def demo(settings: Any, out: Path) -> int:
        given.append(settings)
        print("words")  # noqa: T201
        if settings.steps == 5:
            (out / "summary.json").write_text('{"a": 1}\n')
        return 7

    monkeypatch.setattr("mimose.bench.grid.demo.demo", demo)
    arguments = ["demo", "--seed", "3", "--threads", "1", "--out", str(tmp_path)]
    assert main([*arguments, "--steps", "5"]) == 7
    assert "words\n" == capsys.readouterr().out
    assert [(5, 1, 3)] == [(each.steps, each.threads, each.seed) for each in given]
    for steps, said in (("5", '{"a": 1}\n'), ("6", "")):
        assert main([*arguments, "--json", "--steps", steps]) == 7
        assert said == capsys.readouterr().out


@needs_bench
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ("--workloads nothing", "no workload is called 'nothing'"),
        ("--strategies magic", "no strategy is called magic; choose from"),
        ("--lengths mine.csv", "has columns ['width'], and no"),
        ("--device abacus", "torch knows no such device"),
    ],
)
def test_bench_says_what_it_cannot_do(
    options: str,
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: _Output,
) -> None:
    """In one line, with exit status 2; nothing is written."""
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("width\n3\n")
    _expect_usage_error(re.escape(complaint), capsys, "bench", *options.split())
    assert not Path("runs").exists()
