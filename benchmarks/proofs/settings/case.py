"""What a training setting is: modules to attach to, and a step to run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from mimose.session import Session

Outcome: TypeAlias = Literal["planned", "recomputed", "refused", "error"]
"""`planned` where at least one step was run under a plan, `recomputed` where none was,
`refused` where mimose raised an error of its own, `error` where anything else did."""

ROWS, VOCABULARY = 8, 64


class World:
    """What a setting is built from: a device, and data that a seed settles."""

    def __init__(self, device: str, seed: int) -> None:
        self.device = device
        self.gradients: list[Tensor] = []
        """Those that the last optimizer step was given."""
        self._generator = torch.Generator().manual_seed(seed)

    def floats(self, *shape: int) -> Tensor:
        """Draw normal numbers."""
        return torch.randn(shape, generator=self._generator).to(self.device)

    def integers(self, high: int, *shape: int) -> Tensor:
        """Draw integers from 0 to below `high`."""
        drawn = torch.randint(high, shape, generator=self._generator)
        return drawn.to(self.device)

    def ids(self, length: int, rows: int = ROWS) -> Tensor:
        """Draw texts: tokens from 3 up, all of one length."""
        return 3 + self.integers(VOCABULARY - 3, rows, length)

    def number(self, low: int, high: int) -> int:
        """Draw a number, both ends included."""
        return low + int(self.integers(high - low + 1, 1))

    def adamw(self, *modules: nn.Module) -> torch.optim.Optimizer:
        """Make an optimizer of all that is trained in some modules."""
        parameters = [p for m in modules for p in m.parameters() if p.requires_grad]
        return torch.optim.AdamW(parameters, lr=1e-3)

    def train(
        self, model: nn.Module, loss: Callable[[int], Tensor], **changes: Any
    ) -> Training:
        """Return the training of one model, moved to the device, with AdamW.

        The loss is of one batch of a length; `changes` are those of `Training`.
        """
        model.to(self.device)
        optimizer = self.adamw(model)

        def step(length: int) -> Tensor:
            return self.descend(optimizer, loss(length))

        return Training(roots=[model], step=step, **changes)

    def descend(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
        """Do what follows a forward in most loops; return the loss."""
        loss.backward()  # type: ignore[no-untyped-call]
        return self.apply(optimizer, loss)

    def apply(self, optimizer: torch.optim.Optimizer, loss: Tensor) -> Tensor:
        """Step and forget the gradients, which are noted first; return the loss."""
        groups = optimizer.param_groups
        grads = [p.grad for group in groups for p in group["params"]]
        self.gradients = [g.detach().cpu().clone() for g in grads if g is not None]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()


def _nothing(_step: int, _sessions: Sequence[Session]) -> None:
    pass


@dataclass(kw_only=True)
class Training:
    """A setting, built."""

    roots: Sequence[nn.Module]
    """Each gets a session."""
    step: Callable[[int], Tensor]
    """Trains on one batch of a length; returns the loss."""
    others: Sequence[nn.Module] = ()
    """What is compared besides the roots."""
    lengths: tuple[int, int] = (16, 80)
    multiple: int = 4
    steps_before: int = 1
    """The step that tells what the longest batch needs comes after so many."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """For `mimose.attach`."""
    between: Callable[[int, Sequence[Session]], None] = _nothing
    """Done before each step under mimose, and not without it."""

    def state(self) -> dict[str, Tensor]:
        """Return copies of weights and buffers."""
        return {
            f"{index}.{name}": tensor.detach().cpu().clone()
            for index, module in enumerate((*self.roots, *self.others))
            for name, tensor in module.state_dict().items()
            if isinstance(tensor, Tensor)
        }


Builder: TypeAlias = Callable[[World], Training]


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """How people train, in small."""

    name: str
    what: str
    expects: Outcome
    says: str
    """A part of what mimose says: of a reason, a warning or an error."""
    build: Builder


SETTINGS: dict[str, Setting] = {}
"""All of them, by name."""


def setting(
    expects: Outcome = "planned", says: str = ""
) -> Callable[[Builder], Builder]:
    """Add a builder to the settings, under its own name: see `Setting`."""

    def add(build: Builder) -> Builder:
        name = build.__name__.replace("_", "-")
        what = (build.__doc__ or "").strip().splitlines()[0]
        SETTINGS[name] = Setting(
            name=name, what=what, expects=expects, says=says, build=build
        )
        return build

    return add
