"""Memory of the host: its budget, what is lent of it, and copies beside computing."""

import gc

import pytest
import torch

import mimose
from mimose.actions import host
from mimose.actions.host import LEAST_PIECE, Host, HostMemory, parse_host_budget
from mimose.exceptions import BudgetError

CPU = torch.device("cpu")
GIB = 2**30


@pytest.mark.parametrize(
    ("given", "expected"),
    [(None, 4 * GIB), (0.25, 2 * GIB), ("75%", 6 * GIB), ("16GiB", 16 * GIB)],
)
def test_sizes_and_shares(given, expected):
    """Shares are of what is free; half of it where nothing is given."""
    assert expected == parse_host_budget(given, 8 * GIB)


@pytest.mark.parametrize(
    ("given", "free", "match"),
    [
        (None, None, "host_budget.*is not known"),
        ("+1GiB", 8 * GIB, "host_budget.*relative"),
        ("lots", 8 * GIB, "host_budget.*'lots' is not a size"),
    ],
)
def test_what_is_no_budget(given, free, match):
    """The error says whose budget it is and what to give."""
    with pytest.raises(BudgetError, match=match):
        parse_host_budget(given, free)


def test_a_model_on_the_host(toys):
    """It has nowhere to send anything: not by name, and not with a budget."""
    model = toys.chain(2)
    with pytest.raises(ValueError, match="'offload'"):
        mimose.attach(model, "1TiB", actions=("keep", "offload", "recompute"))
    with pytest.raises(BudgetError, match="itself is on the host"):
        mimose.attach(model, "1TiB", actions="all", host_budget="1GiB")
    with mimose.attach(model, "1TiB", actions="all") as session:
        assert session.summary().host is None


class Allocator:
    """Stands for torch's allocator of pinned memory: keeps what is given back.

    Args:
        monkeypatch: Puts it in the place of torch's.
    """

    def __init__(self, monkeypatch):
        self.lent, self.kept = {}, {}
        monkeypatch.setattr(host, "_piece", self._piece)
        monkeypatch.setattr(host, "empty_host_cache", self.kept.clear)

    @property
    def n_bytes(self):
        """All that is pinned."""
        gc.collect()
        held = (*self.lent.items(), *self.kept.items())
        return sum(size * count for size, count in held)

    def _piece(self, n_bytes, *, is_pinned):
        assert is_pinned
        if self.kept.get(n_bytes, 0):
            self.kept[n_bytes] -= 1
        self.lent[n_bytes] = self.lent.get(n_bytes, 0) + 1
        return Piece(n_bytes, self)


class Piece:
    """Of pinned memory.

    Args:
        n_bytes: Its size.
        allocator: Whose it is.
    """

    def __init__(self, n_bytes, allocator):
        self.nbytes, self._allocator = n_bytes, allocator

    def __del__(self):
        """Go back."""
        self._allocator.lent[self.nbytes] -= 1
        kept = self._allocator.kept
        kept[self.nbytes] = kept.get(self.nbytes, 0) + 1


def test_the_budget_is_never_passed():
    """What does not fit is refused and counted; it fits when something has gone."""
    memory = HostMemory(1000, is_pinned=False)
    first = memory.take(700)
    assert memory.take(301) is None
    assert (700, 1) == (memory.use().peak_bytes, memory.use().n_refused)
    del first
    assert memory.take(1000) is not None


def test_what_is_pinned_stays_within_the_budget(monkeypatch):
    """Pieces of other sizes that wait for the next are unpinned before it is passed."""
    allocator, seen = Allocator(monkeypatch), []
    memory = HostMemory(16 * LEAST_PIECE, is_pinned=True)
    for sizes in ([8, 4, 2], [7, 7], [1] * 16, [16], [5, 5, 5]):
        held = [memory.take(size * LEAST_PIECE) for size in sizes]
        assert None not in held
        seen.append(allocator.n_bytes)
        del held
    use = memory.use()
    assert max(seen) == use.pinned_peak_bytes == use.peak_bytes <= use.budget_bytes


class Stream:
    """Writes down what it is told.

    Args:
        name: In the log.
        log: Of all streams.
    """

    def __init__(self, name, log):
        self.name, self.log, self.n_events = name, log, 0

    def record_event(self):
        """Return an event of all that was told."""
        self.n_events += 1
        self.log.append(f"{self.name} records {self.name}{self.n_events}")
        return f"{self.name}{self.n_events}"

    def wait_event(self, event):
        """Wait."""
        self.log.append(f"{self.name} awaits {event}")

    def __enter__(self):
        """Be the current one."""
        self.log.append(f"{self.name} copies")

    def __exit__(self, *_):
        """Be it no more."""


class Streams:
    """Three streams and their log."""

    def __init__(self):
        self.log = []
        self.outward, self.inward = Stream("out", self.log), Stream("in", self.log)
        self.computing = Stream("c", self.log)

    def host(self):
        """Return a host whose copies use them."""
        return Host(GIB, CPU, (self.outward, self.inward, lambda: self.computing))


def _bytes(n_bytes):
    generator = torch.Generator().manual_seed(3)
    return torch.randint(256, (n_bytes,), dtype=torch.uint8, generator=generator)


def _pieces(*sizes):
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


@pytest.mark.parametrize("sizes", [(1000,), (512, 256, 256), (512, 512, 512)])
@pytest.mark.parametrize("host_", [Host(GIB, CPU), Streams().host()])
def test_bytes_go_and_come_back(sizes, host_):
    """In one piece or in several, the last of which may be longer."""
    source, pieces = _bytes(1000), _pieces(*sizes)
    back = host_.to_device(pieces, 1000, host_.to_host(source, pieces)).wait()
    assert torch.equal(source, back)


def test_copies_wait_for_the_computing_and_it_for_them():
    """Out: before the memory is anybody else's. In: where it is asked for, once."""
    streams = Streams()
    host_, pieces = streams.host(), _pieces(8)
    sent = host_.to_host(_bytes(8), pieces)
    begun = ["c records c1", "out awaits c1", "out copies", "out records out1"]
    assert begun == streams.log
    host_.settle()
    assert ["c awaits out1"] == streams.log[4:]
    coming = host_.to_device(pieces, 8, sent)
    back = ["c records c2", "in awaits c2", "in awaits out1", "in copies"]
    assert [*back, "in records in1"] == streams.log[5:]
    coming.wait()
    coming.wait()
    del coming
    assert ["c awaits in1"] == streams.log[10:]


def test_what_nobody_has_asked_for_is_waited_for_as_it_goes():
    """Else its memory would be somebody else's while it is written to."""
    streams = Streams()
    host_, pieces = streams.host(), _pieces(8)
    coming = host_.to_device(pieces, 8, host_.to_host(_bytes(8), pieces))
    computing, streams.computing = streams.computing, Stream("other", streams.log)
    assert coming.wait() is None
    streams.log.clear()
    del coming
    assert ["c awaits in1"] == streams.log
    assert computing is not streams.computing
