"""The training task: deterministic, padded to the longest, and it learns."""

from __future__ import annotations

import torch

from mimose.bench.corpus import EncodedCorpus
from mimose.bench.tasks import Workload
from mimose.bench.workloads import (
    collate,
    evaluate,
    iterate_batches,
    make_model,
    make_optimizer,
)

SMALL = Workload(layers=2, hidden_size=16, max_tokens=24, batch_size=4, dropout=0.1)


def test_batches_are_padded_to_their_longest(toy_corpus: EncodedCorpus) -> None:
    """The mask marks text, and padding is the padding token."""
    batch = collate(toy_corpus.train[:7])

    assert (batch.size, batch.length) == (7, 5)
    assert batch.attention_mask.sum(dim=1).tolist() == [3, 3, 3, 4, 4, 4, 5]
    assert set(batch.input_ids[batch.attention_mask == 0].tolist()) == {0}


def test_batches_are_settled_by_the_seed(toy_corpus: EncodedCorpus) -> None:
    """Every strategy sees the same batches in the same order."""

    def ids(seed: int) -> list[list[list[int]]]:
        workload = Workload(batch_size=4, seed=seed)
        return [b.input_ids.tolist() for b in iterate_batches(workload, toy_corpus, 30)]

    assert ids(0) == ids(0)
    assert ids(0) != ids(1)


def test_an_epoch_repeats_no_text(toy_corpus: EncodedCorpus) -> None:
    """Batches are full, and no text comes twice before all have come."""
    batches = iterate_batches(SMALL, toy_corpus, len(toy_corpus.train) // 4)

    lengths = [n for b in batches for n in b.attention_mask.sum(dim=1).tolist()]
    labels_and_lengths = sorted(lengths)
    assert len(lengths) == len(toy_corpus.train) // 4 * 4
    assert all(labels_and_lengths.count(n) <= 3 for n in set(lengths))


def test_model_is_settled_by_the_seed_alone(toy_corpus: EncodedCorpus) -> None:
    """Weights do not depend on the caller's random state, nor change it."""
    state = torch.get_rng_state()
    first = make_model(SMALL, toy_corpus)
    assert torch.equal(torch.get_rng_state(), state)

    torch.rand(1)
    second = make_model(SMALL, toy_corpus)

    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_padding_does_not_change_a_text(toy_corpus: EncodedCorpus) -> None:
    """Logits of a text are the same beside a longer one."""
    model = make_model(SMALL, toy_corpus).eval()
    alone, together = collate(toy_corpus.train[:1]), collate(toy_corpus.train[::53])

    with torch.no_grad():
        expected, _ = model(alone.input_ids, alone.attention_mask)
        actual, _ = model(together.input_ids, together.attention_mask)

    torch.testing.assert_close(actual[:1], expected)


def test_learning_rate_rises_then_falls(toy_corpus: EncodedCorpus) -> None:
    """The warm-up is linear, and so is the way to zero."""
    workload = Workload(learning_rate=1.0, warm_up_steps=2)
    optimizer, schedule = make_optimizer(workload, torch.nn.Linear(1, 1), 4)

    rates = []
    for _ in range(4):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()

    assert rates == [0.5, 0.75, 0.5, 0.25]


def test_it_learns(toy_corpus: EncodedCorpus) -> None:
    """A task this simple is solved within some dozen steps."""
    workload = Workload(
        layers=2, hidden_size=16, max_tokens=24, batch_size=8, learning_rate=1e-2
    )
    model = make_model(workload, toy_corpus)
    optimizer, schedule = make_optimizer(workload, model, 40)
    torch.manual_seed(0)
    for batch in iterate_batches(workload, toy_corpus, 40):
        _, loss = model(**batch.as_inputs())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    assert evaluate(model, toy_corpus) > 0.9
    assert model.training
