"""The ways to train that `mimose advise` compares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from mimose.bench.device import is_cpu
from mimose.planners import Everywhere

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
    plans: bool = False
    """Whether it does something else at another budget."""
    passes: int = 0
    """Over a few sizes, that it learns from before it is measured."""
    why_not: Callable[[nn.Module, str], str] = field(default=lambda _, __: "")
    """Takes the model and the kind of device; says why it cannot be had, or nothing."""


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
        Method(name="none", what="plain training: everything is kept"),
        Method(
            name="mimose",
            what="a plan for every shape within the budget, of keep and recompute",
            options={"actions": "exact", "cost": "seconds"},
            plans=True,
            passes=4,
        ),
        Method(
            name="mimose-fine",
            what="the same, with all exact actions",
            options={"actions": "fine", "cost": "seconds"},
            plans=True,
            passes=10,
        ),
        Method(
            name="full", what="every layer is recomputed", options={"planner": "full"}
        ),
        Method(
            name="every-2",
            what="every second layer is recomputed",
            options={"planner": "every-2"},
        ),
        _everywhere("lean", "every layer rebuilds what costs no matrix product"),
        _everywhere(
            "pool",
            "what only weights' gradients read is averaged by 2",
            is_exact=False,
        ),
        _everywhere("quantize", "activations are held in 8 bits", is_exact=False),
        _everywhere(
            "offload", "activations wait in the host's memory", why_not=_why_no_host
        ),
        Method(
            name="accumulate",
            what=f"gradients of {PARTS} smaller batches are added up",
            parts=PARTS,
        ),
        Method(
            name="sdpa",
            what="plain training with fused attention",
            edit=_use_sdpa,
            why_not=_why_no_sdpa,
        ),
        Method(
            name="rows",
            what="plain training with the loss by chunks of rows",
            options={"planner": "none"},
        ),
    )
}
"""By name, in the order of reports."""
