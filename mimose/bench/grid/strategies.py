"""Ways to train within a budget, with one small interface.

They are this library's session with its planners, the published Mimose system rebuilt,
and transformers' activation checkpointing.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from torch import nn
from torch.utils.checkpoint import checkpoint

from mimose.actions.registry import choose, menu_of
from mimose.bench.child import RunFailedError
from mimose.bench.grid.traces import Sizes
from mimose.bench.grid.workloads import size_of
from mimose.memory.meters import Meter
from mimose.model.layers import find_layers
from mimose.model.patch import Patch
from mimose.planners import Greedy, Optimal, Pattern, Plan, Planner, PlanningProblem
from mimose.planners.actions import EXACT_MENU, FINE_MENU
from mimose.predictors import Estimator
from mimose.session import Session, attach
from mimose.tensors import storages_in

WHOLE_LAYERS = EXACT_MENU.names
"""Keep or recompute: the choice of Mimose and most other systems."""
FINE = FINE_MENU.names
"""All exact actions that stay on the device."""
_AMPLE_BYTES = 2**50
_Actions = str | tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """What a strategy gets before training begins."""

    model: nn.Module
    device: torch.device
    meter: Meter
    headroom_bytes: int
    """The budget for a step's growth; very large for strategies without a budget."""
    sizes: Sequence[Sizes]
    """The sizes of all batches."""
    longest: Sizes
    """The sizes of the batch that needs most memory."""
    try_step: Callable[[Mapping[str, int]], None]
    """Runs a forward and a backward on a batch of these sizes, and drops gradients."""
    shared: Path
    """A folder that all processes of a workload share."""

    def budget_bytes(self) -> int:
        """Return the budget if training began now: what is held, and the headroom."""
        return self.meter.settled_bytes(0) + self.headroom_bytes


class Facts(NamedTuple):
    """What a strategy reports of its last step."""

    phase: str = ""
    predicted_growth_bytes: float | None = None
    recomputed_flops: int | None = None
    """Recomputed FLOPs; None if not known, then they are counted in a separate step."""
    plan_seconds: float = 0.0
    cache_hit: bool = False
    retries: int = 0
    plan: str = ""
    """A letter for each layer call, as the session's menu has it: k keep, r
    recompute."""


class Applied:
    """A strategy applied to a model; this one does nothing."""

    budget_bytes: int | None = None
    """Its budget; None if it has none."""

    def before_step(self, sizes: Mapping[str, int]) -> None:
        """Prepare for a batch of these sizes."""

    def facts(self) -> Facts:
        """Report the last step."""
        return Facts()

    def phase_of(self, phase: str) -> None:
        """Behave as in an earlier phase, to count FLOPs."""

    def close(self) -> None:
        """Restore the model."""


@dataclass(frozen=True, slots=True)
class Strategy:
    """One way to train."""

    name: str
    what: str
    """One line for people."""
    apply: Callable[[Setup], Applied]
    heeds_budget: bool = False
    """Whether it depends on the budget."""


class _Planned(Applied):
    """A session of this library, with its menu of actions."""

    def __init__(self, session: Session, actions: _Actions) -> None:
        self._session = session
        self._menu = menu_of(choose(actions))
        self.budget_bytes = session.budget

    def facts(self) -> Facts:
        """Return what the session has recorded."""
        record = self._session.records[-1]
        return Facts(
            phase=record.phase,
            predicted_growth_bytes=record.predicted_growth_bytes,
            recomputed_flops=record.recomputed_flops,
            plan_seconds=record.plan_seconds,
            cache_hit=record.cache_hit,
            retries=record.retries,
            plan=self._menu.codes(record.actions),
        )

    def close(self) -> None:
        """Detach."""
        self._session.detach()


def _attach(
    setup: Setup,
    budget_bytes: int,
    planner: str | Planner,
    actions: _Actions,
    predictor: Estimator | None = None,
) -> Session:
    return attach(
        setup.model,
        budget_bytes,
        actions=actions,
        planner=planner,
        predictor=predictor,
        meter=setup.meter,
        on_infeasible="warn",
    )


