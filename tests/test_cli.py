"""The command line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mimose.cli import main


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help_names_the_demo(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Help is shown, and ends well."""
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 0
    assert "four ways" in capsys.readouterr().out


@pytest.mark.parametrize("steps", ["0", "-3", "many"])
def test_impossible_steps_are_refused(
    steps: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message echoes the value."""
    with pytest.raises(SystemExit) as caught:
        main(["demo", "--steps", steps])

    assert caught.value.code == 2
    assert steps in capsys.readouterr().err


def test_demo_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written on the command line reaches the demonstration."""
    given: list[Any] = []
    monkeypatch.setattr("mimose.demo.demo", lambda *args: given.extend(args) or 7)

    status = main(
        ["demo", "--steps", "5", "--seed", "3", "--threads", "1", "--out", "x"]
    )

    settings, out = given
    assert status == 7
    assert (settings.steps, settings.threads, settings.workload.seed) == (5, 1, 3)
    assert out == Path("x")
