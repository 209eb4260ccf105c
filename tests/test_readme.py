"""What the README names is there; its links and code are tested with the docs'."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

README = Path(__file__).resolve().parent.parent / "README.md"

pytestmark = pytest.mark.skipif(not README.exists(), reason="runs in a checkout")


@pytest.fixture
def text() -> str:
    """The README."""
    return README.read_text(encoding="utf-8")


def test_tree_names_what_is_there(text: str) -> None:
    """Every file and folder of the tree exists."""
    tree = text.partition("## Where things are")[2].split("```")[1]

    root = README.parent
    folder = root
    for line in tree.strip().splitlines():
        names = re.findall(r"[^\s,]+", re.split(r"\s{2,}(?=\S)", line.strip())[0])
        base = folder if line.startswith(" ") else root
        assert [name for name in names if not (base / name).exists()] == []
        if not line.startswith(" "):
            folder = root / names[0]


@pytest.mark.parametrize("script", ["demo", "test"])
def test_scripts_it_names_can_be_run(text: str, script: str) -> None:
    """The two commands are there, and executable."""
    path = README.parent / "scripts" / script

    assert f"scripts/{script}" in text
    assert path.stat().st_mode & 0o111
