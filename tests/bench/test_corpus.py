"""The corpus of docstrings: complete, deterministic, and held out honestly."""

from __future__ import annotations

from pathlib import Path

import pytest

from mimose.bench.corpus import (
    Corpus,
    Docstring,
    encode_corpus,
    load_corpus,
    read_docstrings,
)

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


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    """The corpus of this interpreter's standard library."""
    return load_corpus()


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


def test_standard_library_is_large_enough(corpus: Corpus) -> None:
    """There are some thousand texts, in 24 classes, about an eighth held out."""
    total = len(corpus.train) + len(corpus.held_out)

    assert len(corpus.labels) == 24
    assert total > 3000
    assert len(corpus.held_out) / total == pytest.approx(1 / 8, abs=0.03)


def test_lengths_have_a_heavy_tail_up_to_the_cap(corpus: Corpus) -> None:
    """Input-aware planning needs lengths that differ by an order of magnitude."""
    encoded = encode_corpus(corpus, max_tokens=512)

    lengths = sorted(len(text.token_ids) for text in encoded.train)
    assert encoded.vocabulary_size == 8192
    assert lengths[len(lengths) // 2] < 40
    assert lengths[int(0.95 * len(lengths))] > 120
    assert lengths[-1] == 512
