"""The question as a user asks it, on the simulated accelerator."""

import json
import os
from pathlib import Path

import pytest
from torch import nn

import mimose
from mimose.bench.advise import command, rounds
from mimose.bench.advise.measured import read
from mimose.bench.grid import traces
from mimose.cli import commands
from mimose.cli.main import main
from mimose.exceptions import AdviceError

_SOURCE = "advise_toys:blocks"


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Return the folder of one question about a small model."""
    here = str(Path(__file__).parents[2] / "fixtures")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(
            "PYTHONPATH",
            os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])]),
        )
        patch.setattr(rounds, "MOST_ROUNDS", 2)  # the time is no test's to bound
        return _asked(tmp_path_factory)


def _asked(tmp_path_factory):
    out = tmp_path_factory.mktemp("advise")
    arguments = ["--model", _SOURCE, "--budget", "+10MiB", "--device", "sim"]
    arguments += ["--methods", "full,mimose", "--minutes", "10", "--threads", "1"]
    status = main(["advise", *arguments, "--out", str(out)])
    assert status == 0
    return out


def test_each_method_is_measured(asked):
    """Each method is measured."""
    found = read(asked / "measured.json")
    assert [each.method for each in found.methods] == ["none", "full", "mimose"]
    assert found.batch == 16
    assert found.length == 128
    for each in found.methods:
        assert each.why_not == ""
        assert len(each.weighed) >= 2, each
        assert each.timed, each
        batches = [w for w in each.weighed if w.length is None]
        over = [w for w in batches if w.peak_bytes > found.budget_bytes]
        # Beyond the budget only as many as a curve needs.
        assert not over or len(batches) <= 5
    # One who plans runs only what its least memory fits: an allocator's segment of 20
    # MiB is beyond a budget of this size all the same, and in no prediction.
    least = {f.batch: f.least_bytes for f in each.foretold if f.length is None}
    for run in batches:
        assert least[run.batch] <= found.budget_bytes


def test_bytes_grow_with_the_batch_and_less_when_recomputed(asked):
    """Bytes grow with the batch and less when recomputed."""
    none, full, planned = read(asked / "measured.json").methods
    slopes = []
    for each in (none, full):
        first, last = [w for w in each.weighed if w.length is None][:2]
        slopes.append((last.peak_bytes - first.peak_bytes) / (last.batch - first.batch))
    assert slopes[1] < 0.6 * slopes[0]
    assert len(planned.foretold) >= 2
    for row in planned.foretold:
        assert row.least_bytes < row.keep_bytes
        assert row.seconds[0] >= row.seconds[-2] >= 0.0


def test_files_are_left_and_answer_again(asked, capsys):
    """Files are left and answer again."""
    answer = json.loads((asked / "advice.json").read_text("utf-8"))
    assert {each["name"] for each in answer["methods"]} == {"none", "full", "mimose"}
    assert (asked / "advice.html").read_bytes().startswith(b"<!doctype html>")
    measured = str(asked / "measured.json")
    assert main(["advise", "--show", measured, "--budget", "1GiB", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["budget_bytes"] == 2**30
    assert again["methods"][0]["largest_batch"] > answer["methods"][0]["largest_batch"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give --model and --budget"),
        (["--model", "x:y"], "give --budget"),
        (
            ["--model", "x:y", "--budget", "1GiB", "--methods", "ful"],
            "did you mean full",
        ),
        (["--show", "nothing.json"], "cannot read"),
    ],
)
def test_what_cannot_be_asked(arguments, why, capsys):
    """What cannot be asked."""
    assert main(["advise", *arguments]) == 2
    assert why in capsys.readouterr().err


def test_methods_are_listed(capsys):
    """Methods are listed."""
    assert main(["advise", "--list"]) == 0
    assert "plain training" in capsys.readouterr().out


def test_a_model_needs_a_sample():
    """A model needs a sample."""
    with pytest.raises(AdviceError, match="give a sample"):
        mimose.advise(nn.Linear(2, 2))
    with pytest.raises(AdviceError, match="leave sample out"):
        mimose.advise("a:b", 1)


@pytest.mark.parametrize("is_json", [False, True])
def test_ctrl_c_before_anything_is_one_line(monkeypatch, tmp_path, capsys, is_json):
    """It ends with the status of an interrupted command, and no answer."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", interrupted)
    arguments = ["--model", "x:y", "--budget", "1GiB", "--out", str(tmp_path)]
    arguments += ["--json"] if is_json else []
    assert main(["advise", *arguments]) == 130
    told = capsys.readouterr()
    assert told.out == ""
    last = told.err.splitlines()[-1]
    assert last == "mimose advise: interrupted before there was an answer"


def test_a_mistake_of_ours_is_no_wrong_usage(monkeypatch, tmp_path):
    """What fails inside is told with its place, for who mends it."""

    def failing(*_):
        msg = "shapes do not match"
        raise ValueError(msg)

    monkeypatch.setattr(command, "measure", failing)
    arguments = ["--model", "x:y", "--budget", "1GiB", "--out", str(tmp_path)]
    with pytest.raises(ValueError, match="shapes do not match"):
        main(["advise", *arguments])


@pytest.mark.parametrize(
    "arguments",
    [
        ["--lengths", "mine.csv"],
        ["--methods", "full"],
        ["--dataset", "mine.txt"],
        ["--minutes", "7"],
    ],
)
def test_what_needs_measuring_is_not_ignored(asked, arguments, capsys):
    """Readings that are there cannot answer it: that is said."""
    measured = str(asked / "measured.json")
    assert main(["advise", "--show", measured, *arguments]) == 2
    assert f"leave out {arguments[0]}, or measure anew" in capsys.readouterr().err


def test_readings_that_are_none_are_told(tmp_path, capsys):
    """A file of something else is the user's to mend."""
    (tmp_path / "m.json").write_text("{}", encoding="utf-8")
    assert main(["advise", "--show", str(tmp_path / "m.json")]) == 2
    assert "was not written by mimose advise" in capsys.readouterr().err


@pytest.mark.usefixtures("toys")
@pytest.mark.parametrize(("given", "n_texts"), [([], 16), (["--texts", "4"], 4)])
def test_texts_are_as_many_as_the_sample_has(monkeypatch, given, n_texts):
    """Unless a number is given: the answer is about batches like the sample."""
    found = {}

    def from_dataset(*_, **options):
        found.update(options)
        return [{"length": 7}]

    monkeypatch.setattr(traces, "from_dataset", from_dataset)
    monkeypatch.setattr(commands, "need", lambda *_: None)
    monkeypatch.setattr(command, "ask", lambda settings, *_: (0, [*settings.lengths]))
    monkeypatch.setattr(commands, "_write", lambda lines: found.update(lines=lines))
    arguments = ["--model", _SOURCE, "--budget", "1GiB", "--dataset", "x.txt", *given]
    assert main(["advise", *arguments]) == 0
    assert found["batch_size"] == n_texts
    assert found["lines"] == [7]
