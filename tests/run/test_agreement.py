"""What ranks agree on, as far as one process can tell; see also tests/distributed."""

from __future__ import annotations

import copy
from unittest import mock

import pytest
import torch
from torch import nn

import mimose
import mimose.run.retry
from mimose.decide.decision import Decision
from mimose.exceptions import MimoseError
from mimose.learn.problem import Memory
from mimose.run.agreement import Alone, Asked
from mimose.run.meeting import Meeting
from mimose.run.others import (
    find_others,
    is_told_alone,
    make_agreement,
    tell_alone,
    why_forward_waits,
    why_step_waits,
)
from mimose.types import StepInput


def test_alone_a_decision_is_as_it_was():
    """Without other ranks the decision is the very same, and nothing is asked."""
    decision = Decision("plan", None)
    asked = Asked(StepInput("", (), False), Memory(0.0, 0.0, 0.0, 0.0), 0, False)
    agreement = Alone()
    agreement.meet(["anything"])
    with agreement.telling():
        assert agreement.agree(decision, asked) is decision
    assert not agreement.is_on


@pytest.mark.parametrize("agree", ["auto", None])
def test_one_process_agrees_with_nobody(agree):
    """Whatever is asked for, there is nobody."""
    others = find_others(Meeting(agree), ["norm"], [nn.SyncBatchNorm(2)])
    assert others is None
    assert isinstance(make_agreement(others, [], None, None, plans=True), Alone)


def test_ranks_that_do_not_know_of_each_other_yet_are_told_to_wait(monkeypatch, toys):
    """A session attached before there is a group would agree with nobody for good."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    model = nn.Sequential(*(nn.Sequential(nn.SyncBatchNorm(2)) for _ in range(2)))
    with pytest.raises(MimoseError, match="attach after torch"):
        mimose.attach(model, "1TiB", units=nn.Sequential)
    mimose.attach(model, "1TiB", units=nn.Sequential, agree=None).detach()
    mimose.attach(toys.chain(2), "1TiB").detach()


def test_in_one_process_nobody_waits():
    """A layer that would wait for others has none, and a step can be run again."""
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    assert "" == why_forward_waits(model) == why_step_waits(model)


def test_an_error_that_nothing_is_run_again_after_says_so_once():
    """It stays what it was, and says why, the numbers, and what to change."""
    error = torch.OutOfMemoryError("CUDA out of memory")
    assert not is_told_alone(error)
    tell_alone(error, "the step", "it is sharded", "1 GiB was held.")
    said = str(error)
    assert said.startswith("CUDA out of memory\n")
    for words in ("it is sharded", "1 GiB was held", "a lower budget"):
        assert words in said
    assert is_told_alone(error)


@pytest.mark.parametrize("agree", ["always", 3, nn.Linear])
def test_agree_is_a_word_or_a_group(toys, agree):
    """Anything else is refused at the door, and said back."""
    with pytest.raises(ValueError, match="agree must be 'auto' or None") as caught:
        mimose.attach(toys.chain(2), "1TiB", agree=agree)
    assert repr(agree) in str(caught.value)


_NOT_RECOMPUTABLE = mimose.NotRecomputableError({0: "layer"}, "it is odd")


@pytest.mark.parametrize(
    ("error", "is_settled", "is_run_again"),
    [
        (_NOT_RECOMPUTABLE, True, True),
        (_NOT_RECOMPUTABLE, False, False),
        (mimose.LateChangeError("layer", [(7, "seen")]), True, False),
        (torch.OutOfMemoryError("CUDA out of memory"), True, False),
    ],
)
@pytest.mark.parametrize("phase", ["collect", "plan"])
def test_a_forward_that_others_wait_for(
    monkeypatch, phase, error, is_settled, is_run_again
):
    """It is run again if all ranks know, whatever the phase; else it says so."""
    monkeypatch.setattr(mimose.run.retry, "why_forward_waits", lambda *_: "it waits")
    error = copy.copy(error)
    step, call, events = mock.MagicMock(), mock.MagicMock(), mock.MagicMock()
    step.decision.phase = phase
    step.start_bytes, step.retries = 5, 0
    step.record.return_value = mock.MagicMock(predicted_peak_bytes=7, budget_bytes=9)
    call.is_edited.return_value = False
    events.knowledge.may_have_changed.return_value = False
    first = mock.MagicMock(is_common=is_settled, all_run_again=is_settled)
    retry = mimose.run.retry.Retry(
        nn.Linear(2, 2),
        torch.device("cpu"),
        mock.MagicMock(),
        mock.MagicMock(),
        events,
        mock.MagicMock(),
        first,
    )
    assert is_run_again is retry.prepare(step, error, call)
    assert is_run_again is not is_told_alone(error)
    words = "lower budget" if "memory" in str(error) else "attach(units=...)"
    assert is_run_again or words in str(error)


def test_a_wrapper_that_was_not_made_is_none():
    """One whose making failed, as memory ran out, is among all objects for a while."""
    half = nn.parallel.DistributedDataParallel.__new__(
        nn.parallel.DistributedDataParallel
    )
    with mock.patch("mimose.run.others.n_ranks", lambda: 2):
        assert "" == why_step_waits(nn.Linear(2, 2))
    del half
