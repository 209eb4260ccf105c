"""What an optimizer's state will take is planned for before it has stepped."""

import gc
import os

import pytest
import torch
from torch import optim

import mimose

_KINDS = {
    "adamw": optim.AdamW,
    "adam with amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "nadam": optim.NAdam,
    "radam": optim.RAdam,
    "adamax": optim.Adamax,
    "adadelta": optim.Adadelta,
    "adagrad": optim.Adagrad,
    "adafactor": optim.Adafactor,
    "rmsprop with all": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "rprop": optim.Rprop,
    "asgd": optim.ASGD,
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
}


class _Own(optim.Optimizer):
    """Nobody knows what it makes."""

    def __init__(self, parameters):
        super().__init__(parameters, {})


def _state_bytes(optimizer):
    storages = {
        value.untyped_storage().data_ptr(): value.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor)
    }
    return sum(storages.values())


def _to_come(session, model, rows=8):
    """Run a step, and return what the next one's plan leaves for optimizers' state."""
    model(torch.ones(rows, 16)).backward()
    return session.planning_problem().optimizer_state_bytes


@pytest.mark.parametrize("kind", _KINDS)
def test_what_comes_is_what_was_told(toys, kind):
    """For each of torch's optimizers, but for a few numbers a parameter."""
    model = toys.chain(2)
    optimizer = _KINDS[kind](model.parameters())
    before = _state_bytes(optimizer)  # Adagrad makes its own at once
    with mimose.attach(model, "1TiB", meter="prediction") as session:
        told = _to_come(session, model)
        optimizer.step()
        made = _state_bytes(optimizer) - before
        assert 0 <= made - told <= 16 * len(list(model.parameters()))
        assert (told > 0) == (kind not in ("sgd", "adagrad"))
        assert 0.0 == _to_come(session, model)


def test_frozen_weights_and_unknown_optimizers_have_no_state_to_come(toys):
    """Frozen weights never get one; LBFGS, and what is not torch's, is not guessed."""
    model = toys.chain(2)
    model.stem.requires_grad_(False)
    trained = [p for p in model.parameters() if p.requires_grad]
    kinds = (
        (lambda p: optim.AdamW(p), 2 * sum(p.nbytes for p in trained)),
        (optim.LBFGS, 0.0),
        (_Own, 0.0),
    )
    for make, expected in kinds:
        optimizer = make(list(model.parameters()))
        with mimose.attach(model, "1TiB", meter="prediction") as session:
            assert expected == _to_come(session, model)
        del optimizer
        gc.collect()


def test_of_two_optimizers(toys):
    """Where one of two has stepped the other's is still to come."""
    model = toys.chain(2)
    one = optim.AdamW(model.stem.parameters())
    two = optim.SGD(model.blocks.parameters(), lr=0.1, momentum=0.9)
    stem, blocks = (
        sum(p.nbytes for p in part.parameters()) for part in (model.stem, model.blocks)
    )
    with mimose.attach(model, "1TiB", meter="prediction") as session:
        assert 2 * stem + blocks == _to_come(session, model)
        one.step()
        assert blocks == _to_come(session, model)
        two.step()
        assert 0.0 == _to_come(session, model)


def test_plans_leave_room_for_the_state(toys, meter):
    """They recompute until AdamW's fits too, and stay when it is there."""

    def train(budget, make, steps_at=None):
        gc.collect()  # models of before are part of what the meter counts
        model = toys.chain(6)
        optimizer = make(model.parameters())
        with mimose.attach(model, budget, meter=meter) as session:
            for i in range(16):
                if i == steps_at:
                    for p in model.parameters():
                        p.grad.zero_()
                    optimizer.step()
                model(toys.inputs(64 + 8 * (i % 4))).backward()
        return list(session.records)

    free = train("1TiB", lambda _: None)
    n_bytes = sum(p.nbytes for p in toys.chain(6).parameters())
    most = max(record.observed_peak_bytes for record in free)
    budget = int(most + n_bytes)  # room for a step; not for AdamW's state besides
    sgd = train(budget, lambda p: optim.SGD(p, lr=0.1))
    adamw = train(budget, optim.AdamW, steps_at=12)
    for records, recomputes in ((free, False), (sgd, False), (adamw, True)):
        later = records[-8:]
        assert {"plan"} == {record.phase for record in later}
        assert recomputes == any("recompute" in record.actions for record in later)
    assert [r.actions for r in adamw[8:12]] == [r.actions for r in adamw[12:]]
    assert not any(record.is_over for record in adamw)


@pytest.mark.sim
@pytest.mark.parametrize("foreach", [True, False])
def test_the_working_memory_of_an_optimizers_step(toys, sim, foreach):
    """On an accelerator it is counted to the byte, and planned for: none is over."""
    del sim
    model = toys.chain(4, width=64).to("sim")
    optimizer = optim.AdamW(model.parameters(), foreach=foreach)
    batches = [toys.inputs(n, width=64).to("sim") for n in (8, 12, 16) * 4]
    peaks = []
    with mimose.attach(model, "1GiB", wall=False) as session:
        for batch in batches:
            torch.accelerator.reset_peak_memory_stats()
            model(batch).backward()
            optimizer.step()
            stats = torch.accelerator.memory_stats(0)
            peaks.append(stats["requested_bytes.all.peak"])
            optimizer.zero_grad()
        problem = session.planning_problem()
    n_bytes = sum(p.nbytes for p in model.parameters())
    assert 0.0 == problem.optimizer_state_bytes
    assert session.summary().peak_bytes >= max(peaks)
    assert (max(peaks) >= 5 * n_bytes) == foreach  # temporaries of all parameters


def test_attaching_again_and_again_opens_no_files(toys):
    """A session that was detached and dropped holds nothing open."""
    model = toys.chain(2)
    mimose.attach(model, "1TiB").detach()
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 (a count)
    for _ in range(10):
        mimose.attach(model, "1TiB").detach()
    gc.collect()
    assert before == len(os.listdir("/proc/self/fd"))  # noqa: PTH208
