"""Batches from a stream: each sample once, in time, of like lengths, and resumed."""

import dataclasses
import itertools
import json
import logging
import random
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("hypothesis")

from hypothesis import given, settings  # noqa: E402 (behind importorskip)
from hypothesis import strategies as st  # noqa: E402
from sampler_ranks import Session  # noqa: E402
from stream_ranks import Source  # noqa: E402

import mimose  # noqa: E402

_LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=200)
_OPTIONS = st.fixed_dictionaries(
    {
        "buffer": st.integers(1, 40),
        "max_rows": st.none() | st.integers(1, 9),
        "max_tokens": st.none() | st.integers(1, 900),
        "pad_to_multiple_of": st.none() | st.just(8),
        "seed": st.integers(0, 3),
    }
)


def _stream(samples, session=None, **options):
    options = {"length": lambda sample: sample[1], "collate_fn": list, **options}
    return mimose.BatchStream(samples, session, **options)


def _numbers(batches):
    return [number for batch in batches for number, _ in batch]


def _tokens(batch):
    return len(batch) * max(length for _, length in batch)


@settings(deadline=None, max_examples=60)
@given(_LENGTHS, _OPTIONS, st.booleans(), st.booleans())
def test_each_sample_comes_once_and_in_time(lengths, options, has_session, is_sorted):
    """Within the limits, the next time as well; none waits for twice the buffer."""
    source = Source(sorted(lengths) if is_sorted else lengths)
    stream = _stream(source, Session(2**10) if has_session else None, **options)
    for _ in range(2):
        seen_at, batches = {}, []
        for turn, batch in enumerate(stream):
            seen_at.update(dict.fromkeys(range(len(seen_at), source.n_pulled), turn))
            assert all(turn - seen_at[n] < 2 * options["buffer"] for n, _ in batch)
            batches.append(batch)
        assert list(range(len(lengths))) == sorted(_numbers(batches))
        assert len(batches) == stream.n_drawn
        for batch in batches:
            assert len(batch) <= (options["max_rows"] or len(batch))
            assert len(batch) == 1 or _tokens(batch) <= (options["max_tokens"] or 2**20)


@pytest.mark.parametrize("order", [list, sorted])
def test_batches_are_of_like_lengths(order):
    """Of a heavy tail, also if the longest come last."""
    rng = random.Random(0)
    lengths = order(min(4000, round(100 * rng.paretovariate(1.5))) for _ in range(4000))
    options = {"max_tokens": 8000, "buffer": 1000}
    batches = list(_stream(list(enumerate(lengths)), **options))
    assert sum(lengths) > 0.92 * sum(map(_tokens, batches))
    assert len(batches) < 1.2 * len(list(mimose.BatchSampler(lengths, max_tokens=8000)))


def test_the_buffer_shuffles():
    """Samples of one length move by about a buffer, and none comes before its time."""
    samples = [(i, 7) for i in range(4000)]
    batches = list(_stream(samples, max_rows=4, buffer=400))
    moved = np.array([turn * 4 - n for turn, b in enumerate(batches) for n, _ in b])
    assert moved.min() >= -400
    assert 100 < moved.std() < 800
    assert batches != list(_stream(samples, max_rows=4, buffer=400, seed=1))


def test_what_was_never_seen_is_not_trusted():
    """First batches are small, the longest comes second; what grows still fits."""
    samples = [(i, 8 + 3 * (i % 50)) for i in range(400)]
    stream = _stream(samples, pad_to_multiple_of=8)
    stream.is_expecting = True
    batches = list(stream)
    assert {1, 8} <= {len(batch) for batch in batches} <= set(range(1, 9))
    assert 155 in [length for _, length in batches[1]]
    growing = _stream([(i, 4 + i) for i in range(600)], Session(2**11), buffer=99)
    assert all(len(batch) == 1 or _tokens(batch) <= 2**11 for batch in growing)


