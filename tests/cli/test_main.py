"""The command line."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mimose.cli import main as cli
from mimose.cli.main import main
from mimose.records import Records, StepRecord
from mimose.usage import names


def _write_run(path: Path, *peaks: int | None, budget: int = 1000) -> Path:
    """Write the records of a run with such peaks."""
    records = Records(maxlen=1, path=path)
    for step, peak in enumerate(peaks):
        records.close(
            StepRecord(
                step=step,
                shape={"ids.1": 10 + step},
                phase="plan",
                actions=("keep", "recompute"),
                budget_bytes=budget,
                start_bytes=100,
                predicted_peak_bytes=500.0,
                observed_peak_bytes=peak,
                events=("a#0", "b#0"),
                seconds=0.5,
            )
        )
    records.close_file()
    return path


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help_names_the_demo(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Help is shown, and ends well."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 0
    assert "four ways" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [[], ["demo"], ["report"]])
def test_help_has_examples_and_exit_statuses(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Each help shows lines to copy, tells what the statuses mean, and fits."""
    with pytest.raises(SystemExit):
        main([*arguments, "--help"])

    shown = capsys.readouterr().out
    assert "\n  mimose " in shown
    assert "\nexit status:\n  0  " in shown
    assert max(map(len, shown.splitlines())) <= 88


def test_version_is_the_packages_own(capsys: pytest.CaptureFixture[str]) -> None:
    """The version is read from what is installed."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])

    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert f"mimose {importlib.metadata.version('mimose')}\n" == shown


def test_the_module_is_the_command() -> None:
    """``python -m mimose`` does what ``mimose`` does."""
    shown = subprocess.run(
        [sys.executable, "-m", "mimose", "--version"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.startswith("mimose ")


def test_version_of_a_checkout(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where nothing is installed, that is said, and no traceback shown."""

    def not_there(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", not_there)
    with pytest.raises(SystemExit):
        main(["--version"])

    assert "not installed" in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["0", "-3", "many"])
def test_impossible_steps_are_refused(
    steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message echoes the value."""
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--steps", steps])

    assert caught.value.code == 2
    assert steps in capsys.readouterr().err


def _unreadable() -> list[tuple[str, str, str]]:
    """Return all options, of all commands, with text that each has to refuse."""
    [commands] = (
        action.choices
        for action in cli._parser()._actions
        if isinstance(action, argparse._SubParsersAction)
    )
    return [
        (name, action.option_strings[0], text)
        for name, parser in commands.items()
        for action in parser._actions
        if action.option_strings and action.type not in (None, Path)
        for text in ("", ",", *(() if action.type is names else ("-1", "5GiB", "nan")))
    ]


@pytest.mark.parametrize(("command", "option", "text"), _unreadable())
def test_options_are_refused_in_plain_words(
    command: str, option: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The error says what the option has to be; no function of ours is named in it."""
    with pytest.raises(SystemExit, match="2"):
        main([command, f"{option}={text}"])

    [error] = capsys.readouterr().err.splitlines()
    assert f"argument {option}: must be " in error
    assert repr(text) in error


def test_wrong_options_are_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Not behind all options there are."""
    with pytest.raises(SystemExit) as caught:
        main(["bench", "--steps", "0"])

    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert 1 == shown.count("\n")
    assert "mimose bench: argument --steps: must be" in shown
    assert "mimose bench --help" in shown


def test_budgets_of_a_comparison_are_no_bytes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Whoever gives bytes, as to `attach`, is told what the shares mean."""
    with pytest.raises(SystemExit, match="2"):
        main(["bench", "--budgets", "5GiB"])

    assert "no bytes here: near 0 is what the longest" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("package", "command"),
    [
        ("matplotlib", "demo"),
        ("transformers", "demo"),
        ("matplotlib", "bench"),
        ("tokenizers", "bench"),
    ],
)
def test_packages_of_the_bench_that_are_missing(
    package: str,
    command: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """All commands say it alike: one line with what installs it, and exit status 2."""
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == package else name
    )

    assert main([command]) == 2
    expected = f"mimose {command}: {package} is missing: pip install 'mimose[bench]'\n"
    assert expected == capsys.readouterr().err


