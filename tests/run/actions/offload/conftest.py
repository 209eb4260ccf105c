"""Hooks that pack whatever is saved, as an action would."""

import contextlib

import pytest
import torch

from mimose.run.actions.offload.codec import Headroom, OffloadCodec
from mimose.run.actions.offload.copies import PlainCopies
from mimose.run.actions.offload.host import HostMemory
from mimose.run.actions.packing.base import Reader, Role, SavedStorage
from mimose.torch_private import base_of

CPU = torch.device("cpu")


class CountedCopies(PlainCopies):
    """Takes note of each copy; can be told to fail at one.

    Args:
        device: Where tensors come from.
    """

    def __init__(self, device=CPU):
        super().__init__(device)
        self.out, self.back, self.fails_at = [], [], None

    def to_host(self, source, pieces, headroom_bytes):
        """Copy, and take note of the bytes."""
        self._fail_at_last()
        self.out.append(source.nbytes)
        return super().to_host(source, pieces, headroom_bytes)

    def to_device(self, pieces, n_bytes, sent):
        """Copy, and take note of the bytes."""
        self._fail_at_last()
        self.back.append(n_bytes)
        return super().to_device(pieces, n_bytes, sent)

    def _fail_at_last(self):
        if self.fails_at == len(self.out) + len(self.back):
            msg = "the copy fails"
            raise RuntimeError(msg)


class Packing:
    """A codec over a budget, and hooks that offer it what is saved.

    Args:
        budget_bytes: Of the host.
        device: Whose storages are taken.
    """

    def __init__(self, budget_bytes=2**30, device=CPU):
        self.memory = HostMemory(budget_bytes, device)
        self.copies = CountedCopies(device)
        self.codec = OffloadCodec(self.memory, device, self.copies)

    @contextlib.contextmanager
    def call(self, headroom_bytes=0.0):
        """Pack all that is saved meanwhile, weights left out."""
        self.codec.begin_call(Headroom(0.0, headroom_bytes))
        with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
            yield

    def _pack(self, tensor):
        base = base_of(tensor)
        if isinstance(tensor if base is None else base, torch.nn.Parameter):
            return tensor
        saved = saved_storage(tensor)
        if not self.codec.takes(saved):
            return tensor
        packed = self.codec.pack(saved)
        if packed is None:
            return tensor
        return packed, (tensor.shape, tensor.stride(), tensor.storage_offset())


def saved_storage(tensor):
    """Tell of a tensor's storage, read by it alone."""
    tensor = tensor.detach()
    n_all = tensor.untyped_storage().nbytes() // tensor.element_size()
    whole = tensor.as_strided((n_all,), (1,), 0)
    return SavedStorage(whole, [Reader(Role.VALUE, tensor)], is_source=False)


def _unpack(packed):
    if isinstance(packed, torch.Tensor):
        return packed
    item, place = packed
    return item.unpack().as_strided(*place)


@pytest.fixture
def packing():
    """What packs: the class, to be made by the test."""
    return Packing


@pytest.fixture
def offered():
    """Tell of a tensor's storage: a function."""
    return saved_storage
