"""The corpus of docstrings: complete, deterministic, and held out honestly."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimose.bench.corpus import Docstring, read_docstrings

_SOURCES = {
    "alpha.py": '"""Alpha itself."""\n\ndef one():\n    """First."""\n',
    "alpha_twin.py": '"""Alpha itself."""\n',
    "beta/__init__.py": (
        '"""Beta."""\n\nclass Two:\n    """Second.\n\n    Deep.\n    """\n'
        '    def three(self):\n        """Third."""\n'
    ),
    "beta/inner/deep.py": "async def four():\n    '''Fourth.'''\n\ndef bare(): ...\n",
    "beta/test/test_beta.py": '"""Left out: a test."""\n',
    "idlelib/tool.py": '"""Left out: a tool."""\n',
    "broken.py": '"""Left out: no Python."""\nprint "2"\n',
}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small library on disk."""
    for name, source in _SOURCES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source, encoding="utf-8")
    return tmp_path


def test_reads_modules_classes_and_functions(library: Path) -> None:
    """Every docstring is found, with the top-level name it stands under."""
    assert read_docstrings(library) == (
        Docstring("Alpha itself.", "alpha"),
        Docstring("First.", "alpha"),
        Docstring("Beta.", "beta"),
        Docstring("Second.\n\nDeep.", "beta"),
        Docstring("Third.", "beta"),
        Docstring("Fourth.", "beta"),
    )
