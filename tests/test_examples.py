"""The programs under docs/examples run, plan, and stay within their budgets."""

from __future__ import annotations

import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
_NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
_MOST_LINES = 60
_PACKAGES = (
    *("transformers", "accelerate", "tokenizers", "datasets"),
    *("trl", "sentence_transformers"),
)

pytestmark = pytest.mark.skipif(not _NAMES, reason="runs in a checkout")


def _needs(code: str) -> None:
    if "corpus" in code:
        pytest.importorskip("tokenizers")
    for name in _PACKAGES:
        if re.search(rf"^from {name}[. ]", code, re.MULTILINE):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                pytest.importorskip(name, reason=f"needs {name}")


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps are recorded, some of them planned, and none is over the budget."""
    path = EXAMPLES / f"{name}.py"
    code = path.read_text(encoding="utf-8")
    _needs(code)

    with warnings.catch_warnings():
        if "Trainer" in code:  # trainers warn of settings that save time here
            warnings.simplefilter("ignore")
        left: dict[str, Any] = runpy.run_path(str(path))

    session = left["session"]
    summary = session.summary()
    assert summary.steps >= 20
    assert summary.steps_over == 0
    assert summary.phases["plan"] > 0
    planned = [record for record in session.records if record.phase == "plan"]
    assert any("keep" in record.actions for record in planned)
    assert session.report() in capsys.readouterr().out


@pytest.mark.parametrize("name", _NAMES)
def test_example_is_short(name: str) -> None:
    """A page holds it, and its first sentence says what it is."""
    lines = (EXAMPLES / f"{name}.py").read_text(encoding="utf-8").splitlines()

    assert len(lines) <= _MOST_LINES
    assert any(line.startswith('"""') and line.endswith('."""') for line in lines[:2])
