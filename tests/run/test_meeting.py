"""Ranks as they attach: words at a store, and who waits for whom.

Ranks are told apart here by who is asked; `tests/distributed` has processes.
"""

from __future__ import annotations

import logging
from datetime import timedelta

import pytest
from torch import distributed, nn

from mimose.exceptions import MimoseError, OtherRankError
from mimose.run import meeting, others
from mimose.run.meeting import Meeting

_WHY = "the layer 'norm' waits for other ranks (it is a SyncBatchNorm)"


class _World:
    """Two ranks of one process: one of them is asked at a time."""

    def __init__(self, monkeypatch):
        self.store = distributed.HashStore()
        self.rank = 0
        self.limit = timedelta(0)
        monkeypatch.setattr(meeting, "n_ranks", lambda: 2)
        monkeypatch.setattr(meeting, "default_store", lambda: self.store)
        monkeypatch.setattr(meeting, "group_timeout", lambda _: self.limit)
        monkeypatch.setattr(distributed, "get_rank", lambda *_: self.rank)
        monkeypatch.setattr(meeting, "_numbers", iter([7, 7]))  # each counts for itself

    def meetings(self):
        """Return a call of `attach` of each rank."""
        return Meeting(), Meeting()


@pytest.fixture
def world(monkeypatch):
    """Two ranks."""
    return _World(monkeypatch)


def test_who_waits_goes_on_when_all_do(world):
    """The words of all ranks are there."""
    first, second = world.meetings()
    first._leave("waits")
    world.rank = 1
    second.wait_for_all(_WHY)


def test_a_rank_that_nothing_waits_on_is_named(world):
    """Who waits says what waits, and what to do."""
    first, second = world.meetings()
    first.pass_by()
    world.rank = 1
    with pytest.raises(MimoseError, match=r"'norm' .* that rank 0 has .* agree=None"):
        second.wait_for_all(_WHY)


def test_an_error_is_told_once(world):
    """By the first word of a call of `attach`; what comes later is told otherwise."""
    first, second = world.meetings()
    with pytest.raises(ValueError, match="odd"), first.telling():
        msg = "an odd thing\nwith details"
        raise ValueError(msg)
    first.pass_by()
    world.rank = 1
    with pytest.raises(OtherRankError, match=r"rank 0 .* ValueError: an odd thing$"):
        second.wait_for_all(_WHY)


def test_a_rank_that_does_not_come_is_named(world, caplog, monkeypatch):
    """In the log, then in an error; if it comes after all, it does not wait."""
    first, second = world.meetings()
    monkeypatch.setattr(meeting, "_SECONDS_TO_TELL", -1.0)
    world.limit = timedelta(seconds=0.01)
    with (
        caplog.at_level(logging.WARNING, logger="mimose"),
        pytest.raises(MimoseError, match=r"ranks \[1\] have not attached"),
    ):
        first.wait_for_all(_WHY)
    assert 1 == len(caplog.records)
    assert "the ranks [1] have not attached" in caplog.text
    world.rank = 1
    with pytest.raises(OtherRankError, match="rank 0"):
        second.wait_for_all(_WHY)


def test_a_store_that_is_gone_is_an_error_in_words(world):
    """So is the process that kept it, and its own error tells why."""
    first, _ = world.meetings()

    class Gone:
        """Whose process has ended."""

        def add(self, *_):
            msg = "Broken pipe"
            raise RuntimeError(msg)

        set = add

    first._store = Gone()
    with pytest.raises(MimoseError, match="another one is gone: Broken pipe"):
        first.wait_for_all(_WHY)


def test_only_sessions_that_may_agree_are_counted(world):
    """With None nothing is said; so a session beside others goes on alone."""
    alone = Meeting(None)
    alone.pass_by()
    assert 0 == world.store.num_keys()
    assert others.later_waits(alone, None, nn.Identity(), []) is None


def test_groups_without_a_store_make_their_group_at_once(world):
    """There is nowhere to leave a word, so collectives are what waits."""
    world.store = None
    Meeting().wait_for_all(_WHY)


def test_layers_that_come_to_wait_are_seen_in_the_first_forward(monkeypatch):
    """And not looked for again, unless the model has been sharded since."""
    ranks = [1]
    monkeypatch.setattr(others, "n_ranks", lambda: ranks[0])
    model = nn.Sequential(nn.SyncBatchNorm(2))
    later = others.later_waits(Meeting(), None, model, [("0", model[0])])
    assert later is not None
    looked = []
    monkeypatch.setattr(
        others, "communicates", lambda unit: looked.append(unit) or "it waits"
    )
    later()
    assert [] == looked
    ranks[0] = 2
    for _ in range(2):
        with pytest.raises(MimoseError, match=r"'0' waits .*\(it waits\), and did not"):
            later()
    monkeypatch.setattr(others, "communicates", lambda unit: looked.append(unit) or "")
    later()
    later()
    assert 3 == len(looked)
