"""Makes the parts of a session, and gives each the others that it uses."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from mimose.actions.registry import menu_of, set_prices_and_checks
from mimose.cost.learner import Learner
from mimose.cost.model import CostModel
from mimose.cost.prices import prices_of
from mimose.cost.series import kinds_of
from mimose.distributed import Ranks, later_waits
from mimose.exactness.context import settle_flags
from mimose.exactness.findings import Findings
from mimose.exactness.layer import Layer
from mimose.exactness.rollback import Rollback
from mimose.inputs.describe import Describer
from mimose.loss_by_rows import LossChoice
from mimose.memory.meters import make_meter
from mimose.memory.wall import make_memory_limit
from mimose.model.patch import Patches
from mimose.model.placement import only_device
from mimose.policy.plans import Plans
from mimose.policy.policy import Policy
from mimose.records import Records
from mimose.runtime.budget import SessionBudget, read_budget
from mimose.runtime.driver import Decider, Driver
from mimose.runtime.last_steps import LastSteps
from mimose.runtime.layer_calls import LayerCalls
from mimose.runtime.learning import Learning
from mimose.runtime.optimizers import OptimizerWatch
from mimose.runtime.options import Options
from mimose.runtime.retry import Retry
from mimose.runtime.seconds import StepSeconds
from mimose.runtime.step import Steps
from mimose.runtime.unplanned import Unplanned
from mimose.runtime.watched import PlanPrefetcher, ShapesToCome
from mimose.state import card_name
from mimose.worker import Worker

_OF_THE_MODEL = ("calls", "describer", "driver", "layers", "retry", "rollback", "steps")
"""The parts that hold the model, or layers of it."""


class Engine:
    """All parts of a session, which only the session holds.

    Args:
        model: The model.
        options: The settings.
        found: Names and modules of the layers.
        ranks: The ranks that agree with this one; None for none.

    Raises:
        MimoseError: The model's device cannot be planned for.
        OSError: The file for the records cannot be opened.
    """

    def __init__(
        self,
        model: nn.Module,
        options: Options,
        found: Sequence[tuple[str, nn.Module]],
        ranks: Ranks | None,
    ) -> None:
        self.ranks, self.device = ranks, only_device(model)
        names, modules = [name for name, _ in found], [module for _, module in found]
        settle_flags(self.device)
        late = later_waits(options.agree, model, names, modules, ranks)
        self.meter = meter = make_meter(options.meter, self.device)
        n_bytes, grace = read_budget(options.budget, options.grace, meter, self.device)
        # What learns.
        self.worker = Worker(is_inline=not options.refine)
        card, menu = card_name(self.device), menu_of(options.actions)
        prices = prices_of(self.device.type, card, options.byte_flops)
        set_prices_and_checks(options.actions, prices, options.checks)
        kinds = kinds_of(options.predictor, meter.noise_bytes)
        self.learner = Learner(CostModel(kinds, menu, prices=prices), self.worker)
        self.plans = plans = Plans(
            self.learner, options.planner, meter.noise_bytes, options.cache_size
        )
        raises = not options.warns and not meter.reads_peak
        self.policy = policy = Policy(plans, raises=raises)
        self.records = records = Records(options.record_to)
        self.seconds = seconds = StepSeconds(self.device, self.learner)
        # What keeps the budget. All optimizers' hooks refer to it, so none of these
        # holds the model.
        has_wall = options.wall and options.plans
        self.limit = limit = make_memory_limit(meter, n_bytes, has_wall=has_wall)
        self.unplanned = unplanned = Unplanned(model)
        begins, stepped = seconds.optimizer_begins, unplanned.stepped
        ended = seconds.optimizer_ended
        self.optimizers = watch = OptimizerWatch(model, limit, begins, [ended, stepped])
        self.budget = budget = SessionBudget(model, options, meter, limit, grace, watch)
        # What knows the model.
        self.patches = patches = Patches(model)
        self.findings = findings = Findings(
            names, self.learner, patches.use_one_graph, budget.use_grace
        )
        self.layers = [Layer(i, *each, findings) for i, each in enumerate(found)]
        if ranks is not None:
            ranks.restrict(self.layers, self.learner)
        self.describer = describer = Describer(model, self.device, modules)
        self.last_steps = LastSteps(describer.tables, policy.windows)
        self.losses = losses = LossChoice(plans)
        self.rollback = rollback = Rollback(model, self.layers, findings)
        # What runs steps.
        self.calls = calls = LayerCalls(
            model, self.layers, options.actions, findings, unplanned, options.action_at
        )
        learning = Learning(records, seconds, policy, budget, calls.gauges, describer)
        self.steps = steps = Steps(budget, meter, findings, unplanned, learning)
        self.retry = retry = Retry(model, calls, rollback, budget, plans, losses)
        self.prefetcher = prefetcher = PlanPrefetcher(policy, budget.memory_now)
        self.to_come = to_come = ShapesToCome(plans, budget)
        decider = Decider(
            describer, policy, budget, losses, self.last_steps, to_come, ranks, late
        )
        self.driver = Driver(
            model, decider, steps, calls, rollback, retry, budget, unplanned, prefetcher
        )

    def end(self) -> None:
        """Close everything, and release the model; what was learned stays.

        A second call does nothing.
        """
        self.prefetcher.close()
        try:
            if "driver" in vars(self):
                self.steps.finish()
                self.unplanned.finish()
                self.budget.close()
                self.meter.release()
                self.worker.catch_up()
        finally:
            self.worker.close()
            self.records.close_file()
            self.losses.forget_losses()
            for name in _OF_THE_MODEL:  # fewer where Ctrl-C broke this off before
                vars(self).pop(name, None)
