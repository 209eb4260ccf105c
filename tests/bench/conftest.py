"""A corpus without the seconds that reading the standard library takes."""

from __future__ import annotations

import pytest

from mimose.bench.corpus import EncodedCorpus, EncodedText


@pytest.fixture
def toy_corpus() -> EncodedCorpus:
    """Texts of 3 to 20 tokens whose class is the token they are made of."""
    texts = [
        EncodedText((4 + label,) * (3 + size), label)
        for size in range(18)
        for label in range(3)
    ]
    return EncodedCorpus(("a", "b", "c"), 16, tuple(texts), tuple(texts[::5]))
