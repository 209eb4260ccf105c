"""What an optimizer's state will take is known before it has stepped, and is right."""

import gc
from types import SimpleNamespace

import pytest
import torch
from torch import optim

import mimose
from mimose.measure.meters import AllocatorMeter
from mimose.run.optimizer_state import bytes_to_come, optimizers_of, state_bytes
from mimose.run.optimizer_watch import OptimizerWatch

_CPU = torch.device("cpu")
_KINDS = {
    "adamw": lambda p: optim.AdamW(p),
    "adam with amsgrad": lambda p: optim.Adam(p, amsgrad=True),
    "nadam": lambda p: optim.NAdam(p),
    "radam": lambda p: optim.RAdam(p),
    "adamax": lambda p: optim.Adamax(p),
    "adadelta": lambda p: optim.Adadelta(p),
    "adagrad": lambda p: optim.Adagrad(p),
    "adafactor": lambda p: optim.Adafactor(p),
    "rmsprop": lambda p: optim.RMSprop(p),
    "rmsprop with all": lambda p: optim.RMSprop(p, centered=True, momentum=0.9),
    "rprop": lambda p: optim.Rprop(p),
    "asgd": lambda p: optim.ASGD(p),
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "sgd with momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9),
}

_ON_SIM = {
    "adamw foreach": (lambda p: optim.AdamW(p, foreach=True), 2),
    "adamw one by one": (lambda p: optim.AdamW(p, foreach=False), 2),
    "adamw by default": (optim.AdamW, 2),
    "adamw fused": (lambda p: optim.AdamW(p, fused=True), 2),
    "adamw capturable": (lambda p: optim.AdamW(p, capturable=True), 2),
    "sgd foreach": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=True), 1),
    "sgd one by one": (
        lambda p: optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
        1,
    ),
    "sgd fused": (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, fused=True), 1),
    "adafactor foreach": (lambda p: optim.Adafactor(p, foreach=True), 0),
    "adafactor one by one": (lambda p: optim.Adafactor(p, foreach=False), 0),
}


def _shapes():
    """Make parameters of one, two and three dimensions, one of them in half."""
    return [
        torch.nn.Parameter(torch.ones(shape, dtype=dtype))
        for shape, dtype in (
            ((64,), torch.float32),
            ((32, 48), torch.float32),
            ((2, 16, 24), torch.bfloat16),
        )
    ]


def _step(optimizer, parameters):
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


@pytest.mark.parametrize("kind", _KINDS)
def test_what_comes_is_what_was_told(kind):
    """For each of torch's optimizers, but for a few numbers a parameter."""
    parameters = _shapes()
    optimizer = _KINDS[kind](parameters)
    before = state_bytes(optimizer, _CPU)
    told = sum(bytes_to_come(optimizer, _CPU).values())
    _step(optimizer, parameters)
    made = state_bytes(optimizer, _CPU) - before
    assert 0 <= made - told <= 16 * len(parameters)
    assert {} == bytes_to_come(optimizer, _CPU) or kind == "sgd"
    assert 0.0 == sum(bytes_to_come(optimizer, _CPU).values())


def test_what_is_not_trained_or_elsewhere_has_no_state_to_come():
    """Frozen parameters, and those on another device, are left out."""
    one, two = torch.nn.Parameter(torch.ones(100)), torch.nn.Parameter(torch.ones(50))
    optimizer = optim.AdamW([one, two])
    two.requires_grad = False
    assert [800.0] == list(bytes_to_come(optimizer, _CPU).values())
    assert {} == bytes_to_come(optimizer, torch.device("meta"))


def test_of_others_nothing_is_known():
    """LBFGS, and optimizers that are not torch's, are not guessed at."""

    class Own(optim.Optimizer):
        """Nobody knows what it makes."""

    weights = _shapes()
    assert {} == bytes_to_come(optim.LBFGS(weights), _CPU)
    assert {} == bytes_to_come(Own(weights, {}), _CPU)


def test_an_optimizer_derived_from_a_known_one_is_known():
    """A subclass of AdamW makes what AdamW makes."""

    class Mine(optim.AdamW):
        """AdamW under another name."""

    told = bytes_to_come(Mine([torch.nn.Parameter(torch.ones(192))]), _CPU)
    assert [1536.0] == list(told.values())


def test_a_storage_counts_once_and_on_its_device_only():
    """State that two entries share is held once; state elsewhere is not held here."""
    weight = torch.nn.Parameter(torch.ones(100))
    optimizer = optim.SGD([weight], lr=0.1)
    shared = torch.zeros(100)
    optimizer.state[weight] = {
        "one": shared,
        "two": shared.view(10, 10),
        "list": [torch.zeros(25)],
        "elsewhere": torch.zeros(100, device="meta"),
        "number": 3,
    }
    assert 500 == state_bytes(optimizer, _CPU)
    assert 400 == state_bytes(optimizer, torch.device("meta"))


