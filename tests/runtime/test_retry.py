"""Running a step again: out of memory in forward and in backward."""

import copy
import logging

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import mimose
from mimose.memory.out_of_memory import is_out_of_memory

_OUT_OF_MEMORY = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of",
    "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
    "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
    "Unable to find a valid cuDNN algorithm to run convolution",
    "FIND was unable to find an engine to execute this computation",
    "cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(h)`",
    "HIP out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of",
    "miopenStatusAllocFailed",
    "XPU out of memory. Tried to allocate 1.00 GiB. GPU 0 has a total capacity of",
    "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    "MPS backend out of memory (MPS allocated: 8.00 GB, max allowed: 9.07 GB).",
    "NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled cuda error, NCCL version "
    "2.21.5\nLast error:\nCuda failure 2 'out of memory'",
    "[enforce fail at alloc_cpu.cpp:117] err == 0. DefaultCPUAllocator: can't allocate "
    "memory: you tried to allocate 8 bytes. Error code 12 (Cannot allocate memory)",
)
_OTHERS = (
    "mat1 and mat2 shapes cannot be multiplied (3x4 and 5x6)",
    "CUDA error: device-side assert triggered",
    "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasSgemm(handle)`",
    "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR",
    "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that "
    "dataloader's workers are out of shared memory.",
    "out of resource: shared memory, Required: 264192, Hardware limit: 232448.",
    "NCCL error in: ProcessGroupNCCL.cpp:1275, unhandled system error",
    "the index is out of range, and no memory was allocated",
)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        *[(RuntimeError(text), True) for text in _OUT_OF_MEMORY],
        *[(RuntimeError(text), False) for text in _OTHERS],
        (ValueError("out of memory"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_out_of_memory_is_told_from_other_errors(error, expected):
    """Allocations that fail have several names; other errors are not swallowed."""
    assert expected == is_out_of_memory(error)


class _Counts(dict):
    """Numbers that nobody puts back."""


class _Hungry(nn.Module):
    """A block with running statistics and dropout that runs out of memory on call.

    `failures` counts down in forward, `backward_failures` in backward; they are kept
    where a step that is run again does not put them back.
    """

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.Sequential(nn.BatchNorm1d(width))
        self.dropout = nn.Dropout(0.2)
        self.counts = _Counts(failures=0, backward_failures=0, n_forwards=0)

    def forward(self, x):
        self.counts["n_forwards"] += 1
        y = self.dropout(torch.relu(self.norm(self.linear(x))))
        if self.counts["failures"]:
            self.counts["failures"] -= 1
            msg = "out of memory, by way of trial"
            raise torch.OutOfMemoryError(msg)
        if self.counts["backward_failures"]:
            y.register_hook(self._fail)
        return x + y

    def _fail(self, _):
        if self.counts["backward_failures"]:
            self.counts["backward_failures"] -= 1
            msg = "out of memory, by way of trial"
            raise torch.OutOfMemoryError(msg)


def _hungry(toys):
    return toys.chain(4, make=_Hungry)


@pytest.mark.parametrize("planner", ["none", "planned"])
def test_out_of_memory_in_forward(toys, meter, planner, caplog):
    """The forward is run again with everything recomputed, exactly and loudly."""
    model = _hungry(toys)
    batches = [toys.inputs()] * 8
    with toys.untracked():
        expected = toys.train(copy.deepcopy(model), batches)
    chosen = toys.FixedActions(0, 0, 1, 0) if planner == "planned" else planner
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    with (
        caplog.at_level(logging.WARNING, logger="mimose"),
        mimose.attach(model, "1TiB", planner=chosen, meter=meter) as session,
    ):
        torch.manual_seed(23)
        actual = []
        for i, batch in enumerate(batches):
            model.blocks[2].counts["failures"] = int(i == 5)
            loss = model(batch)
            loss.backward()
            actual.append(toys.note(model, loss))
            del loss
            optimizer.step()
            optimizer.zero_grad()
    assert [] == toys.differences(expected, actual)
    assert [0, 0, 0, 0, 0, 1, 0, 0] == [r.retries for r in session.records]
    record = session.records[5]
    assert ("fallback", {"recompute"}) == (record.phase, set(record.actions))
    assert "OutOfMemoryError in forward" in record.reason
    assert record.observed_peak_bytes is not None
    assert "step 5" in caplog.text
    assert "runs again with everything recomputed" in caplog.text
    assert 1 == session.summary().retries


def test_cached_parametrizations_are_computed_again(toys, meter):
    """Buffers change as a weight is computed, and are put back with the cache."""
    model = _hungry(toys)
    for block in model.blocks:
        parametrizations.spectral_norm(block.linear)
    bare = copy.deepcopy(model)
    with mimose.attach(model, "1TiB", meter=meter) as session:
        for trained in (bare, model):
            trained.blocks[2].counts["failures"] = int(trained is model)
            torch.manual_seed(3)
            with parametrize.cached():
                trained(toys.inputs()).backward()
        assert 1 == session.summary().retries
    for trained, expected in zip(model.buffers(), bare.buffers(), strict=True):
        assert torch.equal(expected, trained)


def test_out_of_memory_twice_is_the_users(toys):
    """If recomputing everything does not help, the error comes through."""
    model = _hungry(toys)
    with mimose.attach(model, "1TiB", planner="none") as session:
        model.blocks[1].counts["failures"] = 2
        with pytest.raises(torch.OutOfMemoryError):
            model(toys.inputs())
        model(toys.inputs()).backward()
    assert [1, 0] == [record.retries for record in session.records]
    assert "forward raised OutOfMemoryError" == session.records[0].reason


@pytest.mark.parametrize(("planner", "accumulates"), [("none", False), ("auto", True)])
def test_out_of_memory_in_backward(toys, meter, planner, accumulates):
    """`session.step` puts gradients, statistics and random state back, and repeats."""
    model = _hungry(toys)
    x = toys.inputs()

    def step(model, run=lambda closure: closure()):
        torch.manual_seed(4)
        for number in range(5):
            if not accumulates:
                model.zero_grad()
            if number == 2:  # the step that fails is the first with this module
                model.blocks[1].norm[0] = copy.deepcopy(model.blocks[1].norm[0])

            def closure():
                loss = model(x)
                loss.backward()
                return loss.detach()

            loss = run(closure)
        return toys.note(model, loss)

    with toys.untracked():
        expected = step(copy.deepcopy(model))
    with mimose.attach(model, "1TiB", planner=planner, meter=meter) as session:
        n_calls = 0

        def run(closure):
            nonlocal n_calls
            n_calls += 1
            model.blocks[1].counts["backward_failures"] = int(n_calls == 3)
            return session.step(closure)

        actual = step(model, run)
    assert [] == toys.differences([expected], [actual])
    assert 6 == len(session.records)
    assert [0, 0, 0, 1, 0, 0] == [record.retries for record in session.records]
    if planner == "auto":
        assert ("fallback", {"recompute"}) == (
            session.records[3].phase,
            set(session.records[3].actions),
        )
        assert "the step is run again" == session.records[3].reason


def test_a_step_within_a_step_is_undone_too(toys):
    """The outer one restores running statistics as it found them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(16), toys.chain(2))
    seen, x = [], torch.randn(8, 16)

    def fails_once():
        seen.append(model[0].num_batches_tracked.item())
        session.step(lambda: model(x).sum().backward())
        if len(seen) == 1:
            raise torch.OutOfMemoryError(_OUT_OF_MEMORY[0])

    with mimose.attach(model, "1TiB", layers=toys.Block) as session:
        for _ in range(3):
            session.step(lambda: model(x).sum().backward())
            model.zero_grad()
        session.step(fails_once)
    assert [3, 3] == seen
    assert 4 == model[0].num_batches_tracked
