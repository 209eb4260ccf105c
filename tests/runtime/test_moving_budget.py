"""A budget that is set between steps, or asked for before each window."""

from itertools import count

import pytest
import torch

import mimose

GIB = 2**30


def test_each_budget_is_kept_and_its_plans_are_found_again(toys, meter):
    """Up and down between three, on a CPU's meter; nobody plans a shape anew."""
    model, batches = toys.chain(6), [toys.inputs(48), toys.inputs(64)]
    least, most = (toys.budget_between(model, batches, s, meter) for s in (0.1, 0.9))
    budgets = (most, least, (least + most) // 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with mimose.attach(model, most, meter=meter) as session:
        toys.train(model, batches * 8, optimizer=optimizer)
        made = []
        for budget in budgets * 4:
            session.budget = budget
            toys.train(model, batches, optimizer=optimizer)
            assert budget == session.budget == session.records[-1].budget_bytes
            made.append(session.summary().cache_misses)
    late, summary = list(session.records)[16:], session.summary()
    assert made[3:] == made[2:3] * 9
    assert summary.steps_over == 0
    assert (least, most) == summary.budget_range
    assert len({record.actions for record in late}) > 2


def test_a_function_is_asked_once_a_window(toys, meter):
    """Of three micro-steps; they have one budget, that of the first."""
    model, answers = toys.chain(3), count(1)
    optimizer = torch.optim.AdamW(model.parameters())
    with mimose.attach(model, lambda: f"{next(answers)}GiB", meter=meter) as session:
        assert GIB == session.budget
        for _ in range(2):
            for _ in range(3):
                model(toys.inputs()).backward()
            optimizer.step()
            optimizer.zero_grad()
    budgets = [record.budget_bytes // GIB for record in session.records]
    assert [2, 2, 2, 3, 3, 3] == budgets
    assert "3.00 GiB now, 2.00 GiB to 3.00 GiB before" in session.report(width=99)


@pytest.mark.parametrize("where", ["forward", "between", "backward", "accumulating"])
def test_one_that_is_set_within_a_window_holds_from_the_next(toys, meter, where):
    """A step never has two, nor has a window."""
    model = toys.chain(3)
    optimizer = torch.optim.AdamW(model.parameters())
    with mimose.attach(model, 2 * GIB, meter=meter) as session:

        def lower(*_):
            session.budget = GIB
            assert 2 * GIB == session.budget

        hooks = {"forward": model.blocks[1].register_forward_hook}
        hooks["backward"] = model.blocks[1].register_full_backward_hook
        hook = hooks[where](lower) if where in hooks else None
        loss = model(toys.inputs())
        if where == "between":
            lower()
        loss.backward()
        if where == "accumulating":
            lower()
        model(toys.inputs()).backward()
        optimizer.step()
        if hook is not None:
            hook.remove()
        model(toys.inputs()).backward()
    budgets = [record.budget_bytes // GIB for record in session.records]
    assert [2, 2, 1] == budgets


def test_one_that_is_set_behind_a_backward_that_failed_holds_from_the_next(toys, meter):
    """Nothing waits for the end of a window that has none."""

    def fail(*_):
        raise ValueError

    model = toys.chain(3)
    with mimose.attach(model, 2 * GIB, meter=meter) as session:
        hook = model.blocks[1].register_full_backward_hook(fail)
        loss = model(toys.inputs())
        with pytest.raises(ValueError):
            loss.backward()
        hook.remove()
        model.zero_grad()
        session.budget = GIB
        model(toys.inputs()).backward()  # while the loss with its graph is held
    budgets = [record.budget_bytes // GIB for record in session.records]
    assert [2, 1] == budgets


def test_less_than_what_is_held_is_refused(toys, meter):
    """With the numbers; the budget stays, whether it was set or asked for."""
    model, answers = toys.chain(3), [1000, "3GiB", "forty", "2GiB"]
    with mimose.attach(model, GIB, meter=meter) as session:
        toys.train(model, [toys.inputs()])
        with pytest.raises(mimose.InfeasibleBudgetError) as caught:
            session.budget = 1000
        assert 1000 == caught.value.budget_bytes < caught.value.least_peak_bytes
        session.budget = answers.pop
        for budget, refused in ((2, None), (2, "size"), (3, None), (3, "1000|0.0 MiB")):
            if refused is None:
                toys.train(model, [toys.inputs()])
            else:
                with pytest.raises(mimose.BudgetError, match=refused):
                    toys.train(model, [toys.inputs()])
            assert budget * GIB == session.budget
    with pytest.raises(mimose.MimoseError, match="detached"):
        session.budget = GIB