def _session(
    planner: str | Callable[[Setup], Planner], actions: _Actions = WHOLE_LAYERS
) -> Callable[[Setup], Applied]:
    """Return a function that attaches a session with a planner."""

    def apply(setup: Setup) -> Applied:
        made = planner if isinstance(planner, str) else planner(setup)
        session = _attach(setup, setup.budget_bytes(), made, actions)
        return _Planned(session, actions)

    return apply


def _sklearn(setup: Setup) -> Applied:
    """Attach with the regressor of the Mimose paper, by scikit-learn: a quadratic."""
    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures

    predictor = make_pipeline(PolynomialFeatures(2), LinearRegression())
    budget_bytes = setup.budget_bytes()  # with what the import has left held
    session = _attach(setup, budget_bytes, "auto", WHOLE_LAYERS, predictor)
    return _Planned(session, WHOLE_LAYERS)


_MOST_PASSES = 16
"""The most passes over all sizes, or the longest, to learn before training."""


def _static(setup: Setup, actions: _Actions = WHOLE_LAYERS) -> Planner:
    """Return the plan that a session makes for the longest batch, for all batches."""
    with _attach(setup, setup.budget_bytes(), "auto", actions) as session:
        for _ in range(_MOST_PASSES):
            setup.try_step(setup.longest)
            record = session.records[-1]
            if record.phase == "plan" and record.predicted_growth_bytes is not None:
                break
        return Pattern("static", record.actions)


class Oracle:
    """The exact optimum within the whole budget, without a safety margin."""

    name = "oracle"

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = float(budget_bytes)

    def plan(self, problem: PlanningProblem) -> Plan:
        """Solve the problem with the original budget."""
        whole = dataclasses.replace(problem, budget_bytes=self._budget_bytes)
        return Optimal().plan(whole)


def _with_budget(
    make_planner: Callable[[Setup], Callable[[int], Planner]],
    actions: tuple[str, ...] = WHOLE_LAYERS,
) -> Callable[[Setup], Applied]:
    """Return a function that attaches a session that has learned on all sizes.

    The planner is made with the budget, which includes what learning has left held.
    """

    def apply(setup: Setup) -> Applied:
        planner = make_planner(setup)
        name = "-".join(actions)
        path = setup.shared / f"learned-{name}-{setup.headroom_bytes}.json"
        with FileLock(path.with_suffix(".lock")):  # other processes use the same file
            if not path.exists():
                path.write_text(json.dumps(_learned(setup, actions)), "utf-8")
            learned = json.loads(path.read_text("utf-8"))
        budget_bytes = setup.budget_bytes()
        session = _attach(setup, budget_bytes, planner(budget_bytes), actions)
        session.load_state_dict(learned)
        return _Planned(session, actions)

    return apply


def _learned(setup: Setup, actions: _Actions) -> Mapping[str, Any]:
    """Run all sizes within the budget, then again until all actions were tried.

    Only kept calls try actions, so the budget for that is ample.
    """
    with _attach(setup, setup.budget_bytes(), "auto", actions) as teacher:
        _shows_more(setup, teacher)
        learned = teacher.state_dict()
    if actions == WHOLE_LAYERS:
        return learned
    with _attach(setup, _AMPLE_BYTES, "auto", actions) as teacher:
        teacher.load_state_dict(learned)
        for _ in range(_MOST_PASSES):
            if not _shows_more(setup, teacher):
                break
        return teacher.state_dict()


def _shows_more(setup: Setup, teacher: Session) -> bool:
    """Run each size once; return whether a step still tried an action."""
    shows = False
    for sizes in {tuple(each.items()): each for each in setup.sizes}.values():
        setup.try_step(sizes)
        record = teacher.records[-1]
        shows |= record.phase == "plan" and record.predicted_growth_bytes is None
    return shows


_COLLECTED = 10
"""Iterations of sheltered execution; the paper says 10 to 30."""
_ROUND_TO = 5
"""Tokens; the paper rounds height times width to 100 pixels."""
_ROUND_PIXELS_TO = 100