def test_optimizers_are_found_among_all_objects():
    """Those of the parameters asked for, and no wrapper of one."""

    class Wrapper(optim.Optimizer):
        """Passes on what another one has."""

        def __init__(self, inner):
            self.inner = inner

        @property
        def param_groups(self):
            """Those of the other."""
            return self.inner.param_groups

    weights, others = _shapes(), _shapes()
    mine = optim.AdamW(weights)
    alive = [mine, optim.AdamW(others), Wrapper(mine)]
    assert [mine] == list(optimizers_of({id(weight) for weight in weights}))
    assert 3 == len(alive)


class TestToCome:
    """`OptimizerWatch.state_to_come_bytes`."""

    @pytest.fixture
    def watched(self, toys, meter):
        """Hand out a model under watch, with gradients."""
        gc.collect()
        model = toys.chain(2)
        watch = OptimizerWatch(model, meter)
        watch.start()
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        yield model, watch, sum(p.nbytes for p in model.parameters())
        watch.remove()

    def test_until_the_first_step(self, watched):
        """Twice the parameters before AdamW has stepped, nothing behind that."""
        model, watch, n_bytes = watched
        optimizer = optim.AdamW(model.parameters())
        assert 2 * n_bytes == watch.state_to_come_bytes
        optimizer.step()
        assert 0.0 == watch.state_to_come_bytes

    def test_of_two_optimizers(self, watched):
        """Where one of two has stepped the other's is still to come."""
        model, watch, n_bytes = watched
        one = optim.AdamW(model.stem.parameters())
        two = optim.SGD(model.blocks.parameters(), lr=0.1, momentum=0.9)
        stem = sum(p.nbytes for p in model.stem.parameters())
        assert n_bytes + stem == watch.state_to_come_bytes
        one.step()
        assert n_bytes - stem == watch.state_to_come_bytes
        two.step()
        assert 0.0 == watch.state_to_come_bytes

    def test_an_optimizer_left_lying_about(self, watched):
        """One that was replaced by another makes no state of its own any more."""
        model, watch, n_bytes = watched
        left = optim.Adam(model.parameters(), amsgrad=True)
        assert 3 * n_bytes == watch.state_to_come_bytes
        optim.SGD(model.parameters(), lr=0.1).step()
        assert 0.0 == watch.state_to_come_bytes
        assert not left.state

    def test_a_parameter_without_a_gradient(self, watched):
        """What never gets a gradient never gets a state: it is waited for no more."""
        model, watch, n_bytes = watched
        model.stem.weight.grad = None
        optimizer = optim.AdamW(model.parameters())
        assert 2 * n_bytes == watch.state_to_come_bytes
        optimizer.step()
        assert model.stem.weight not in optimizer.state
        assert 0.0 == watch.state_to_come_bytes

    def test_all_objects_are_searched_once(self, watched, monkeypatch):
        """With no optimizer anywhere, the second question costs nothing."""
        _, watch, _ = watched
        asked = []
        monkeypatch.setattr(gc, "get_objects", lambda: asked.append(1) or [])
        assert [0.0, 0.0] == [watch.state_to_come_bytes for _ in range(2)]
        assert [1] == asked

    def test_a_step_in_backward_ends_the_waiting(self, toys, watched):
        """Optimizers that step in a hook are not measured, but their state is there."""
        model, watch, n_bytes = watched
        optimizer = optim.AdamW(model.parameters())
        assert 2 * n_bytes == watch.state_to_come_bytes
        last = model.stem.weight
        handle = last.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        model(toys.inputs()).backward()
        handle.remove()
        assert not watch.has_stepped
        assert 0.0 == watch.state_to_come_bytes


