"""FLOPs of many batches, counted on a few."""

import pytest

pytest.importorskip("sympy")

from mimose.bench.grid.flops import count_all

LENGTHS = [{"length": length} for length in (90, 35, 41, 120, 36, 60, 77, 38, 52, 141)]
PAIRS = [{"source": 7 * i % 50 + 17, "target": 11 * i % 43 + 19} for i in range(40)]


def _counter(batches, flops):
    """Return what counts batches by a formula, and the places it was asked for."""
    asked = []

    def count(place):
        asked.append(place)
        return flops(**batches[place])

    return count, asked


def _attention(length):
    return 2**40 * length + 977 * length**2


def _cross_attention(source, target):
    return 3 + 5 * source * source + 2**41 * source * target + 7 * target**2 + target


@pytest.mark.parametrize(
    ("batches", "flops", "n_counted"),
    [(LENGTHS, _attention, 7), (PAIRS, _cross_attention, 11)],
)
def test_a_polynomial_is_counted_on_a_few(batches, flops, n_counted):
    """As many as it has terms, and some that check it: exact, in whole numbers."""
    count, asked = _counter(batches, flops)
    assert count_all(batches, count) == [flops(**each) for each in batches]
    assert len(asked) == len(set(asked)) == n_counted
    largest = max(range(len(batches)), key=lambda i: sum(batches[i].values()))
    assert largest in asked


@pytest.mark.parametrize(
    "flops",
    [
        lambda length: length**3,
        lambda length: -(-length // 64),  # padded to windows
        lambda length: length if length < 100 else 2 * length,
        lambda length: length + (length % 8 == 0),  # another kernel
    ],
)
def test_what_is_no_polynomial_is_counted_each(flops):
    """Nothing is guessed, and nothing counted twice."""
    count, asked = _counter(LENGTHS, flops)
    assert count_all(LENGTHS, count) == [flops(**each) for each in LENGTHS]
    assert sorted(asked) == list(range(len(LENGTHS)))


def test_sizes_on_a_line():
    """Sources as long as targets determine less, and need less."""
    batches = [{"source": size, "target": size} for size in range(10, 40)]
    count, asked = _counter(batches, _cross_attention)
    assert count_all(batches, count) == [_cross_attention(**each) for each in batches]
    assert len(asked) == 7


@pytest.mark.parametrize("n_batches", [1, 2, 5])
def test_few_batches_are_counted_each(n_batches):
    """There is nothing to save."""
    count, asked = _counter(LENGTHS, _attention)
    batches = LENGTHS[:n_batches]
    assert count_all(batches, count) == [_attention(**each) for each in batches]
    assert len(asked) == n_batches


def test_a_target_that_is_longer_than_all_others():
    """The largest of each size is counted, not of the sum alone."""
    batches = [*PAIRS, {"source": 17, "target": 64}]
    count, _ = _counter(batches, lambda source, target: source * (target < 63))
    told = count_all(batches, count)
    assert told == [each["source"] * (each["target"] < 63) for each in batches]


def test_what_cannot_be_counted():
    """Is not known; what was counted before is."""
    assert count_all(LENGTHS, lambda _: None) == [None] * len(LENGTHS)
    told = count_all(LENGTHS, lambda place: None if place == 9 else 5)
    assert told[9] is None
    assert 5 in told
