"""The programs under docs/examples run, plan, and stay within their budgets."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "docs" / "examples"
_NAMES = sorted(path.stem for path in EXAMPLES.glob("*.py"))
_MOST_LINES = 60

pytestmark = pytest.mark.skipif(not _NAMES, reason="runs in a checkout")


def _needs(code: str) -> None:
    for name in ("transformers", "accelerate", "tokenizers"):
        if f"from {name} " in code or (name == "tokenizers" and "corpus" in code):
            pytest.importorskip(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", _NAMES)
def test_example_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Steps are recorded, some of them planned, and none is over the budget."""
    path = EXAMPLES / f"{name}.py"
    _needs(path.read_text(encoding="utf-8"))

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
