"""The demonstration's workload: padded to the longest, of any length, and it learns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from mimose.bench.corpus import EncodedCorpus
from mimose.bench.grid.workloads import Docstrings, collate


@pytest.fixture
def docstrings(toy_corpus: EncodedCorpus) -> Docstrings:
    """Models and batches of the toy corpus."""
    return Docstrings(toy_corpus)


def _batch(
    docstrings: Docstrings, length: int, seed: int = 0
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return docstrings.batch({"length": length}, "tiny", generator)


def test_batches_are_padded_to_their_longest(toy_corpus: EncodedCorpus) -> None:
    """The mask marks text, and padding is the padding token."""
    batch = collate(toy_corpus.train[:7])

    assert batch["input_ids"].shape == (7, 5)
    assert batch["attention_mask"].sum(dim=1).tolist() == [3, 3, 3, 4, 4, 4, 5]
    assert set(batch["input_ids"][batch["attention_mask"] == 0].tolist()) == {0}


@pytest.mark.parametrize("length", [2, 3, 11, 20])
def test_a_batch_of_any_length(docstrings: Docstrings, length: int) -> None:
    """Its longest member has it, also where every text has to be cut to it."""
    batch = _batch(docstrings, length)

    assert batch["input_ids"].shape == (16, length)
    assert batch["attention_mask"].sum(dim=1).max() == length


def test_no_text_is_as_long(docstrings: Docstrings) -> None:
    """The error says how long the longest is."""
    with pytest.raises(ValueError, match="no text has 21 tokens; the longest has 20"):
        _batch(docstrings, 21)


def test_batches_are_settled_by_the_seed(docstrings: Docstrings) -> None:
    """Every strategy sees the same batches; lengths are those of the texts."""
    same = [_batch(docstrings, 9)["input_ids"] for _ in range(2)]
    assert torch.equal(*same)
    assert not torch.equal(same[0], _batch(docstrings, 9, seed=1)["input_ids"])
    drawn = [docstrings.trace(np.random.default_rng(0), 30) for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert all(10 <= sizes["length"] <= 20 for sizes in drawn[0])


def test_one_process_makes_the_corpus(
    docstrings: Docstrings, toy_corpus: EncodedCorpus, tmp_path: Path
) -> None:
    """The others read it from the folder that they share."""
    docstrings.prepare(tmp_path)
    other = Docstrings()
    other.prepare(tmp_path)

    assert other.corpus == toy_corpus


def test_padding_does_not_change_a_text(
    docstrings: Docstrings, toy_corpus: EncodedCorpus
) -> None:
    """Logits of a text are the same beside a longer one."""
    model = docstrings.build("tiny").eval()
    alone, together = collate(toy_corpus.train[:1]), collate(toy_corpus.train[::53])

    with torch.no_grad():
        expected, actual = (model(**batch).logits for batch in (alone, together))

    torch.testing.assert_close(actual[:1], expected)


def test_it_learns(docstrings: Docstrings) -> None:
    """A task this simple is solved within a dozen steps."""
    torch.manual_seed(0)
    model = docstrings.build("tiny")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(15):
        model(**_batch(docstrings, 12, step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    assert docstrings.evaluate(model) > 0.9
    assert model.training
