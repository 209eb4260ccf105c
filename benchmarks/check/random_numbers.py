"""Whether the device's random state is put back exactly, and without copies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.check.line import Line, equal, impossible, judged
from benchmarks.check.training import DeviceLoop, jumping
from benchmarks.proofs.common import AMPLE_BYTES
from mimose.exact.random_state import DeviceRandom
from mimose.session import attach


def saved_and_put_back(device: torch.device) -> Iterator[Line]:
    """Draw, go elsewhere, come back, and draw again."""
    random = DeviceRandom(device)
    torch.rand(3, device=device)
    state = random.save()
    drawn = torch.rand(5, device=device)
    torch.manual_seed(99)
    torch.rand(7, device=device)
    random.put(state)
    same = torch.equal(drawn, torch.rand(5, device=device))
    yield judged(
        "drawn again past another seed", "equal", "equal" if same else "others", same
    )
    how = "as a copy" if random.is_copied else "by its place"
    yield equal("how the state is saved", "by its place", how)


def copies_of_a_step(device: torch.device) -> Iterator[Line]:
    """Count copies of the random state in steps that recompute every layer."""
    module: Any = torch.get_device_module(device)
    what = "copies of the random state in five recomputing steps"
    if not hasattr(module, "rng_copies"):
        yield impossible(what, f"{device.type} does not count them")
        return
    training = DeviceLoop(device)
    with attach(training.model, AMPLE_BYTES, planner="full", meter=training.meter):
        list(training.train(jumping(training.scale, 2)))
        before = module.rng_copies()
        list(training.train(jumping(training.scale, 5)))
    yield equal(what, 0, module.rng_copies() - before)


CHECKS = (saved_and_put_back, copies_of_a_step)
