"""A model on several devices is refused by name; small things on the CPU are not."""

import pytest
import torch

import mimose
from mimose.model.placement import only_device

_CPU = torch.device("cpu")


def test_weights_without_memory_are_refused(toys):
    """A model on meta holds nothing, in part or as a whole."""
    with pytest.raises(mimose.MimoseError, match=r"[\d,]+ bytes on meta"):
        mimose.attach(toys.chain(3, width=14).to("meta"), "1GiB")
    model = toys.chain(3)
    model.blocks[1].to("meta")
    with pytest.raises(mimose.MimoseError, match="on meta"):
        mimose.attach(model, "1GiB")


def test_accelerates_own_offloading_is_refused(toys):
    """The same for a model that accelerate itself has dispatched."""
    accelerate = pytest.importorskip("accelerate")
    model = accelerate.cpu_offload(toys.chain(2), execution_device=_CPU)
    with pytest.raises(mimose.MimoseError, match="device_map"):
        mimose.attach(model, "1GiB")


@pytest.mark.sim
class TestOnAnAccelerator:
    """With two devices beside the CPU."""

    def test_two_devices_are_refused(self, toys, sim):
        """The message says how many bytes are where; nothing is left behind."""
        model = toys.chain(4, width=64).to("sim:0")
        model.blocks[2].to("sim:1")
        before = {name: dict(vars(m)) for name, m in model.named_modules()}
        message = r"2 devices \(215,552 bytes on sim:0, 66,304 bytes on sim:1\)"
        with pytest.raises(mimose.MimoseError, match=message):
            mimose.attach(model, "1GiB")
        assert before == {name: dict(vars(m)) for name, m in model.named_modules()}

    def test_weights_left_on_the_cpu_are_refused(self, toys, sim):
        """An embedding that stayed on the CPU is on another device."""
        model = toys.chain(2, width=64).to("sim")
        model.table = torch.nn.Embedding(100, 64)
        with pytest.raises(mimose.MimoseError, match="25,600 bytes on cpu"):
            mimose.attach(model, "1GiB")

    def test_a_counter_on_the_cpu_is_fine(self, toys, sim):
        """A number on the CPU, though it comes first, does not tell the device."""
        model = torch.nn.Sequential(torch.nn.Module(), toys.chain(2, width=64))
        model[1].to("sim")
        model[0].register_parameter("scale", torch.nn.Parameter(torch.ones(())))
        model[0].register_buffer("count", torch.zeros((), dtype=torch.long))
        assert torch.device("sim:0") == only_device(model)
        mimose.attach(model, "1GiB", meter="allocator").detach()

    def test_a_model_moved_after_attach_is_refused(self, toys, sim):
        """The budget would be about the device that it left."""
        model = toys.chain(3)
        with mimose.attach(model, "1TiB") as session:
            model(toys.inputs()).backward()
            model.to("sim")
            with pytest.raises(mimose.MimoseError, match=r"after attach"):
                model(toys.inputs().to("sim"))
            assert 1 == len(session.records)
            model.to("cpu")
            model(toys.inputs()).backward()
        assert not toys.leftovers(model)