class _Block(Patch):
    """Runs one block: kept, under a checkpoint, or twice to measure it."""

    def __init__(self, module: nn.Module, meter: Meter, device: torch.device) -> None:
        super().__init__(module, self._forward)
        self._meter = meter
        self._devices = [device] if device.type == "cuda" else []
        self.is_measured = True
        self.is_recomputed = True
        self.sizes: list[tuple[int, float]] = []
        """The input's size and the bytes of the block's activations."""
        self.activation_bytes = 0.0

    def _forward(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: Any
    ) -> Any:
        """Run the block according to the phase and the plan."""
        if not torch.is_grad_enabled() or not (self.is_measured or self.is_recomputed):
            return original(*args, **kwargs)
        if self.is_measured:
            self._measure(args, kwargs)
        return checkpoint(original, *args, use_reentrant=False, **kwargs)

    def _measure(self, args: Any, kwargs: Any) -> None:
        with torch.random.fork_rng(devices=self._devices):
            before = self._meter.live_bytes()
            output = self.original(*args, **kwargs)
            taken = self._meter.live_bytes() - before
            own = sum(s.nbytes() for s in storages_in(output).values())
            del output
        self.activation_bytes += max(0.0, float(taken - own))


class PaperMimose(Applied):
    """The published Mimose system, rebuilt as a baseline.

    Liao et al., "Exploiting Input Tensor Dynamics in Activation Checkpointing for
    Efficient Training on GPU", IPDPS 2023: Algorithm 1 and the system around it, as the
    paper describes them. In the first iterations each block's forward runs twice, once
    to measure it and once under a checkpoint. A quadratic in one number, the input's
    size, is fitted once for each block and for the whole model. Plans are made once for
    each size rounded up to a multiple of 5. The authors subtract 0.5 to 1 GB from
    budgets of 4 to 8 by hand, because of fragmentation; this does not.
    """

    def __init__(self, setup: Setup) -> None:
        self._meter = setup.meter
        self.budget_bytes = setup.budget_bytes()
        found = find_layers(setup.model)
        self._names = tuple(name for name, _ in found)
        self._blocks = [_Block(m, setup.meter, setup.device) for _, m in found]
        self._whole: list[tuple[int, float]] = []
        self._fits: tuple[Callable[[float], Any], ...] = ()
        self._plans: dict[int, tuple[str, ...]] = {}
        self._n_steps = 0
        self._size = 0
        self._start_bytes = 0
        self._facts = Facts()
        self._is_open = False

    def before_step(self, sizes: Mapping[str, int]) -> None:
        """Choose a plan for the batch, or measure."""
        self._finish()
        began = time.perf_counter()
        self._size, self._start_bytes = size_of(sizes), self._meter.live_bytes()
        self._is_open = True
        if self._n_steps < _COLLECTED:
            self._facts = Facts(phase="collect", plan="r" * len(self._blocks))
            for block in self._blocks:
                block.is_measured = block.is_recomputed = True
            return
        if not self._fits:
            samples = (self._whole, *[block.sizes for block in self._blocks])
            self._fits = tuple(map(_quadratic, samples))
        step = _ROUND_PIXELS_TO if "height" in sizes else _ROUND_TO
        key = -(-self._size // step) * step
        is_known = key in self._plans
        if not is_known:
            self._plans[key] = self._plan(key)
        for block, action in zip(self._blocks, self._plans[key], strict=True):
            block.is_measured = False
            block.is_recomputed = action != "keep"
        self._facts = Facts(
            phase="plan",
            plan_seconds=time.perf_counter() - began,
            cache_hit=is_known,
            plan=EXACT_MENU.codes(self._plans[key]),
        )

    def facts(self) -> Facts:
        """Record the measurements of the last step, and report it."""
        self._finish()
        return self._facts

    def phase_of(self, phase: str) -> None:
        """Behave as in sheltered execution, or as after it."""
        self._n_steps = 0 if phase == "collect" else _COLLECTED

    def close(self) -> None:
        """Restore the forwards of the blocks."""
        for block in self._blocks:
            block.remove()

    def _finish(self) -> None:
        if not self._is_open:
            return
        self._is_open = False
        self._n_steps += 1
        if self._facts.phase != "collect":
            return
        total = 0.0
        for block in self._blocks:
            block.sizes.append((self._size, block.activation_bytes))
            total += block.activation_bytes
            block.activation_bytes = 0.0
        peak = self._meter.peak_bytes()
        self._whole.append((self._size, peak - self._start_bytes + total))

    def _plan(self, size: int) -> tuple[str, ...]:
        """Run Algorithm 1 with the estimates for a size."""
        whole, *blocks = (float(fit(size)) for fit in self._fits)
        held = np.array([[max(0.0, each), 0.0] for each in blocks])
        rest = whole - float(held[:, 0].sum())
        n_calls = len(blocks)
        zeros = np.zeros((n_calls, 2))
        problem = PlanningProblem(
            calls=self._names,
            actions=WHOLE_LAYERS,
            allowed=np.ones((n_calls, 2), dtype=bool),
            held_bytes=held,
            forward_transient_bytes=zeros,
            backward_transient_bytes=zeros,
            backward_retained_bytes=np.zeros(n_calls),
            cost=zeros,
            gap_bytes=np.zeros(n_calls + 1),
            gap_transient_bytes=np.zeros(n_calls + 1),
            start_bytes=max(0.0, self._start_bytes + rest),
            budget_bytes=float(self.budget_bytes or 0),
            host_bytes=zeros,
            host_budget_bytes=0.0,
        )
        return Greedy().plan(problem).actions


def _quadratic(samples: list[tuple[int, float]]) -> Callable[[float], Any]:
    sizes, values = np.array(samples, dtype=float).T
    degree = min(2, len(set(sizes.tolist())) - 1)
    return np.polynomial.Polynomial.fit(sizes, values, degree)


class _Transformers(Applied):
    """Transformers' own activation checkpointing, with its options."""

    def __init__(self, setup: Setup, **options: Any) -> None:
        model: Any = setup.model
        if not hasattr(model, "gradient_checkpointing_enable"):
            msg = f"{type(model).__name__} is no model of transformers"
            raise RunFailedError(msg)
        name = "activation_checkpointing"  # as transformers 5 calls it
        if not hasattr(model, f"{name}_enable"):
            name = "gradient_checkpointing"
        try:
            getattr(model, f"{name}_enable")(**options)
        except TypeError as error:
            msg = f"this version of transformers: {error}"
            raise RunFailedError(msg) from error
        self._disable = getattr(model, f"{name}_disable")

    def close(self) -> None:
        """Switch it off."""
        self._disable()


_hf_every_2 = functools.partial(_Transformers, every_n_layers=2)
_oracle, _oracle_menu = (
    _with_budget(lambda _: Oracle),
    _with_budget(lambda _: Oracle, FINE),
)
_static_menu = _session(functools.partial(_static, actions=FINE), FINE)
_exact, _fine = _session("auto", "whole"), _session("auto", FINE)
STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("none", "plain training, everything kept", lambda _: Applied()),
        Strategy("full", "recompute every layer", _session("full")),
        Strategy("every-2", "recompute every second layer", _session("every-2")),
        Strategy("static", "one plan, for the longest batch", _session(_static), True),
        Strategy("mimose", "this library, a plan for each shape", _exact, True),
        Strategy("mimose-sklearn", "mimose, with a quadratic", _sklearn, True),
        Strategy("oracle", "the optimum, with every batch known", _oracle, True),
        Strategy("static-menu", "static, finer actions", _static_menu, True),
        Strategy("mimose-menu", "mimose, with all exact actions", _fine, True),
        Strategy("oracle-menu", "oracle, finer", _oracle_menu, True),
        Strategy("mimose-paper", "the published Mimose, rebuilt", PaperMimose, True),
        Strategy("hf-full", "transformers: checkpoint every layer", _Transformers),
        Strategy("hf-every-2", "transformers: every second layer", _hf_every_2),
    )
}
"""All strategies, by name."""
