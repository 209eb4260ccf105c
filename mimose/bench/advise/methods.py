"""The ways to train that `mimose advise` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from mimose.bench.device import is_cpu
from mimose.planners import Everywhere

PLAIN = "none"
"""The name of training without any method."""
PARTS = 4
"""Into so many smaller batches accumulation cuts one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One way to train."""

    name: str
    what: str
    """One line for people."""
    options: Mapping[str, Any] | None = None
    """What `mimose.attach` is given; None for training without it."""
    edit: Callable[[nn.Module], None] = field(default=lambda _: None)
    """Changes the model before anything else."""
    parts: int = 1
    """Into how many smaller batches one is cut."""
    is_exact: bool = True
    """Whether gradients are plain training's, but for how floating point rounds."""
    mixes: bool = False
    """Whether it is so only where no layer compares the samples of a batch."""
    plans: bool = False
    """Whether it does something else at another budget."""
    passes: int = 0
    """Over a few sizes, that it learns from before it is measured."""
    why_not: Callable[[nn.Module, str], str] = field(default=lambda _, __: "")
    """Takes the model and the kind of device; says why it cannot be had, or nothing."""


def compares_samples(model: nn.Module) -> bool:
    """Tell whether a layer's output for one sample depends on the others of a batch.

    That is a batch norm, of those that can be told.
    """
    return any(isinstance(each, _BatchNorm) for each in model.modules())


def _everywhere(action: str, what: str, **others: Any) -> Method:
    options = {"actions": ("keep", action, "recompute"), "planner": Everywhere(action)}
    return Method(name=action, what=what, options=options, **others)


def _use_sdpa(model: nn.Module) -> None:
    model.set_attn_implementation("sdpa")  # type: ignore[operator]


def _why_no_sdpa(model: nn.Module, _kind: str) -> str:
    config = getattr(model, "config", None)
    if not hasattr(model, "set_attn_implementation") or config is None:
        return "the model has no attention that could be switched"
    if getattr(config, "_attn_implementation", None) != "eager":
        return "the model's attention is not eager: it is fused already"
    if not getattr(model, "_supports_sdpa", False):
        return f"{type(model).__name__} has no fused attention"
    return ""


def _why_no_host(_model: nn.Module, kind: str) -> str:
    return "a model on a CPU is on the host already" if is_cpu(kind) else ""


METHODS: Mapping[str, Method] = {
    each.name: each
    for each in (
        Method(name=PLAIN, what="plain training: all that backward needs is kept"),
        Method(
            name="mimose",
            what="for each input size, as many layers as fit keep what backward needs; "
            "the others compute it a second time",
            options={"actions": "exact"},
            plans=True,
            passes=4,
        ),
        Method(
            name="full",
            what="every layer computes a second time what backward needs",
            options={"planner": "full"},
        ),
        Method(
            name="every-2",
            what="every second layer computes a second time what backward needs",
            options={"planner": "every-2"},
        ),
        _everywhere(
            "lean", "every layer computes again what is cheap: no matrix products"
        ),
        Method(
            name="accumulate",
            what=f"{PARTS} smaller batches, one by one, their gradients added up",
            parts=PARTS,
            mixes=True,
        ),
        Method(
            name="sdpa",
            what="plain training with fused attention, which keeps no matrix of it",
            edit=_use_sdpa,
            why_not=_why_no_sdpa,
        ),
        Method(
            name="mimose-fine",
            what="as mimose, with every exact way in which a layer can hold less",
            options={"actions": "fine"},
            plans=True,
            passes=10,
        ),
        _everywhere(
            "offload",
            "what backward needs waits in the host's memory",
            why_not=_why_no_host,
        ),
        _everywhere(
            "pool",
            "part of what backward needs is averaged, two values to one",
            is_exact=False,
        ),
        _everywhere(
            "quantize", "what backward needs is held in 8 bits", is_exact=False
        ),
    )
}
"""By name, in the order of reports, and in which they are measured: those that may be
left out for lack of time come last."""
