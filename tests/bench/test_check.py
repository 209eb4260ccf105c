"""A first look at a device: lines, rows as they come, and the script around them."""

from __future__ import annotations

import torch

from benchmarks import check
from benchmarks.check import INFORMATION, MISSED, device


def test_a_failing_group_ends_in_a_line(monkeypatch):
    """Its lines so far stay, and its error's first line is seen."""

    def versions(device):
        yield check.told("before", 1)
        msg = "no such kernel\nat line 7"
        raise RuntimeError(msg)

    monkeypatch.setattr(device, "versions", versions)

    lines = list(check.run_group("versions", torch.device("cpu")))

    assert [INFORMATION, MISSED] == [line.verdict for line in lines]
    assert "RuntimeError: no such kernel" == lines[1].seen