class TestPlans:
    """Plans made under accumulation, before the optimizer has stepped."""

    def _trained(self, toys, meter, budget, optimizer_of, n_steps=12):
        """Train micro-steps, and no optimizer step; return records and problem."""
        gc.collect()  # models of before are part of what the meter counts
        model = toys.chain(6)
        optimizer = optimizer_of(model.parameters())
        with mimose.attach(model, budget, meter=meter) as session:
            for i in range(n_steps):
                model(toys.inputs(64 + 8 * (i % 4))).backward()
            problem = session.planning_problem()
        assert optimizer is None or not optimizer.state
        return list(session.records), problem

    def _recomputed(self, records):
        return sum(record.actions.count("recompute") for record in records[-4:])

    def test_they_leave_room_for_the_state(self, toys, meter):
        """Within the room for a step alone, they recompute until the state fits too."""
        free, problem = self._trained(toys, meter, "1TiB", lambda _: None)
        n_bytes = sum(p.nbytes for p in toys.chain(6).parameters())
        most = max(record.observed_peak_bytes for record in free)
        assert 0 == self._recomputed(free)
        assert 0.0 == problem.optimizer_state_bytes
        budget = int(most + n_bytes)  # room for a step; not for AdamW's state besides
        plain, _ = self._trained(toys, meter, budget, lambda _: None)
        sgd, _ = self._trained(toys, meter, budget, lambda p: optim.SGD(p, lr=0.1))
        adamw, problem = self._trained(toys, meter, budget, optim.AdamW)
        assert 0 == self._recomputed(plain) == self._recomputed(sgd)
        assert 0 < self._recomputed(adamw)
        assert 2 * n_bytes == problem.optimizer_state_bytes
        last = adamw[-1]
        assert last.phase == "plan"
        assert last.observed_peak_bytes + 2 * n_bytes <= budget

    def test_they_stay_when_the_state_is_there(self, toys, meter):
        """A plan made before the first optimizer step is found again behind it."""
        model = toys.chain(6)
        optimizer = optim.AdamW(model.parameters())
        n_bytes = sum(p.nbytes for p in model.parameters())
        least, _ = self._trained(toys, meter, "1TiB", lambda _: None)
        budget = max(r.observed_peak_bytes for r in least) + n_bytes
        with mimose.attach(model, budget, meter=meter) as session:
            for i in range(16):
                model(toys.inputs(64 + 8 * (i % 4))).backward()
            before = [record.actions for record in list(session.records)[-4:]]
            for p in model.parameters():
                p.grad.zero_()
            optimizer.step()
            for i in range(4):
                model(toys.inputs(64 + 8 * i)).backward()
            after = list(session.records)[-4:]
        assert before == [record.actions for record in after]
        assert {"plan"} == {record.phase for record in after}
        assert 0 == session.summary().steps_over


def _requested(which):
    """Return the bytes requested of sim:0, now or at their peak."""
    return torch.accelerator.memory_stats(0)[f"requested_bytes.all.{which}"]


@pytest.mark.sim
class TestOnAnAccelerator:
    """State and working memory, by an allocator like CUDA's."""

    def _stepped(self, toys, make, n_steps=3):
        """Step under watch; return what the watch and what the allocator says."""
        device = torch.device("sim:0")
        model = toys.chain(4, width=64).to(device)
        watch = OptimizerWatch(model, AllocatorMeter(device))
        watch.start()
        optimizer = make(model.parameters())
        told = watch.state_to_come_bytes
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        start = _requested("current")
        excess = 0
        for _ in range(n_steps):
            level = _requested("current")
            optimizer.step()
            excess = _requested("peak") - level
        watch.remove()
        return SimpleNamespace(
            n_tensors=len(list(model.parameters())),
            n_bytes=sum(parameter.nbytes for parameter in model.parameters()),
            most=max(parameter.nbytes for parameter in model.parameters()),
            told=told,
            state_bytes=watch.state_bytes,
            excess_bytes=watch.excess_bytes,
            made=_requested("current") - start,
            excess=excess,
        )

    @pytest.mark.parametrize("kind", _ON_SIM)
    def test_state_and_excess_are_the_allocators(self, toys, sim, kind):
        """To the byte, as requested of the allocator."""
        make, n_copies = _ON_SIM[kind]
        seen = self._stepped(toys, make)
        assert seen.made == seen.state_bytes
        assert 0 <= seen.state_bytes - seen.told <= 4 * seen.n_tensors
        assert n_copies * seen.n_bytes == seen.told or not n_copies
        assert 0 < seen.told
        assert seen.excess == seen.excess_bytes

    def test_foreach_needs_temporaries_of_all_parameters(self, toys, sim):
        """One by one the largest parameter's are needed, together those of all."""
        foreach = self._stepped(toys, lambda p: optim.AdamW(p, foreach=True))
        single = self._stepped(toys, lambda p: optim.AdamW(p, foreach=False))
        default = self._stepped(toys, optim.AdamW)
        assert foreach.n_bytes <= foreach.excess_bytes <= 2.5 * foreach.n_bytes
        assert single.most <= single.excess_bytes <= 4 * single.most
        assert foreach.excess_bytes == default.excess_bytes

    def test_counts_of_steps_on_the_cpu_are_not_the_devices(self, toys, sim):
        """AdamW counts its steps on the CPU, unless it is capturable."""
        plain = self._stepped(toys, optim.AdamW)
        on_device = self._stepped(toys, lambda p: optim.AdamW(p, capturable=True))
        assert 2 * plain.n_bytes == plain.state_bytes
        assert plain.state_bytes + 4 * plain.n_tensors == on_device.state_bytes

    def test_offloaded_state_is_not_the_devices(self, toys, sim):
        """An optimizer that keeps its state on the CPU holds nothing on the device."""

        class Offloading(optim.Optimizer):
            """Makes its state on the host."""

            def __init__(self, parameters):
                super().__init__(parameters, {})

            def step(self, closure=None):
                """Copy the gradients there."""
                for group in self.param_groups:
                    for p in group["params"]:
                        self.state[p]["mean"] = p.grad.to("cpu", copy=True)

        seen = self._stepped(toys, Offloading)
        assert (0, 0.0, 0) == (seen.state_bytes, seen.told, seen.made)
        assert (0, 0.0) == (seen.excess, seen.excess_bytes)
