"""Copies beside the computing wait for it, and it for them, in the right order."""

import pytest
import torch

from mimose.actions.offload.copies import (
    PlainCopies,
    StreamCopies,
)

CPU = torch.device("cpu")


class Event:
    """Has happened once it was told so.

    Args:
        name: In the log.
    """

    def __init__(self, name):
        self.name, self.has_happened = name, False

    def query(self):
        """Whether it has happened."""
        return self.has_happened


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
        event = Event(f"{self.name}{self.n_events}")
        self.log.append(f"{self.name} records {event.name}")
        return event

    def wait_event(self, event):
        """Wait."""
        self.log.append(f"{self.name} awaits {event.name}")

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

    def current(self):
        """Return the one that computes."""
        return self.computing

    def empty(self, n_bytes):
        """Return memory."""
        self.log.append("c gets memory")
        return torch.empty(n_bytes, dtype=torch.uint8)


@pytest.fixture
def streams():
    """Streams that write down what they are told."""
    return Streams()


def _bytes(n_bytes, seed=3):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(256, (n_bytes,), dtype=torch.uint8, generator=generator)


def _pieces(*sizes):
    return [torch.empty(size, dtype=torch.uint8) for size in sizes]


@pytest.mark.parametrize("sizes", [(1000,), (512, 256, 256), (512, 512, 512)])
@pytest.mark.parametrize("kind", ["plain", "streams"])
def test_bytes_go_and_come_back(kind, sizes, streams):
    """In one piece or in several, the last of which may be longer."""
    copies = PlainCopies(CPU) if kind == "plain" else StreamCopies(streams)
    source, pieces = _bytes(1000), _pieces(*sizes)
    sent = copies.to_host(source, pieces, 0.0)
    back = copies.to_device(pieces, 1000, sent).wait()
    assert torch.equal(source, back)


def test_a_copy_out_waits_for_what_it_copies(streams):
    """And the computing for the copy, before the memory is anybody else's."""
    StreamCopies(streams).to_host(_bytes(8), _pieces(8), 0.0)
    assert [
        "c records c1",
        "out awaits c1",
        "out copies",
        "out records out1",
        "c awaits out1",
    ] == streams.log


def test_what_is_copied_lives_within_its_headroom(streams):
    """The oldest go first, each once the computing was told to wait for its copy."""
    copies = StreamCopies(streams)
    sent = [copies.to_host(_bytes(8, seed), _pieces(8), 16.0) for seed in range(2)]
    assert not any("c awaits" in line for line in streams.log)
    copies.to_host(_bytes(8), _pieces(8), 16.0)
    assert ["c awaits out1"] == [line for line in streams.log if "c awaits" in line]
    sent[1].has_happened = True
    copies.to_host(_bytes(8), _pieces(8), 16.0)  # the second's has ended already
    assert ["c awaits out1"] == [line for line in streams.log if "c awaits" in line]


def test_a_copy_back_waits_for_the_way_out_and_for_its_memory(streams):
    """The computing waits for it where it is asked for, once."""
    copies, pieces = StreamCopies(streams), _pieces(8)
    sent = copies.to_host(_bytes(8), pieces, 0.0)
    streams.log.clear()
    coming = copies.to_device(pieces, 8, sent)
    assert [
        "c gets memory",
        "c records c2",
        "in awaits c2",
        "in awaits out1",
        "in copies",
        "in records in1",
    ] == streams.log
    coming.wait()
    coming.wait()
    del coming
    assert ["c awaits in1"] == streams.log[6:]


def test_what_nobody_has_asked_for_is_waited_for_as_it_goes(streams):
    """Else its memory would be somebody else's while it is written to."""
    copies, pieces = StreamCopies(streams), _pieces(8)
    coming = copies.to_device(pieces, 8, copies.to_host(_bytes(8), pieces, 0.0))
    computing = streams.computing
    streams.computing = Stream("other", streams.log)
    assert coming.wait() is None
    streams.log.clear()
    del coming
    assert ["c awaits in1"] == streams.log
    assert computing is not streams.computing
