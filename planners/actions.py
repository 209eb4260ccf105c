"""The actions: what may happen to the activations of a layer call."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True, kw_only=True, slots=True)
class ActionSpec:
    """An action, as planners, reports and saved state see it."""

    name: str
    """The name in plans, records and state."""

    code: str
    """One letter for narrow columns, distinct within a menu."""

    is_exact: bool = True
    """Whether gradients stay equal to the last bit."""

    recomputes: bool = False
    """Whether its backward begins with the layer's forward."""

    rebuilds: bool = False
    """Whether the graph of a recomputation shows what it holds and takes."""

    needs_host: bool = False
    """Whether it copies tensors to the host's memory and back."""


KEEP = ActionSpec(name="keep", code="k")
SELECTIVE = ActionSpec(name="selective", code="s", rebuilds=True)
SELECTIVE_MORE = ActionSpec(name="selective_more", code="S", rebuilds=True)
SELECTIVE_ALL = ActionSpec(name="selective_all", code="a", rebuilds=True)
REBUILDING = (SELECTIVE, SELECTIVE_MORE, SELECTIVE_ALL)
"""Those that drop some of what a layer saves and rebuild it: each drops more."""
POOL = ActionSpec(name="pool", code="p", is_exact=False)
POOL_4 = ActionSpec(name="pool4", code="P", is_exact=False)
QUANTIZE = ActionSpec(name="quantize", code="q", is_exact=False)
QUANTIZE_4 = ActionSpec(name="quantize4", code="Q", is_exact=False)
OFFLOAD = ActionSpec(name="offload", code="o", needs_host=True)
OFFLOAD_INPUT = ActionSpec(
    name="offload_input", code="O", recomputes=True, needs_host=True
)
RECOMPUTE = ActionSpec(name="recompute", code="r", recomputes=True)


@dataclass(frozen=True)
class Menu:
    """The actions in use, in the order of `PlanningProblem.actions`.

    The first one keeps everything and costs nothing, as training without a plan. The
    last one is supported by every layer and holds little: steps are measured, and
    repeated after a failure, under it.
    """

    specs: tuple[ActionSpec, ...]

    @cached_property
    def names(self) -> tuple[str, ...]:
        """(K,) The names of the actions, as in `PlanningProblem.actions`."""
        return tuple(spec.name for spec in self.specs)

    @property
    def first(self) -> str:
        """The action that holds everything and costs nothing."""
        return self.specs[0].name

    @property
    def least(self) -> str:
        """The action that holds little and is supported by every layer."""
        return self.specs[-1].name

    @property
    def lossy(self) -> frozenset[str]:
        """The actions that change gradients."""
        return frozenset(spec.name for spec in self.specs if not spec.is_exact)

    def spec(self, name: str) -> ActionSpec:
        """Return the action of a name.

        Raises:
            ValueError: There is none.
        """
        return self.specs[self.names.index(name)]

    def codes(self, actions: Sequence[str]) -> str:
        """Return the actions of a plan, one letter each, such as ``"rrkk"``."""
        return "".join(self.spec(action).code for action in actions)


FINE_MENU = Menu((KEEP, *REBUILDING, RECOMPUTE))
"""All exact actions that use no host memory."""

EXACT_MENU = Menu((KEEP, RECOMPUTE))
"""The default of sessions: whole layers."""