def test_a_session_may_come_later():
    """It makes the forecasts from the next round on, and learns of all batches."""
    stream = _stream([(i, 8 + i % 50) for i in range(3000)])
    stream.is_expecting = True
    drawing = iter(stream)
    small = list(itertools.islice(drawing, 5))
    stream.session = Session(2**12)
    rest = list(drawing)
    assert len(small) + len(rest) == len(stream.session.collation.drawn)
    assert max(map(len, small)) <= 8 < max(map(len, rest))
    assert stream.is_settled


@pytest.mark.parametrize(
    ("length", "samples", "lengths"),
    [
        ("ids", [{"ids": [1, 2, 3]}, {"ids": torch.arange(5)}], [3, 5]),
        ("n", [{"n": 4}, {"n": torch.tensor(6)}, {"n": np.int32(2)}], [2, 4, 6]),
        (len, [b"abc", b"a"], [1, 3]),
        (lambda s: {"x.1": s, "y.1": 9 - s}, [1, 2, 3], [9, 9, 9]),
    ],
)
def test_lengths_are_of_columns_or_functions(length, samples, lengths):
    """A column counts or holds it; a function may return several by name."""
    session = Session(2**10)
    list(mimose.BatchStream(samples, session, length=length, collate_fn=list))
    drawn = [batch[1 : 1 + len(batch) // 2] for batch in session.collation.drawn]
    assert sum(lengths) == sum(map(sum, drawn))


@pytest.mark.parametrize(
    ("length", "why"),
    [
        (lambda sample: 3 // (2 - sample), r"sample 2 of the stream \(int\) cannot"),
        (lambda sample: 2.5 if sample else 1, "sample 1 of .* must be an .* got 2.5"),
        (lambda sample: 2 - sample, "sample 2 of the stream must be .* got 0"),
        (lambda sample: {str(sample // 3): 1}, r"sample 3 of .* \['1'\], .* \['0'\]"),
        ("ids", r"sample 0 of the stream \(int\) cannot be found, because of TypeErr"),
    ],
)
def test_a_wrong_length_names_the_sample(length, why):
    """And what was returned or raised for it."""
    stream = mimose.BatchStream(range(9), length=length, collate_fn=list)
    with pytest.raises((mimose.MimoseError, ValueError), match=why):
        list(stream)


def test_an_empty_stream_is_an_error():
    """So is a generator in its second iteration; until its end it goes on."""
    stream = _stream(((i, 5) for i in range(100)), buffer=20)
    begun = list(itertools.islice(stream, 3))
    assert list(range(100)) == sorted(_numbers([*begun, *stream]))
    with pytest.raises(mimose.MimoseError, match="got no sample"):
        list(stream)


@dataclasses.dataclass(slots=True, eq=False)
class _Text:
    ids: object
    more: object


@pytest.mark.parametrize("kind", [SimpleNamespace, _Text])
def test_bytes_bound_the_buffer(caplog, kind):
    """A message says once how many samples it holds; each still comes once."""
    with pytest.raises(ValueError, match=r"buffer must be .* got 0"):
        _stream([], buffer=0)
    texts = [
        kind(ids=torch.zeros(100 + i % 5), more=("x" * 100, {"n": [0] * 25}))
        for i in range(200)
    ]
    options = {"length": lambda text: len(text.ids), "buffer_bytes": "20KiB"}
    with caplog.at_level(logging.WARNING, "mimose"):
        batches = list(_stream(texts, **options))
    assert 200 == len({id(text) for batch in batches for text in batch})
    (record,) = caplog.records
    assert "holds 29 samples, not 1024" in record.getMessage()


class _Anew(list):
    """A source that begins anew, without a state."""


@settings(deadline=None, max_examples=60)
@given(
    *(_LENGTHS, _OPTIONS, st.booleans(), st.integers(0, 3)),
    st.lists(st.integers(1, 30), max_size=3),
)
def test_a_stream_goes_on_where_it_was(lengths, options, has_state, n_ahead, stops):
    """By a state out of JSON: nothing is lost or repeated, whatever was drawn ahead."""
    trained, state = [], None
    for stop in [*stops, 300]:
        source = Source(lengths) if has_state else _Anew(enumerate(lengths))
        options["buffer"] = 1 + options["buffer"] // 2  # not all of it at once
        stream = _stream(source, **options)
        if state is not None:
            stream.load_state_dict(state)
            assert state == stream.state_dict()
        n_before = stream.n_drawn
        drawn = list(itertools.islice(stream, stop + n_ahead))
        trained += drawn[:stop]
        n_trained = n_before + min(stop, len(drawn))
        state = json.loads(json.dumps(stream.state_dict(n_trained)))
        if state["held"] is None:
            break
    assert list(range(len(lengths))) == sorted(_numbers(trained))
    assert sorted(_numbers(stream)) == sorted(_numbers(trained))  # the next one


class _Epochs(_Anew):
    """Notes its epochs."""

    def set_epoch(self, epoch):
        """Note it."""
        self.epoch = epoch


class _Itself:
    """An iterator that begins again with each iteration."""

    def __iter__(self):
        self._at = iter(range(40))
        return self

    def __next__(self):
        return next(self._at), 5


class _Workers:
    """Has one iterator, which begins again: a loader with persistent workers."""

    def __init__(self):
        self._iterator = _Itself()

    def __iter__(self):
        return iter(self._iterator)


@pytest.mark.parametrize("kind", [_Itself, _Workers])
def test_an_iterator_that_begins_again(kind):
    """Samples come once, after an iteration that was stopped or has ended, resumed."""
    stream = _stream(kind(), buffer=10)
    if kind is _Workers:
        next(iter(stream))
    assert list(range(40)) == sorted(_numbers(stream))
    begun = list(itertools.islice(stream, 2))
    other = _stream(_Anew((i, 5) for i in range(40)), buffer=10)
    other.load_state_dict(stream.state_dict())
    assert list(range(40)) == sorted(_numbers([*begun, *other]))


def test_what_cannot_be_resumed_is_said(caplog):
    """A source that goes on loses the buffer; a state of another seed is refused."""
    samples = [(i, 5) for i in range(100)]
    stream = _stream(_Epochs(samples), max_rows=2, buffer=30)
    assert 3 == len(list(itertools.islice(stream, 3)))
    state = stream.state_dict()
    with pytest.raises(ValueError, match=r"must be from 0 to 3, .* got 4"):
        stream.state_dict(4)
    for source, text in (
        (iter(samples), "28 samples that were in the buffer are not trained"),
        (_Epochs(samples), "leaves out the 6 that were trained"),
    ):
        caplog.clear()
        with caplog.at_level(logging.WARNING, "mimose"):
            other = _stream(source, buffer=30)
            other.load_state_dict(state)
        (record,) = caplog.records
        assert text in record.getMessage()
    assert [94, 100] == [sum(map(len, other)), sum(map(len, other))]
    assert source.epoch == other.epoch == 1
    with pytest.raises(mimose.StateMismatchError, match="'seed': 1"):
        _stream(samples, seed=1).load_state_dict(state)


def test_the_buffer_grows_with_the_batches():
    """Until it holds 32; a given one keeps its size, and pads more."""
    lengths = [round(60 * random.Random(i).lognormvariate(0, 0.5)) for i in range(9000)]
    padded = {}
    for buffer in (None, 1024):
        samples = Source([min(512, max(8, length)) for length in lengths])
        stream = _stream(samples, max_tokens=10_000, buffer=buffer)
        held, batches = [], []
        for batch in stream:
            batches.append(batch)
            held.append(samples.n_pulled - sum(map(len, batches)))
        assert held[0] < 1024 and (max(held) > 3000) == (buffer is None)
        padded[buffer] = sum(map(_tokens, batches))
    assert padded[None] < 0.95 * padded[1024]