def test_a_demo_that_has_nowhere_to_write(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 2, as for any folder that cannot be made."""
    pytest.importorskip("tokenizers")
    pytest.importorskip("matplotlib")
    (tmp_path / "file").write_text("")

    assert main(["demo", "--out", str(tmp_path / "file" / "here")]) == 2
    assert "cannot be a folder" in capsys.readouterr().err


def test_demo_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written on the command line reaches the demonstration."""
    given: list[Any] = []
    demo = "mimose.bench.grid.demo.demo"
    monkeypatch.setattr(demo, lambda *args: given.extend(args) or 7)

    status = main(
        ["demo", "--steps", "5", "--seed", "3", "--threads", "1", "--out", "x"]
    )

    settings, out = given
    assert status == 7
    assert (settings.steps, settings.threads, settings.seed) == (5, 1, 3)
    assert out == Path("x")


# ------------------------------------------------------------------ report


def test_report_writes_a_page_and_shows_the_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The page lies beside the records, and its path is the last line."""
    path = _write_run(tmp_path / "a [red] run.jsonl", 400, 900)

    status = main(["report", str(path)])

    page = tmp_path / "a [red] run.html"
    shown = capsys.readouterr().out
    assert status == 0
    assert "<h1>mimose: " in page.read_text(encoding="utf-8")
    assert "All 2 steps stayed within the budget" in shown
    assert "90.0% of the budget" in shown
    assert f"page: {page}" == shown.splitlines()[-1]


def test_report_of_a_folder_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A folder stands for its records.jsonl; the output is one object, no more."""
    _write_run(tmp_path / "records.jsonl", 400, 900, None)
    out = tmp_path / "new" / "page.html"

    status = main(["report", str(tmp_path), "--json", "--out", str(out)])

    said = json.loads(capsys.readouterr().out)
    assert status == 0
    assert (3, 2, 0.9) == (said["steps"], said["steps_read"], said["budget_use"])
    assert {"page": str(out)} == said["files"]
    assert out.is_file()


@pytest.mark.parametrize("form", [[], ["--json"]])
def test_report_of_a_run_that_did_not_hold(
    form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A step over the budget is told by the exit status as well."""
    path = _write_run(tmp_path / "run.jsonl", 400, 1001)

    assert main(["report", str(path), *form]) == 1
    assert (tmp_path / "run.html").is_file()
    assert capsys.readouterr().err == ""


def test_report_of_a_run_without_peaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing is known to have failed, and the first line says what is not known."""
    path = _write_run(tmp_path / "run.jsonl", None)

    assert main(["report", str(path)]) == 0
    assert "No peak could be read" in capsys.readouterr().out.splitlines()[0]


def test_report_for_tensorboard(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The folder gets an event file, and is named at the end."""
    pytest.importorskip("tensorboard", reason="needs mimose[tensorboard]")
    path = _write_run(tmp_path / "run.jsonl", 400)

    main(["report", str(path), "--tensorboard", str(tmp_path / "board")])

    assert f"tensorboard: {tmp_path / 'board'}" in capsys.readouterr().out
    assert any((tmp_path / "board").glob("events.*"))


@pytest.mark.parametrize(
    ("name", "content", "error"),
    [
        ("nowhere.jsonl", None, "cannot read .*nowhere.jsonl: No such file"),
        ("empty.jsonl", b"", "empty.jsonl holds no step"),
        ("cut.jsonl", b'{"step": 0, "sha', "cut.jsonl holds no step"),
        ("other.jsonl", b"{}\n", "other.jsonl, line 1: not a step's record"),
        ("binary.jsonl", b"\xff\xfe\x00", "binary.jsonl: it is no text"),
        ("", None, "holds no records.jsonl: give the file"),
    ],
)
def test_records_that_cannot_be_read(
    name: str,
    content: bytes | None,
    error: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One line says what is wrong, and nothing is written."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)

    assert main(["report", str(path)]) == 2
    _expect_line(error, capsys)
    assert [] == list(tmp_path.glob("*.html"))


@pytest.mark.parametrize(
    ("out", "error"),
    [("run.jsonl", "the file of the records itself"), (".", "cannot write .*: Is a")],
)
def test_pages_that_cannot_be_written(
    out: str, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The records are never written over."""
    path = _write_run(tmp_path / "run.jsonl", 400)
    before = path.read_bytes()

    assert main(["report", str(path), "--out", str(tmp_path / out)]) == 2
    _expect_line(error, capsys)
    assert before == path.read_bytes()


def test_records_that_are_called_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the page's own name is taken, the error says which to give."""
    path = _write_run(tmp_path / "run.html", 400)

    assert main(["report", str(path)]) == 2
    _expect_line("run.html is the file of the records.*--out run-page.html", capsys)


def test_missing_packages(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error is the command that helps."""
    path = _write_run(tmp_path / "run.jsonl", 400)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    assert main(["report", str(path), "--tensorboard", "board"]) == 2
    error = "tensorboard is missing: pip install 'mimose\\[tensorboard\\]'"
    _expect_line(error, capsys)


def _expect_line(error: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Expect this, on one line, and nothing else."""
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("mimose report: ")
    assert 1 == shown.err.count("\n")
    assert re.search(error, shown.err)


def test_a_report_needs_no_torch(tmp_path: Path) -> None:
    """Records of a large machine can be looked at on a small one, and at once.

    Nor does it need a package that an extra installs.
    """
    path = _write_run(tmp_path / "run.jsonl", 400)
    code = (
        f"import sys\nsys.modules.update(dict.fromkeys(['rich', 'plotly', 'pandas']))\n"
        f"from mimose.cli.main import main\nmain(['report', {str(path)!r}])\n"
        f"sys.exit('torch' in sys.modules)"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True
    )

    assert 0 == done.returncode


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_numbers_fit_the_terminal(
    width: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """No line but the page's path is longer, and nothing is lost."""
    path = _write_run(tmp_path / "run.jsonl", *[400, 900] * 600)
    monkeypatch.setenv("COLUMNS", str(width))

    main(["report", str(path)])

    *lines, page = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= width
    told = " ".join(" ".join(lines).split())
    assert "All 1,200 steps stayed within the budget" in told
    assert re.search(r"highest peak:? +0.0 MiB, 90.0% of the budget", told)
    assert page.startswith("page: ")


@pytest.mark.parametrize("form", [[], ["--json"]])
@pytest.mark.parametrize(("peak", "status"), [(400, 0), (1001, 1)])
def test_a_reader_may_leave(
    form: list[str], peak: int, status: int, tmp_path: Path
) -> None:
    """As ``head`` does: no complaint, and the status is of the run all the same."""
    path = _write_run(tmp_path / "run.jsonl", 400, peak)

    done = _run_unread("report", str(path), *form)

    assert (status, "") == (done.returncode, done.stderr)
    assert (tmp_path / "run.html").is_file()


def test_help_may_be_left_unread() -> None:
    """It ends as if it had been read."""
    done = _run_unread("--help")
    assert (0, "") == (done.returncode, done.stderr)


def _run_unread(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command whose output is a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-m", "mimose.cli.main", *arguments],
            check=False,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        os.close(writer)


def test_a_command_cut_short_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was still to be done is not: the status is that of a closed pipe."""

    def cut(options: argparse.Namespace) -> int:
        raise BrokenPipeError

    forgotten: list[bool] = []
    monkeypatch.setattr("mimose.cli.commands.demo", cut)
    monkeypatch.setattr(
        "mimose.cli.commands.forget_output", lambda: forgotten.append(True)
    )
    assert main(["demo"]) == 141
    assert [True] == forgotten


needs_bench = pytest.mark.skipif(
    any(
        importlib.util.find_spec(name) is None
        for name in ("matplotlib", "rich", "tokenizers", "transformers")
    ),
    reason="needs mimose[bench]",
)


@needs_bench
def test_bench_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """Every workload and every strategy, and why some cannot run."""
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out
    for name in ("qa-bert", "tr-t5", "mimose-paper", "oracle", "hf-full"):
        assert name in listed


@needs_bench
@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--workloads", "nothing"], "no workload is called 'nothing'"),
        (["--strategies", "magic"], "no strategy is called magic; choose of"),
        (["--strategies", "mimos"], "is called mimos; did you mean mimose?"),
        (["--model", "nowhere"], "give it as module:function"),
        (["--lengths", "missing.csv"], "missing.csv: No such file"),
        (["--strategies", "none,full"], "none of these heeds a budget"),
        (["--device", "abacus"], "torch knows no such device"),
        (["--show", "missing.csv"], "missing.csv: No such file"),
        (["--dataset", "missing.csv"], "--dataset missing.csv: "),
    ],
)
def test_bench_says_what_it_cannot_do(
    options: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """In one line, with exit status 2."""
    assert main(["bench", *options]) == 2
    assert complaint in capsys.readouterr().err


@needs_bench
@pytest.mark.parametrize(
    ("sizes", "lengths", "is_text"),
    [(("length",), "'length'", True), (("height", "width"), "'height,width'", False)],
)
def test_a_model_of_ones_own_needs_lengths(
    sizes: tuple[str, ...],
    lengths: str,
    is_text: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Nothing runs on lengths that nobody chose; the error says how to give them."""
    from mimose.bench.grid.workloads import workload_named

    (tmp_path / "mine_for_cli.py").write_text(f"def make(): return None, None, {sizes}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "mine_for_cli", raising=False)
    workload_named.cache_clear()

    assert main(["bench", "--model", "mine_for_cli:make", "--out", "out"]) == 2
    error = capsys.readouterr().err
    assert f"--lengths mine.csv, a file with the line {lengths}" in error
    assert is_text == ("--dataset texts.jsonl" in error)
    assert not Path("out").exists()


_OWN_MODEL = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)

    def forward(self, x):
        return x + torch.dropout(torch.tanh(self.linear(x).sin()), 0.1, True)

class Chain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x.square().mean()

def batch(sizes, generator):
    return {"x": torch.randn(256, sizes["length"], 64, generator=generator)}

def make():
    return Chain(), batch, ("length",)
"""


@needs_bench
@pytest.mark.slow
def test_bench_runs_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A small grid leaves all its files; what is done is not done again.

    The model is small and needs nothing, so that its processes start soon.
    """
    (tmp_path / "mine_to_run.py").write_text(_OWN_MODEL)
    lengths = tmp_path / "mine.csv"
    lengths.write_text("length\n40\n24\n32\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))  # for the processes that train
    options = ["bench", "--model", "mine_to_run:make", "--lengths", str(lengths)]
    options += ["--strategies", "full,mimose,hf-full"]
    options += ["--steps", "2", "--warm-up", "1", "--budgets", "0.5"]
    options += ["--threads", "1", "--out", str(tmp_path / "out")]
    assert main(options) == 0
    assert "mimose" in capsys.readouterr().out
    document = json.loads((tmp_path / "out" / "summary.json").read_text())
    cells = {cell["strategy"]: cell for cell in document["cells"]}
    assert set(cells) == {"none", "full", "mimose", "hf-full"}
    assert cells.pop("hf-full")["loss_is_equal"] is None
    assert all(cell["loss_is_equal"] for cell in cells.values())
    assert cells["full"]["recomputed_flops"] > cells["none"]["recomputed_flops"] == 0
    assert all(Path(path).exists() for path in document["files"].values())
    rows = (tmp_path / "out" / "rows.csv").read_text()
    assert main([*options, "--resume"]) == 0
    assert (tmp_path / "out" / "rows.csv").read_text() == rows
    capsys.readouterr()
    assert main([*options, "--resume", "--seed", "1"]) == 2
    assert "was written with seed=0" in capsys.readouterr().err
    sys.modules.pop("mine_to_run")


@needs_bench
def test_given_lengths_choose_the_workloads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of the default that have such sizes; where there are none, it says so."""
    from mimose.bench.grid.runner import sizes_of
    from mimose.bench.grid.workloads import DEFAULT
    from mimose.cli.commands import _by_default, _grid
    from mimose.cli.main import _parser

    def _bench_options(*options: str) -> argparse.Namespace:
        return _parser().parse_args(["bench", *options])

    lengths = tmp_path / "mine.csv"

    def chosen(text: str) -> list[str]:
        lengths.write_text(text)
        return _by_default(argparse.Namespace(lengths=lengths, dataset=None))

    assert chosen("source,target\n3,4\n") == ["tr-t5"]
    assert chosen("length,id\n3,4\n") == [n for n in DEFAULT if n != "tr-t5"]
    lengths.write_text("length,source,target\n30,40,50\n")
    named = _grid(_bench_options("--lengths", str(lengths)))
    assert named.workloads == tuple(DEFAULT)
    assert sizes_of(named, "tr-t5")[0] == {"source": 40, "target": 50}
    assert sizes_of(named, "tc-bert")[0] == {"length": 30}
    lengths.write_text("width\n3\n")
    assert main(["bench", "--lengths", str(lengths)]) == 2
    assert "has columns width: no workload" in capsys.readouterr().err
