"""torch.sim as a device module: devices, streams, events, copies, modules."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

pytestmark = pytest.mark.sim


def test_it_is_the_accelerator(sim):
    """Torch sees two devices of the name, by way of this module."""
    assert "sim" == torch.accelerator.current_accelerator().type
    assert 2 == torch.accelerator.device_count() == sim.device_count()
    assert torch.get_device_module("sim:1") is sim


def test_current_device(sim):
    """A device is current within its block, for new tensors as well."""
    with sim.device("sim:1"):
        inside = sim.current_device(), torch.empty(1, device="sim").device.index

    assert (1, 1) == inside
    assert 0 == sim.current_device()


def test_properties(sim):
    """A device tells its name and its memory."""
    sim.set_total_memory(2**20, 1)

    assert ("simulated accelerator 1", 2**20) == (
        sim.get_device_name("sim:1"),
        sim.get_device_properties(1).total_memory,
    )


@pytest.mark.parametrize("device", [2, -1, "sim:2", "cpu", "cuda:0"])
def test_other_devices_are_refused(sim, device):
    """The error names the devices there are."""
    with pytest.raises((ValueError, RuntimeError), match="sim:0 to 1"):
        sim.mem_get_info(device)


def test_copies_between_devices():
    """A tensor goes round over both devices and comes back the same."""
    tensor = torch.randn(3, 5)
    there = tensor.to("sim:0").to("sim:1")

    assert 1 == there.device.index
    assert torch.equal(tensor, there.cpu())
    assert 1 == (there + 1).device.index


def test_operators_do_as_the_cpus():
    """Views, resizes, writes in place, results in a list: as on the CPU."""

    def work(device):
        x = torch.arange(24.0, device=device).reshape(4, 6)
        y = x.t().contiguous()[1:]
        y[0] += 3
        y[y > 10] = 0
        out = torch.empty(0, device=device)
        torch.mul(y, 2, out=out)
        parts = torch.split(out, 2)
        z = (
            torch.zeros(5, 4, device=device)
            .copy_(y)
            .index_add_(0, torch.tensor([1, 1], device=device), parts[0])
        )
        z.resize_(2, 3)
        complex_ = torch.view_as_complex(z[:, :2].contiguous()).conj()
        return [x, y, out, *parts, z, complex_.resolve_conj(), *torch.sort(y)]

    expected, actual = work("cpu"), [each.cpu() for each in work("sim")]

    assert [True] * len(expected) == list(map(torch.equal, expected, actual))


def test_losses_hold_as_much_as_on_other_devices():
    """mse_loss runs as the CPU's own kernel: no warning, and a result as large."""

    def work(device):
        x = torch.randn(256, 1024, device=device)
        loss = nn.functional.mse_loss(x, x * 2)
        return loss.shape, loss.untyped_storage().nbytes()

    assert work("cpu") == work("sim")


def test_layer_norm_holds_its_result_and_two_numbers_a_row(sim):
    """It is one kernel, as on CUDA, where torch would compose it of others."""
    x = torch.randn(1024, 256, device="sim")
    norm = nn.LayerNorm(256, device="sim")
    before = sim.memory_allocated()
    sim.reset_peak_memory_stats()
    result = norm(x)
    held = sim.memory_allocated() - before
    peak = sim.max_memory_allocated() - before

    assert 2**20 + 2 * 4096 == held == peak
    del result


def test_convolution_and_its_backward():
    """Torch leaves both to a device of one's own; they are the CPU's."""

    def work(device):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 2, 3))
        module = module.to(device)
        module(torch.ones(2, 3, 8, 8, device=device)).square().sum().backward()
        return [parameter.grad.cpu() for parameter in module.parameters()]

    assert [True] * 4 == list(map(torch.equal, work("cpu"), work("sim")))


def test_tied_weights_stay_tied():
    """Moving a module moves each parameter, as to CUDA, and replaces none."""
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    module[1].weight = module[0].weight
    before = module[0].weight
    module.to("sim")

    assert module[0].weight is module[1].weight is before
    assert "sim" == before.device.type


def test_a_module_is_copied_and_saved():
    """deepcopy, torch.save and torch.load keep values and device."""
    module = nn.Linear(3, 3).to("sim:1")
    twin = copy.deepcopy(module)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)

    assert torch.equal(module.weight, twin.weight)
    assert module.weight.data_ptr() != twin.weight.data_ptr()
    assert ("sim", 1) == (loaded["weight"].device.type, loaded["weight"].device.index)
    assert torch.equal(module.weight, loaded["weight"])


def test_pinned_memory():
    """It is told from the rest of the host's by its tensors, and by views of them."""
    pinned = torch.empty(4, pin_memory=True)

    assert [True, True, True, False] == [
        pinned.is_pinned(),
        pinned[1:].is_pinned(),
        torch.empty(4).pin_memory().is_pinned(),
        torch.empty(4).is_pinned(),
    ]


def test_events(sim):
    """An event has happened when it is recorded, and tells times."""
    first, last = sim.Event(enable_timing=True), sim.Event(enable_timing=True)
    first.record()
    last.record(sim.current_stream())

    assert last.query()
    assert 0 <= first.elapsed_time(last)
    assert isinstance(torch.Event(device="sim"), type(first))


def test_streams(sim):
    """Each device has one stream, also inside of a stream's block."""
    other = sim.Stream("sim:0")
    with sim.stream(other):
        inside = torch.accelerator.current_stream()

    assert sim.current_stream() == inside == other
    assert other.query()


def test_use_is_harmless_twice(sim):
    """A second call finds what the first has made."""
    from benchmarks.sim import use

    assert use() is sim is torch.sim
