"""The answer as people and scripts read it."""

from __future__ import annotations

import json
import textwrap

import pytest

from mimose.bench.advise.advice import advise_on
from mimose.bench.advise.command import as_json
from mimose.bench.advise.measure import Measured, read
from mimose.bench.advise.methods import METHODS
from mimose.bench.advise.text import recipe, text


@pytest.fixture
def found(line, measurements):
    """Return an answer: full makes a batch fit, and sdpa could not be had."""
    return measurements(
        line("plain", 10, 100, 0.01, 0.1),
        line("full", 2.5, 100, 0.015, 0.1),
        Measured(method="sdpa", why_not="the model's attention is fused already"),
        budget_mib=200,
    )


@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_line_is_as_wide_as_the_terminal(found, width):
    """Text wraps, a table gets narrower; code stays as it is."""
    lines = text(advise_on(found), width).partition("To train with")[0].splitlines()
    assert max(map(len, lines)) <= width


@pytest.mark.parametrize("name", METHODS)
def test_what_is_to_be_written_is_python(name):
    """It compiles, and names the budget where a session keeps one."""
    code = "\n".join(recipe(name, 700 * 2**20))
    compile(textwrap.dedent(code), name, "exec")
    assert ('"700MiB"' in code) == (METHODS[name].options is not None)


def test_json_holds_the_answer_and_no_other_numbers(found):
    """Infinite and unknown numbers are null."""

    def refused(word):
        raise AssertionError(word)

    said = json.loads(json.dumps(as_json(advise_on(found))), parse_constant=refused)
    assert ("yes", ["full"]) == (said["answer"], said["use"])
    assert said["methods"][0]["sample_seconds"] is None
    assert said["code"]["full"][-1].startswith("mimose.attach(")
    assert 10 * 2**20 == pytest.approx(said["fits"]["plain"]["memory"]["slope"])


def test_measurements_are_read_as_they_were_written(found, tmp_path):
    """All of them."""
    path = tmp_path / "measured.json"
    found.write(path)
    assert found == read(path)
    path.write_text('{"methods": []}', "utf-8")
    with pytest.raises(ValueError, match="not written by mimose advise"):
        read(path)
