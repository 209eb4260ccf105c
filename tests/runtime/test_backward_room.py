"""A backward of a plain loop has room, or its forward runs again before it begins."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

import mimose

pytestmark = pytest.mark.sim

MIB = 2**20
LENGTHS = (64, 96, 80, 112, 72, 104, 88, 128)


class _Layer(nn.Module):
    """Holds few large blocks, and draws random numbers."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        wide = torch.relu(self.up(x))
        return x + nn.functional.dropout(self.down(wide), 0.1, self.training)


class _Editing(nn.Sequential):
    """Edits its input, so that its forward cannot run again."""

    def forward(self, x):
        return super().forward(x.add_(1.0))


class _Training:
    """Layers, an optimizer, and a loop in which no step is repeated."""

    def __init__(self, n_layers=6, width=256, kind=nn.Sequential, n_classes=0):
        torch.manual_seed(0)
        head = [nn.Linear(width, n_classes)] if n_classes else []
        self.model = kind(*(_Layer(width) for _ in range(n_layers)), *head).to("sim")
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.width, self.grads = width, []

    def step(self, length):
        x = torch.zeros(8, length, self.width, device="sim")
        self.model(x).square().mean().backward()
        self.grads.append(sum(p.grad.sum().item() for p in self.model.parameters()))
        self.optimizer.step()
        self.optimizer.zero_grad()


def _gaps(n):
    """Hold a quarter of n small segments; what is free there fits no large block."""
    return [
        torch.empty(MIB // 2, dtype=torch.int8, device="sim") for _ in range(4 * n)
    ][::4]


def _bare(lengths):
    training = _Training()
    for length in lengths:
        training.step(length)
    return training.grads


def test_random_lengths_of_large_blocks_never_end_a_plain_loop(sim):
    """Gaps between blocks of other lengths grow beyond the allowance for them."""
    sim.set_total_memory(400 * 2**30)
    sim.set_hollow(sim.CARDS["h100"])
    training, drawn = _Training(16, 1024), random.Random(1)
    training.step(3000)
    sim.reset_peak_memory_stats()
    start = sim.memory_allocated()
    training.step(3000)
    budget = int(start + 0.4 * (sim.max_memory_allocated() - start))
    sim.empty_cache()
    with mimose.attach(training.model, budget) as session:
        for _ in range(60):
            training.step(drawn.randint(200, 3000))
        summary = session.summary()
    assert summary.steps_over == 0
    assert summary.phases["plan"] >= 40


def test_a_forward_without_room_for_its_backward_runs_again(sim):
    """With the same plan, or a safer one, and the bits of the bare model."""
    training = _Training()
    with mimose.attach(training.model, "110MiB", refine=False) as session:
        for length in LENGTHS:
            training.step(length)
        sim.empty_cache()
        gaps = _gaps(14)
        for length in LENGTHS:
            training.step(length)
        late = list(session.records)[-len(LENGTHS) :]
        assert any(record.retries for record in late)
        assert session.summary().steps_over == 0
        assert not any("OutOfMemory" in record.reason for record in late)
    del gaps
    assert training.grads == _bare(LENGTHS * 2)


class _WithLoss(nn.Module):
    """Frees its logits before the backward, but not what stands beside them."""

    def __init__(self, n_classes=20_000, width=256):
        super().__init__()
        self.layers = nn.Sequential(*(_Layer(width) for _ in range(4)))
        self.head = nn.Linear(width, n_classes, bias=False)

    def forward(self, x):
        h, weight = self.layers(x).bfloat16(), self.head.weight.bfloat16()
        n_bytes = 2 * x.shape[:2].numel() * len(weight)
        torch.empty(n_bytes + 9 * MIB, dtype=torch.int8, device="sim")
        logits = nn.functional.linear(h, weight)
        self.beside = torch.empty(9 * MIB, dtype=torch.int8, device="sim")
        labels = torch.zeros(x.shape[:2].numel(), dtype=torch.long, device="sim")
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), labels)
        return {"loss": loss, "logits": logits}


def test_a_loss_has_room_for_two_large_blocks(sim):
    """Its backward grows by less, but what is freed before fits neither of them."""
    sim.set_hollow(sim.CARDS["h100"])
    torch.manual_seed(0)
    model = _WithLoss().to("sim")
    optimizer = torch.optim.AdamW(model.parameters())

    def step(length):
        model(torch.zeros(8, length, 256, device="sim"))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()

    with mimose.attach(model, "600MiB", refine=False) as session:
        for length in LENGTHS:
            step(length)
        for n in range(46, 58, 2):
            sim.empty_cache()
            gaps = _gaps(n)
            step(LENGTHS[-1])
            del gaps
        summary = session.summary()
    assert summary.retries == 1
    assert summary.steps_over == 0


class _Remembering(nn.Sequential):
    """Keeps what its layers return, in an attribute."""

    def forward(self, x):
        self.outputs = []
        for layer in self:
            self.outputs.append(x := layer(x))
        return x


def _train_until_a_forward_runs_again(sim, training, clear):
    """Train within gaps, and return how many forwards have run again."""
    sim.set_hollow(sim.CARDS["h100"])
    with mimose.attach(training.model, "6GiB", refine=False) as session:
        for length in (400, 300, 350, 450, 380, 420, 410, 390):
            training.step(length)
            clear()
        gaps = [torch.empty(MIB, dtype=torch.int8, device="sim") for _ in range(3000)]
        del gaps[::2]
        for length in range(500, 1000, 50):
            training.step(length)
            clear()
            if n := session.summary().retries:
                return n
    return 0


