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
    train_tokenizer,
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


def test_executes_nothing(library: Path) -> None:
    """Sources are parsed: what they would do when imported does not happen."""
    witness = library / "witness"
    source = f'"""Harmful."""\nopen({str(witness)!r}, "w")\n'
    (library / "harmful.py").write_text(source, encoding="utf-8")

    found = read_docstrings(library)

    assert Docstring("Harmful.", "harmful") in found
    assert not witness.exists()


def test_keeps_the_most_frequent_labels(library: Path) -> None:
    """Texts of other packages are dropped."""
    small = load_corpus(n_labels=1, root=library)

    assert small.labels == ("beta",)
    assert {text.package for text in small.train + small.held_out} == {"beta"}


def test_standard_library_is_large_enough(corpus: Corpus) -> None:
    """There are some thousand texts, in 24 classes, about an eighth held out."""
    total = len(corpus.train) + len(corpus.held_out)

    assert len(corpus.labels) == 24
    assert total > 3000
    assert len(corpus.held_out) / total == pytest.approx(1 / 8, abs=0.03)


def test_nothing_held_out_is_trained_on(corpus: Corpus) -> None:
    """No text is on both sides of the split, and each label is on both."""
    train = {text.text for text in corpus.train}

    assert train.isdisjoint(text.text for text in corpus.held_out)
    for texts in (corpus.train, corpus.held_out):
        assert {text.package for text in texts} == set(corpus.labels)


def test_tokenizer_marks_both_ends_and_knows_every_byte() -> None:
    """A text it has never seen comes back whole."""
    tokenizer = train_tokenizer(["some words", "some more words"], 300)

    encoding = tokenizer.encode("naïve → 世界")

    assert encoding.tokens[0] == "[CLS]"
    assert encoding.tokens[-1] == "[SEP]"
    assert "[UNK]" not in encoding.tokens


def test_lengths_have_a_heavy_tail_up_to_the_cap(corpus: Corpus) -> None:
    """Input-aware planning needs lengths that differ by an order of magnitude."""
    encoded = encode_corpus(corpus, max_tokens=512)

    lengths = sorted(len(text.token_ids) for text in encoded.train)
    assert encoded.vocabulary_size == 8192
    assert lengths[len(lengths) // 2] < 40
    assert lengths[int(0.95 * len(lengths))] > 120
    assert lengths[-1] == 512
