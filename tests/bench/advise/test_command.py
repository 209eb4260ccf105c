"""The question as a user asks it, on the simulated accelerator."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from torch import nn

import mimose
from mimose.bench.advise import command, measure
from mimose.cli.main import main
from mimose.exceptions import AdviceError

pytestmark = pytest.mark.timeout(600)  # processes that import torch, on any machine
FIXTURES = str(Path(__file__).parents[2] / "fixtures")
MODEL = ["--model", "advise_toys:blocks"]


@pytest.fixture(scope="module")
def asked(tmp_path_factory):
    """Return the folder of one question about a small model."""
    out = tmp_path_factory.mktemp("advise")
    with pytest.MonkeyPatch.context() as patch:
        known = os.environ.get("PYTHONPATH", "")
        patch.setenv("PYTHONPATH", os.pathsep.join([FIXTURES, known]))
        patch.setattr(measure, "MOST_ROUNDS", 2)  # the time is no test's to bound
        options = ["--budget", "+10MiB", "--device", "sim", "--threads", "1"]
        options += ["--methods", "mimose", "--minutes", "20"]
        assert main(["advise", *MODEL, *options, "--out", str(out)]) == 0
    return out


def test_each_method_is_measured(asked):
    """Bytes grow with the batch, less when recomputed; each was timed in two rounds."""
    found = measure.read(asked / "measured.json")
    assert 16 == found.batch
    slopes = {}
    for each in found.methods:
        assert "" == each.why_not
        first, *_, last = each.steps
        grown = last.peak_bytes - first.peak_bytes
        slopes[each.method] = grown / (last.batch - first.batch)
        assert all(2 == len(step.rounds) for step in each.timed)
        assert each.timed
    assert slopes["mimose"] < 0.6 * slopes["plain"]


def test_files_are_left_and_answer_again(asked, capsys):
    """More memory holds a larger batch."""
    answer = json.loads((asked / "advice.json").read_text("utf-8"))
    assert answer["methods"][0]["fits"] is False
    measured = str(asked / "measured.json")
    assert main(["advise", "--show", measured, "--budget", "1GiB", "--json"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert "no" == again["answer"]
    assert again["budget_bytes"] == 2**30
    assert again["methods"][0]["largest_batch"] > answer["methods"][0]["largest_batch"]


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "give --model, the model to train, and --budget, its memory"),
        (["--model", "x:y"], "and --budget"),
        ([*MODEL, "--budget", "1GiB", "--methods", "ful"], "did you mean full"),
        (["--show", "nothing.json"], "cannot read"),
    ],
)
def test_what_cannot_be_asked(arguments, why, capsys):
    """It is one line and the status 2."""
    assert main(["advise", *arguments]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize(("name", "why"), [("frozen", "no parameter that is trained")])
def test_what_cannot_be_trained(toys, name, why):
    """The child process says why."""
    with pytest.raises(AdviceError, match=why):
        mimose.advise(f"{toys.__name__}:{name}", budget="+1GiB", progress=False)


def test_a_model_needs_a_sample():
    """One or the other makes it."""
    with pytest.raises(AdviceError, match="give a sample"):
        mimose.advise(nn.Linear(2, 2))
    with pytest.raises(AdviceError, match="leave sample out"):
        mimose.advise("a:b", 1)


def test_ctrl_c_before_anything_is_no_answer(monkeypatch, tmp_path, capsys):
    """It ends with the status of an interrupted command."""

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "measure", interrupted)
    arguments = [*MODEL, "--budget", "1GiB", "--out", str(tmp_path)]
    assert main(["advise", *arguments]) == 130
    assert "" == capsys.readouterr().out