def test_outputs_that_a_hook_keeps_are_never_counted_twice(sim):
    """A forward whose graph is held does not run again; the loop gets an error."""
    training, kept = _Training(16, 1024), []

    def keep(layer, inputs, output):
        kept.append(output.mean())

    training.model[0].register_forward_hook(keep)
    with pytest.raises(mimose.MimoseError, match="still held"):
        _train_until_a_forward_runs_again(sim, training, kept.clear)
    assert len(kept) == 1


def test_a_forward_runs_again_though_detached_outputs_are_kept(sim):
    """They are in no graph, so no gradient counts twice."""
    training, kept = _Training(16, 1024), []
    for layer in training.model:
        layer.register_forward_hook(lambda *args: kept.append(args[-1].detach()))
    assert _train_until_a_forward_runs_again(sim, training, kept.clear) > 0


def test_a_forward_runs_again_though_the_model_remembers_outputs(sim):
    """Its forward sets these attributes again."""
    training = _Training(16, 1024, kind=_Remembering)
    assert _train_until_a_forward_runs_again(sim, training, lambda: None) > 0


@pytest.mark.parametrize("grace", ["64MiB", 0])
def test_a_backward_uses_the_grace_if_its_forward_cannot_run_again(sim, grace):
    """A model that edits its input runs once; without a grace the budget is strict."""
    training, walls = _Training(kind=_Editing), []

    def look(_):
        walls.append(round(sim.get_per_process_memory_fraction() * 80 * 1024))
        if walls[-1] > 110:  # more than the plan knows of
            torch.empty(40 * MIB, dtype=torch.int8, device="sim")

    training.model[1].register_full_backward_hook(lambda *_: look(0))
    with mimose.attach(training.model, "110MiB", grace=grace, refine=False) as session:
        for length in LENGTHS:
            training.step(length)
        sim.empty_cache()
        gaps = _gaps(10)
        for length in LENGTHS:
            training.step(length)
        over = [r.reserved_peak_bytes - r.budget_bytes for r in session.records]
        assert set(walls) == ({110, 174} if grace else {110})
        assert (0 < max(over) <= 64 * MIB) == bool(grace)
    del gaps
    assert sim.get_per_process_memory_fraction() == 1.0


def test_no_forward_may_use_the_grace_of_an_earlier_one(sim):
    """It is for a backward, which has not come yet; a forward can run again."""
    training = _Training(kind=_Editing)

    def forward(length):
        return training.model(torch.zeros(8, length, training.width, device="sim"))

    def wall():
        return round(sim.get_per_process_memory_fraction() * 80 * 1024)

    with mimose.attach(training.model, "110MiB", grace="64MiB", refine=False):
        for length in LENGTHS:
            training.step(length)
        sim.empty_cache()
        gaps = _gaps(10)
        for length in LENGTHS:
            output = forward(length)
            if wall() == 174:
                break
            output.square().mean().backward()
            training.optimizer.zero_grad()
        assert wall() == 174
        walls = []
        training.model[2].register_forward_hook(lambda *_: walls.append(wall()))
        forward(16)
        assert walls == [110]
        assert output.requires_grad  # still held
    del gaps


def test_forwards_that_run_again_in_vain_become_rare(sim):
    """All steps recompute everything, and gaps leave too little room in each."""
    sim.set_total_memory(5063 * MIB)
    sim.set_hollow(sim.CARDS["h100"])
    training = _Training(n_classes=50_000)
    with mimose.attach(training.model, 0.98, refine=False) as session:
        for _ in range(40):
            training.step(512)
        again = [record.step for record in session.records if record.retries]
    assert again == [2, 4, 8, 16, 32]
    assert sim.memory_stats()["num_ooms"] == 0


def test_a_step_that_ran_again_records_each_action_once(sim):
    """A step without a plan and without a measurement has noted each as it ran."""
    training, n_left = _Training(), [0]

    def run_out(*_):
        n_left[0] -= 1
        if not n_left[0]:
            message = "Tried to allocate 1.00 GiB"
            raise torch.OutOfMemoryError(message)

    training.model[4].register_forward_hook(run_out)
    with mimose.attach(training.model, "110MiB", refine=False) as session:
        for n_left[0] in (0, 0, 0, 1):
            x = torch.zeros(8, 64, training.width, device="sim")
            loss = training.model(x).square().mean()
            for keeps in (True, False):
                loss.backward(retain_graph=keeps)
        record = session.records[-1]
    assert (record.retries, record.reason) == (1, "two backwards")
    assert len(record.actions) == len(training.model)


def test_a_recomputation_that_runs_out_of_memory_runs_again(sim):
    """Each allocation of a backward fails once: what a recomputation asks for too."""
    n_survived = 0
    for nth in range(1, 60, 3):
        training = _Training(2)
        with mimose.attach(training.model, planner="every-1") as session:
            training.step(64)
            x = torch.zeros(8, 64, training.width, device="sim")
            loss = training.model(x).square().mean()
            sim.fail_allocation(nth)
            try:
                loss.backward()
            except torch.OutOfMemoryError:
                continue
            finally:
                sim.fail_allocation(0)
            has_failed = sim.memory_stats()["num_ooms"] > 0
            del session
        sim.reset_accumulated_memory_stats()
        if has_failed:
            n_survived += 1
            found = [p.grad.clone() for p in training.model.parameters()]
            bare = _Training(2)
            bare.step(64)
            bare.model(x).square().mean().backward()
            wanted = [p.grad for p in bare.model.parameters()]
            assert all(map(torch.equal, found, wanted))
    assert n_survived
