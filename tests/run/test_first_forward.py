"""What ranks tell each other behind the first forward, with one process for all."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
from torch import nn

import mimose.run.first_forward
from mimose.exceptions import NotRecomputableError
from mimose.run.agreement import Alone
from mimose.run.first_forward import FirstForward

_FOUND = NotRecomputableError({0: "one"}, "it counts")


def _units(*kept):
    return [
        SimpleNamespace(index=i, name=name, is_kept=name in kept)
        for i, name in enumerate(("one", "other"))
    ]


def _exchange(*answers):
    exchange = mock.MagicMock(n_ranks=2)
    exchange.maxima.side_effect = answers
    return exchange


def _first(monkeypatch, units, exchange, why="it waits"):
    module = mimose.run.first_forward
    monkeypatch.setattr(module, "why_forward_waits", lambda *_: why)
    monkeypatch.setattr(
        module.distributed, "get_process_group_ranks", lambda group: group
    )
    agreement = mock.MagicMock(exchange=exchange)
    return FirstForward(nn.Linear(2, 2), units, agreement)


@pytest.mark.parametrize("why", ["", "it waits"])
@pytest.mark.parametrize("error", [None, _FOUND])
def test_without_a_group_of_all_who_wait_nothing_is_sent(monkeypatch, why, error):
    """What is found stays this rank's own, and nothing is asked again."""
    first = _first(monkeypatch, _units(), None, why)
    assert first.settle(error, is_repeatable=True) is error
    assert first.is_over
    assert not (first.is_common or first.all_run_again)


def test_what_another_rank_finds_is_this_ones_error(monkeypatch):
    """It names all layers that a rank keeps, until none finds any more."""
    exchange = _exchange([1, 0, 0, 1], [0, 0, 0, 1])
    exchange.group = [0, 1]
    first = _first(monkeypatch, _units(), exchange)
    error = first.settle(None, is_repeatable=True)
    assert {1: "other"} == error.units
    assert first.is_common
    assert first.all_run_again
    assert first.settle(None, is_repeatable=True) is None
    assert first.is_over
    assert not (first.is_common or first.all_run_again)
    assert [mock.call([0, 0, 0, 0])] * 2 == exchange.maxima.call_args_list


def test_all_or_none_run_again(monkeypatch):
    """Where one cannot, all have the error; the next forward is asked once more."""
    exchange = _exchange([1, 1, 1, 0])
    exchange.group = [0, 1]
    first = _first(monkeypatch, _units("one"), exchange)
    assert first.settle(_FOUND, is_repeatable=False) is _FOUND
    assert first.is_common
    assert not (first.all_run_again or first.is_over)
    assert [mock.call([1, 1, 1, 0])] == exchange.maxima.call_args_list


@pytest.mark.parametrize(("ranks", "is_used"), [([0, 1, 2, 3], True), ([0, 2], False)])
def test_a_group_has_to_hold_all_who_wait(monkeypatch, ranks, is_used):
    """One that agrees on layers may be another than that which shards the weights."""
    exchange = _exchange([0, 0, 0, 0])
    exchange.group = ranks
    first = _first(monkeypatch, _units(), exchange)
    monkeypatch.setattr(
        mimose.run.first_forward, "_groups", lambda _: [([0, 1], "cpu")]
    )
    assert first.settle(None, is_repeatable=True) is None
    assert is_used is exchange.maxima.called


def test_in_one_process_nothing_is_asked():
    """Nobody waits, and the first forward is settled at once."""
    first = FirstForward(nn.SyncBatchNorm(2), _units(), Alone())
    assert first.settle(_FOUND, is_repeatable=True) is _FOUND
    assert first.is_over
