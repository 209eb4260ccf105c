"""What the README names is there; its links and code are tested with the docs'."""

from __future__ import annotations

from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="runs in a checkout")


@pytest.fixture
def text() -> str:
    """The README."""
    return README.read_text(encoding="utf-8")


@pytest.mark.parametrize("script", ["demo", "test"])
def test_scripts_it_names_can_be_run(text: str, script: str) -> None:
    """The two commands are there, and executable."""
    path = README.parent / "scripts" / script

    assert f"scripts/{script}" in text
    assert path.stat().st_mode & 0o111
