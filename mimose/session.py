"""The public surface: `attach` a planner to a model, and the `Session` it returns."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from os import PathLike
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup

from mimose.actions.host import Host, make_host
from mimose.actions.registry import choose, need_host
from mimose.arguments import (
    check_agree,
    check_choices,
    check_integer,
    check_number,
    check_shapes,
    check_switches,
    layers_of,
    raise_if_no_model,
    raise_if_unknown,
)
from mimose.budget import Budget, format_bytes
from mimose.collation import Collation
from mimose.cost.problem import Memory, fill_problem, step_work
from mimose.distributed import find_ranks
from mimose.exceptions import BudgetError, MimoseError, StateMismatchError
from mimose.forecast import Forecast, Forecasts
from mimose.inputs.size_table import SizeTable
from mimose.memory.meters import Meter
from mimose.micro_batches import Batch, Lengths, Loss, Splitter
from mimose.model.compiled import raise_if_compiled
from mimose.model.kv_cache import without_caches
from mimose.model.layers import LayersSpec, find_layers, raise_if_checkpointed
from mimose.model.patch import Patch, owner_of, raise_if_attached
from mimose.model.placement import only_device
from mimose.model.sharding import (
    inside_ddp,
    parallel_shares,
    raise_if_unplannable,
    sharding,
)
from mimose.planners import Planner, PlanningProblem, lay_out, make_planner
from mimose.predictors import Estimator, check_estimator
from mimose.records import Summary
from mimose.report import text as _report
from mimose.report.text import terminal_width
from mimose.runtime.engine import Engine
from mimose.runtime.layer_calls import LayerPatch
from mimose.runtime.options import Options
from mimose.runtime.retry import Attempts, saved_gradients
from mimose.runtime.watched import watched
from mimose.state import (
    VERSION,
    device_name,
    raise_if_damaged,
    raise_if_of_another,
    rehearsed_on,
    sealed,
)
from mimose.types import StepInput

_log = logging.getLogger(__name__)

_Batch = TypeVar("_Batch")
_Result = TypeVar("_Result")


def attach(
    model: nn.Module,
    budget: Budget | Callable[[], Budget] = None,
    *,
    layers: LayersSpec = None,
    actions: str | Sequence[str] = "auto",
    planner: str | Planner = "auto",
    predictor: Estimator | None = None,
    cache_size: int = 1024,
    refine: bool = True,
    on_infeasible: str = "raise",
    meter: Meter | str | None = None,
    record_to: str | PathLike[str] | None = None,
    host_budget: float | str | None = None,
    wall: bool = True,
    grace: float | str | None = None,
    agree: str | ProcessGroup | None = "auto",
    byte_flops: float | None = None,
    checks: str = "sampled",
    units: LayersSpec = None,
    **unknown: NoReturn,
) -> Session:
    """Keep every training step of a model within a memory budget.

    Your training loop stays as it is. Each forward of the model in training mode, with
    grad enabled, gets a plan for the shape of its inputs: which layers keep their
    activations, and which recompute them in the backward. Evaluation runs without
    plans. Gradients, random state and buffers equal those of the bare model to the last
    bit, unless you allow lossy actions.

    The idea to plan by input size while training is from Mimose (Liao et al., IPDPS
    2023, `arXiv:2209.02478 <https://arxiv.org/abs/2209.02478>`_).

    Args:
        model: The model, on its device. Its names, `state_dict` and configuration do
            not change. If it is a `DistributedDataParallel`, the module inside is
            planned.
        budget: The most bytes that the device (on a CPU: the process's resident set)
            may hold at any moment of a step, with parameters, gradients and optimizer
            state. It is one of: ``"6GiB"`` (2**30 bytes each) or ``"6GB"`` (10**9); an
            integer number of bytes; a float in (0, 1] or ``"80%"``, a share of the
            memory that this process can have; ``"+400MiB"``, that much more than is
            held now; or None on an accelerator: all free memory and what this process
            holds, less 3% or 512 MiB, whichever is more, and less 1 GiB where ranks
            communicate. It may also be a function without arguments that returns one
            of these. mimose calls it here and in the first forward of each accumulation
            window. You can set `Session.budget` later.
        layers: The modules to plan for: None to find them, a module class, a qualified
            name, several of these, or a predicate that takes ``(module)`` or
            ``(name, module)``.
        actions: What may happen to a layer's activations. ``"auto"`` and ``"whole"``
            keep or recompute whole layers. ``"all"`` allows every action, also lossy
            ones and those that use the host's memory. ``"selective"`` also drops and
            rebuilds single tensors of a layer, at three points between keep and
            recompute. Or name the actions to allow beside these two: ``"selective"``,
            ``"selective_more"``, ``"selective_all"``, ``"offload"``,
            ``"offload_input"``, ``"quantize"``, ``"quantize4"``, ``"pool"``,
            ``"pool4"``. Only the last four change gradients.
        planner: ``"auto"``, ``"optimal"``, ``"greedy"`` (Algorithm 1 of Mimose),
            ``"none"`` (keep everything), ``"full"`` (recompute everything),
            ``"every-K"``, or an object like `mimose.planners.Planner`.
        predictor: The estimator that fits bytes and FLOPs to sizes, with ``fit`` and
            ``predict`` as in scikit-learn. Each quantity gets a copy. None for
            `mimose.predictors.LeastSquares`.
        cache_size: The most plans in the cache.
        refine: Whether a worker thread fits predictions and makes plans for the next
            shapes. If False, the steps do it, and equal runs make equal plans.
        on_infeasible: What to do if no plan keeps the budget: ``"raise"`` an error, or
            ``"warn"`` once and train on with the plan of the least peak.
        meter: What reads memory: None to choose by the device, a name, or an object
            (see `mimose.memory.meters.make_meter`).
        record_to: A file to which each step's record is appended as a line of JSON. Its
            folder is made if it does not exist.
        host_budget: The most host memory that ``"offload"`` and ``"offload_input"`` may
            hold, written like `budget` (without ``"+…"``). A share is one of the host's
            free memory when the session begins. None for half of it.
        wall: Whether the accelerator's allocator enforces the budget
            (``set_per_process_memory_fraction``) from a training forward to the end of
            its backward. At the limit it frees its cached blocks; an allocation fails
            only if that is not enough. No effect on a CPU.
        grace: By how much a backward may pass the budget as a last resort: bytes,
            ``"256MiB"``, or a share of the memory that this process can have. It is
            used if a backward has too little room and the forward cannot run again, or
            if a recomputation runs out of memory. Such a step is recorded as over. None
            for nothing if there is a budget, and else for the 3% or 512 MiB that stay
            free.
        agree: Whether the ranks of distributed training agree on each forward's plan,
            by one small exchange. ``"auto"``: they agree if a layer's own forward waits
            for other ranks (batch norm over all ranks, tensor parallelism, FSDP groups
            inside the layer). None: never. A gloo process group: its ranks agree. Give
            one if layers communicate by their own calls (experts on other ranks, ring
            attention), which mimose cannot see.
        byte_flops: The FLOPs that take as long as moving a byte from or to memory, by
            which plans weigh what runs again. None to take it from a list of devices,
            by the device's name and by the precision of the model's products.
        checks: What ``"selective"`` compares of the tensors that it rebuilds. With
            ``"sampled"`` a seventeenth of each, in turns, and all of them in a call in
            which anything is new; with ``"all"`` always all, which takes longer.
        units: An alias of `layers`.
        unknown: Any other name raises a TypeError, which lists the names.

    Returns:
        The session, which is also a context manager.

    Raises:
        BudgetError: The budget cannot be read or enforced; or there is a `host_budget`
            and no action that uses the host's memory.
        InfeasibleBudgetError: More than the budget is held already (on any of the
            ranks, if they agree).
        OtherRankError: Ranks agree, and another rank could not attach.
        NoUnitsError: No layers were found.
        AlreadyAttachedError: Another session plans this model.
        CheckpointingConflictError: The model's own checkpointing is switched on.
        MimoseError: The model is compiled as a whole, captured in a CUDA graph, or
            spread over several devices; or ranks should agree, and they plan different
            things or do not all attach.
        ValueError: Another argument has a value that is not allowed.
        TypeError: `model` is not a module, or there is no such argument.
    """
    raise_if_unknown(unknown, attach_arguments())
    layers = layers_of(layers, units)
    check_agree(agree)
    check_choices(on_infeasible, cache_size, record_to, checks)
    check_switches(wall=wall, refine=refine)
    check_estimator(predictor)
    host = _host(model, actions, host_budget)
    options = Options(
        budget=budget,
        actions=choose(actions, host),
        host=host,
        layers=layers,
        planner=make_planner(planner),
        predictor=predictor,
        cache_size=cache_size,
        warns=on_infeasible == "warn",
        meter=meter,
        record_to=record_to,
        wall=wall,
        grace=grace,
        refine=refine,
        agree=agree,
        byte_flops=None if byte_flops is None else check_number(byte_flops),
        checks=checks,
    )
    return Session(model, options)


def attach_arguments() -> list[str]:
    """Return the names of the arguments of `attach`, without the model."""
    parameters = inspect.signature(attach).parameters.values()
    return [p.name for p in parameters if p.kind is not p.VAR_KEYWORD][1:]


def session_of(model: nn.Module) -> Session | None:
    """Return the session that plans a model, or a part of it; None if none does.

    Args:
        model: The model that `attach` got, one of its layers, or a wrapper around it.

    Raises:
        TypeError: `model` is not a module.
    """
    raise_if_no_model(model)
    session: Session | None = owner_of(model)
    return session


def detach(model: nn.Module) -> None:
    """Detach the sessions that plan a model or parts of it, if any do.

    ::

        mimose.detach(model)  # a cell of a notebook that may run twice
        session = mimose.attach(model, budget="6GiB")

    Args:
        model: The model that `attach` got, or a wrapper around it.

    Raises:
        TypeError: `model` is not a module.
    """
    while (session := session_of(model)) is not None:
        session.detach()


def _host(
    model: nn.Module, actions: str | Sequence[str], host_budget: float | str | None
) -> Host | None:
    """Return what holds tensors on the host; None if no action does."""
    if need_host(actions):
        raise_if_no_model(model)
        return make_host(only_device(model), host_budget)
    if host_budget is not None:
        msg = (
            f"host_budget {host_budget!r} has no effect: none of the actions "
            f"{actions!r} uses the host's memory. Add 'offload' or 'offload_input' to "
            f"actions, or leave host_budget out"
        )
        raise BudgetError(msg)
    return None


class Session:
    """Plans the training steps of one model, from `attach` until `detach`.

    It is a context manager: leaving the ``with`` block detaches.

    Attributes:
        records: The `StepRecord` of the last 10,000 steps, oldest first.
        collation: Learns from a `BatchSampler` how sizes follow from its batches.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        raise_if_no_model(model)
        model = inside_ddp(model)
        raise_if_attached(model)
        raise_if_unplannable(model)
        raise_if_checkpointed(model)
        found = find_layers(model, options.layers)
        modules = [module for _, module in found]
        raise_if_compiled(model, modules)
        ranks = find_ranks(options.agree, modules)
        self._model: nn.Module | None = model
        """None after detach, so that a kept session does not keep the model alive."""
        self._rehearsed = ""
        self._host = options.host
        self._of: dict[str, Any] = {}
        """The description of the model, from detach on."""
        self._n_layers = len(found)
        self._kind = type(model).__name__
        # If ranks agree, an error on one is an error on all.
        with nullcontext() if ranks is None else ranks.sharing_errors():
            self._engine = engine = Engine(model, options, found, ranks)
        self.records = engine.records
        last, budget, plans = engine.last_steps, engine.budget, engine.plans
        steps, describer, seconds = engine.steps, engine.describer, engine.seconds
        self._forecasts = Forecasts(
            last, plans, budget, seconds, engine.losses, steps, describer
        )
        self._splitter = Splitter(
            self._forecasts, last, budget, engine.driver, self.records, ranks
        )
        self.collation = Collation(last)
        try:
            self._attach(model, options)
        except BaseException:
            self.detach()
            raise
        _log.info(
            "mimose: planning %d layers of %s within %s",
            self._n_layers,
            self._kind,
            format_bytes(self.budget),
        )

    def _attach(self, model: nn.Module, options: Options) -> None:
        """Replace the forwards of the model and its layers.

        Ranks that agree first check that their layers, actions and planners are equal.
        """
        engine, ranks = self._engine, self._engine.ranks
        with nullcontext() if ranks is None else ranks.sharing_errors():
            engine.budget.raise_if_held()
            if ranks is not None:
                ranks.check_same_setup(
                    (
                        f"the actions {', '.join(engine.learner.model.menu.names)}",
                        f"the planner {options.planner_name!r}",
                        *(f"a layer {layer.name!r}" for layer in engine.layers),
                    )
                )
        patches = engine.patches
        patches.undo_by(engine.limit.drop_wall)
        patches.undo_by(engine.optimizers.remove)
        engine.optimizers.start()
        if any(layer.is_compiled for layer in engine.layers):
            patches.use_one_graph()
        for layer in engine.layers:
            patches.add(LayerPatch(layer, engine.calls, self))
        patches.add(Patch(model, engine.driver.enter, self))
        for patch in without_caches(model):
            patches.add(patch)
        for loss in engine.losses.replace_in(model) if options.plans else ():
            patches.add(loss)

    @property
    def budget(self) -> int:
        """The budget in bytes. You can set it to anything that `attach` takes.

        ::

            session.budget = "40GiB"
            session.budget = lambda: "60GiB" if engine.sleeps else "20GiB"

        Shares, ``"+1GiB"`` and None refer to the memory that is free and held when you
        set them. Between steps the new budget holds at once, and cached blocks above it
        are freed. Inside an accumulation window (from the first forward to the
        optimizer step) it holds from the next window on. A function is called in the
        first forward of each window. If ranks agree, each rank has its own budget, and
        the plans keep all of them.

        Raises:
            BudgetError: The budget cannot be read.
            InfeasibleBudgetError: More than the budget is held already. The old budget
                stays. A budget that was set inside a window, or a function's, raises
                this in the first forward of the next window.
            MimoseError: The session was detached.
        """
        return self._engine.budget.n_bytes

    @budget.setter
    def budget(self, value: Budget | Callable[[], Budget]) -> None:
        """Set it for the next step; see the property."""
        self._raise_if_detached()
        engine = self._engine
        engine.budget.set(value, engine.driver.is_within_window)

    def detach(self) -> None:
        """Restore the model as it was before `attach`. A second call does nothing.

        The session's records, report and `state_dict` stay readable. It does not keep
        the model alive.
        """
        self._engine.patches.remove()
        try:
            if self._model is not None:
                self._of = self._description(self._model)
        finally:
            try:
                self._engine.end()
            finally:
                self._model = None
                for name in ("_forecasts", "_splitter"):  # these hold the model
                    vars(self).pop(name, None)

    def __repr__(self) -> str:
        """Return the model, the budget, and how many steps were planned."""
        state = "detached" if self._model is None else format_bytes(self.budget)
        totals = self.records.totals()
        phases = ", ".join(f"{n} {phase}" for phase, n in totals.phases.items())
        steps = f"{totals.steps} steps" + (f" ({phases})" if phases else "")
        return (
            f"<mimose.Session of {self._kind}: {self._n_layers} layers, {state}, "
            f"{steps}; report() says more>"
        )

    def __enter__(self) -> Session:
        """Return the session."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach."""
        self.detach()

    @property
    def peak_bytes(self) -> int:
        """The highest reading in bytes since the session began, with optimizer steps.

        The session resets the device's peak counters, so read this instead of them.
        """
        return self._engine.limit.highest_bytes()

    def step(self, closure: Callable[[], _Result]) -> _Result:
        """Run a forward and its backward, and run them again if memory runs out.

        ::

            def forward_and_backward():
                loss = model(**batch).loss
                loss.backward()
                return loss.detach()

            loss = session.step(forward_and_backward)

        In a plain loop mimose cannot repeat a backward that fails. Here it can: it
        restores gradients, random state and running statistics, and calls the closure
        again with everything recomputed. If a layer cannot be recomputed, it and the
        layers built like it are kept in the next try. If gradients exist already
        (accumulation), the session holds a copy of them during the step.

        Args:
            closure: Runs forward and backward, and returns anything, such as the loss.

        Returns:
            What `closure` returns.

        Raises:
            RuntimeError: The closure failed again, or for another reason; or other
                ranks take part in the step, so that no rank can repeat it alone.
            MimoseError: The session was detached.
            TypeError: `closure` is not callable.
        """
        self._raise_if_detached()
        describer = self._engine.describer
        is_outdated = describer.is_outdated()
        parameters = describer.own_parameters(is_outdated=is_outdated)
        restore_gradients, attempts = saved_gradients(parameters), self._attempts()
        with self._engine.rollback.of_step(is_outdated=is_outdated) as snapshot:
            while True:
                try:
                    return closure()
                except RuntimeError as error:
                    if not attempts.can_follow(error):
                        raise
                attempts.prepare()
                snapshot.restore()
                restore_gradients()

    def micro_batches(
        self,
        batch: Batch,
        *,
        lengths: Lengths = None,
        loss: Loss = None,
        shift: bool | None = None,
        ignore_index: int | None = None,
    ) -> Iterator[tuple[Batch, float]]:
        """Split a batch by rows into micro-batches that fit and take the least time.

        ::

            for micro_batch, weight in session.micro_batches(batch, loss="rows"):
                (weight * model(**micro_batch).loss).backward()
            optimizer.step()

        Rows of similar length come together, and columns that are padding in all of
        them are cut. Each row comes once. The weighted losses add up to the loss of the
        whole batch, and their gradients to its gradients, except for rounding and for
        dropout, which draws new numbers. The session makes each micro-batch when the
        loop takes it, so the later ones use what the earlier ones have shown. If the
        session has measured nothing yet, the first micro-batch is one row.

        The loss must be a mean over rows, over label tokens, or over what a function
        counts. (A loss that is a sum needs no weight.) A loss that compares rows with
        each other (contrastive), or an auxiliary one over the whole batch (to balance
        experts), is no such mean: its micro-batches have other gradients.

        Rows in which nothing counts are left out, because the mean over them is not a
        number. If nothing counts in the whole batch, nothing is yielded: skip the
        optimizer's step.

        Under `DistributedDataParallel` each rank may have another number of
        micro-batches: all but the last run under ``no_sync``, and the loop stays as it
        is. If ranks wait for each other's forwards (FSDP2, experts), all run the same
        number: some repeat their smallest micro-batch, with a weight of 0. All ranks
        must split a batch in each step, and in each batch something must count.

        Args:
            batch: Tensors in mappings, tuples and lists, nested in any way. Dimension 0
                is the rows. Lists with one item a row are split too. Numbers, texts,
                and tensors with one row or without dimensions are passed on unchanged.
            lengths: (n_rows,) How many columns of each row count, from the left; or a
                mapping from a tensor's name to such lengths. None to read
                ``attention_mask``, ``decoder_attention_mask`` and labels of -100; a
                column that counts in one of them is never cut. Tensors with the same
                number of columns (dimension 1) are cut alike, a decoder's
                (``decoder_…``, its ``labels``) separately. Padding on the left is cut
                only if the batch has ``position_ids``. To cut nothing, give the padded
                length of each row.
            loss: What the loss is a mean over. ``"rows"``: over rows; None: the same,
                but an error if rows have different numbers of labels. ``"tokens"``:
                over the elements of ``batch["labels"]`` that are not ignored. A
                function: takes a batch and returns what counts in it, such as
                ``lambda part: (part["labels"][:, 1:] != -100).sum()``. It is called for
                the batch and for each row, and must add up.
            shift: For ``"tokens"``: whether the loss leaves out the first column of
                labels, because the model predicts each from the columns before, as
                transformers' causal language models do (but not Bart's decoder). None:
                an error if the rows' shares depend on it.
            ignore_index: For ``"tokens"``: the label that the loss ignores. None: -100,
                for labels of one or two dimensions.

        Returns:
            An iterator of pairs of a micro-batch, which has the structure of the batch,
            and its weight, a share of the whole batch.

        Raises:
            MimoseError: The session was detached; a layer of batch norm is in training
                mode; or the model is shared by tensor parallelism.
            TypeError: The batch is not a mapping, a tuple, a list or a tensor.
            ValueError: `lengths` or `loss` has a value that is not allowed; a tensor
                has another number of rows; what `loss` counts does not add up; `loss`
                or `shift` must be given. During the iteration: nothing counts on one
                of several ranks.
            InfeasibleBudgetError: During the iteration: no plan fits a single row.
        """
        model = self._raise_if_detached()
        options = lengths, loss, shift, ignore_index
        return self.collation.split(self._splitter.split(model, batch, *options))

    def watch(self, loader: Iterable[_Batch]) -> Iterable[_Batch]:
        """Read one batch ahead, so that the plan of the next step is ready in time.

        ::

            for batch in session.watch(loader):
                ...

        The batches and their order are those of the loader. Watch it again in each
        epoch. Only lists, tuples and a `DataLoader` with workers are read ahead. Any
        other loader is returned unchanged, because reading ahead may change what it
        draws; then a new shape takes some milliseconds once, for its plan.

        Args:
            loader: An iterable of batches: tensors, or mappings, tuples, lists and
                dataclasses of them, nested in any way.

        Returns:
            An iterable of the same batches. Its length, if it has one, and all other
            attributes are those of the loader.

        Raises:
            TypeError: `loader` is not iterable.
        """
        return watched(loader, self._engine.prefetcher)

    def expect(self, shapes: Iterable[Mapping[str, int]]) -> None:
        """Announce the sizes of all later batches, if you know them.

        ::

            session.expect({"input_ids.1": length} for length in lengths)

        If the budget is too small for the largest of them, you get the error (or, with
        ``on_infeasible="warn"``, the warning) in the first step whose predictions reach
        that far, and not hours later with that batch. Before the first step the names
        are unknown: they are checked in the second step, and a wrong name is a warning.

        Args:
            shapes: Mappings from the names of sizes to sizes, as for `explain`. Sizes
                that you do not name are those of the next step. A new call replaces the
                shapes of the last one.

        Raises:
            MimoseError: The model has no size of such a name; or the session was
                detached.
            TypeError: `shapes` is not an iterable of mappings.
            ValueError: A size is not an integer of at least 1.
        """
        self._raise_if_detached()
        _, table = self._engine.last_steps.last or (None, None)
        self._engine.to_come.expect(check_shapes(shapes), table)

    def _attempts(self, *, is_new: bool = False) -> Attempts:
        """Begin a step that may be repeated.

        Args:
            is_new: Whether the session was made during the step.
        """
        engine = self._engine
        retry, steps, findings = engine.retry, engine.steps, engine.findings
        prepare = engine.driver.prepare_safest
        return Attempts(retry, steps, findings, prepare, is_new=is_new)

    def _raise_if_detached(self) -> nn.Module:
        if self._model is None:
            msg = (
                "the session was detached and plans no more steps: call mimose.attach "
                "again. To keep what it learned, load its state_dict() there"
            )
            raise MimoseError(msg)
        return self._model

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned as plain JSON data, without tensors or objects.

        A session that loads it plans from its first step, within any budget.
        `torch.load` with ``weights_only=True`` reads a checkpoint that contains it. It
        contains no plans, because a new plan takes about a millisecond.
        """
        of = self._of if self._model is None else self._description(self._model)
        return sealed({"of": of, **self._learned()})

    def _learned(self) -> dict[str, Any]:
        """Return what was learned, as JSON values."""
        engine = self._engine
        tables = engine.last_steps.tables
        return {
            "cost_model": engine.learner.state_dict(),
            "policy": engine.policy.state_dict(),
            "sizes": {key: table.state_dict() for key, table in tables.items()},
            "start_bytes": engine.last_steps.start_bytes,
            "kept_units": dict(engine.findings.kept),
            "memory_limit": engine.limit.state_dict(),
            "seconds": engine.seconds.state_dict(),
            "collation": self.collation.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace what this session has learned by what another session learned.

        Budget, planner and predictor may differ: the samples are fitted again.

        Args:
            state: What ``state_dict`` returned, also after a way through JSON.

        Raises:
            StateMismatchError: The state belongs to another model, other layers,
                another device or version of torch, or it is damaged. The session is
                unchanged. What `rehearse` saved is for any accelerator; seconds, the
                margin and fragmentation are then learned anew.
            MimoseError: The session was detached.
        """
        raise_if_of_another(state, self._description(self._raise_if_detached()))
        raise_if_damaged(state)
        before = self.state_dict()
        try:
            self._load(state)
            self._rehearsed = rehearsed_on(state, device_name(self._engine.device))
        except Exception as error:  # it may be made by hand
            self._load(before)
            msg = f"the state is damaged: {type(error).__name__}: {error}"
            raise StateMismatchError(msg) from error

    def _load(self, state: Mapping[str, Any]) -> None:
        """Replace what was learned by what `_learned` returned."""
        engine = self._engine
        engine.learner.load_state_dict(state["cost_model"])
        if engine.ranks is not None:
            engine.ranks.restrict(engine.layers, engine.learner)
        engine.policy.load_state_dict(state["policy"])
        patterns = engine.learner.model.patterns
        for pattern in patterns.values():
            engine.calls.gauges.load(pattern.calls)
        engine.describer.load_state_dict(state["sizes"])
        start_bytes, is_first = (
            int(state.get("start_bytes", 0)),
            not engine.steps.n_begun,
        )
        engine.last_steps.load(patterns, start_bytes, is_first=is_first)
        engine.limit.load_state_dict(state.get("memory_limit", {}))
        engine.seconds.load_state_dict(state.get("seconds", {}))
        engine.findings.load_state_dict(state["kept_units"])
        self.collation.load_state_dict(state.get("collation", {}))

    def _description(self, model: nn.Module) -> dict[str, Any]:
        """Return what learned numbers depend on, as plain JSON data."""
        engine, shares, shared = self._engine, parallel_shares(model), sharding(model)
        return {
            "version": VERSION,
            "model": type(model).__qualname__,
            "layers": [layer.name for layer in engine.layers],
            "parameters": {
                name: f"{tuple(p.shape)} {p.dtype}{shares.get(name, '')}"
                for name, p in model.named_parameters()
            },
            "device": device_name(engine.device),
            "settings": {
                "torch": str(torch.__version__),
                "actions": ", ".join(engine.learner.model.menu.names),
                "meter": type(engine.meter).__qualname__,
                "compiled": ", ".join(e.name for e in engine.layers if e.is_compiled),
                **({"sharding": shared} if shared else {}),
            },
        }

    def report(self, width: int | None = None) -> str:
        """Return what happened so far, as text to read.

        Args:
            width: Characters in a line; None for the width of the terminal.

        Raises:
            ValueError: `width` is not an integer of at least 1.
        """
        width = terminal_width() if width is None else check_integer("width", width)
        return _report.report(self.summary(), list(self.records), width)

    def summary(self) -> Summary:
        """Return what happened so far, as numbers.

        It waits for what the worker thread still learns from steps that have ended.
        """
        self._engine.worker.catch_up()
        host, ranks = self._host and self._host.memory, self._engine.ranks
        return _report.summarise(
            self.records,
            budget_bytes=self.budget,
            peak_bytes=self.peak_bytes,
            layers=self._n_layers,
            cache_hits=self._engine.policy.n_hits,
            cache_misses=self._engine.policy.n_misses,
            margin=self._engine.plans.margin.share,
            kept_units=dict(self._engine.findings.kept),
            **self._engine.limit.summary(),
            **self._pace(),
            byte_price=self._engine.learner.model.byte_price(),
            rehearsed=self._rehearsed,
            rank_waits=self.collation.waits,
            least_rows_share=self.collation.least_rows_share,
            inexact_layers=dict(self._engine.findings.inexact),
            largest_to_come=self._engine.to_come.largest,
            least_peak_to_come=self._engine.to_come.least_peak_bytes,
            unplanned=tuple(self._engine.unplanned.sentences()),
            host=host and host.use(),
            agreement=None if ranks is None else ranks.use(),
        )

    def explain(self, shape: Mapping[str, int] | None = None) -> str:
        """Return the plan for a shape as text: its layer calls and highest segment.

        Args:
            shape: Sizes by name, such as ``{"input_ids.1": 512}``: the argument of the
                model and the dimension. Sizes that you do not name are those of the
                last step. None for the shape of the last step.

        Raises:
            MimoseError: The model has no size of such a name; a size is not an integer
                of at least 1; or no step with such inputs was measured yet.
            InfeasibleBudgetError: No plan keeps the budget at this shape.
            TypeError: `shape` is not a mapping.
        """
        step_input, table, memory = self._asked(shape)
        problem, plan, why = self._engine.plans.explain(step_input, memory)
        model, seconds = self._engine.learner.model, self._engine.seconds
        rates = seconds.rates(step_input.context)
        work = step_work(model, step_input, plan.actions)
        index = {action: i for i, action in enumerate(problem.actions)}
        choice = np.array([index[action] for action in plan.actions], dtype=np.intp)
        return _report.explain(
            problem,
            lay_out(problem, choice),
            shape=table.named(step_input.sizes),
            why=why,
            seconds=rates and rates.parts(*work),
            first_seconds=rates.first[bool(work[-1])] if rates else 0.0,
            by_rows=any(loss.can_go_by_rows for loss in self._engine.losses.losses),
            width=terminal_width(),
        )

    def forecast(
        self,
        shape: Mapping[str, int] | None = None,
        budget: float | str | None = None,
        *,
        accumulating: bool | None = None,
    ) -> Forecast:
        """Predict the memory and the time of a step, without running it.

        ::

            session.forecast({"input_ids.0": 32, "input_ids.1": 512}).fits

        You can call it between any two steps. If the session has loaded a state, you
        can call it before the first step too. A new shape takes a few milliseconds, a
        known one less than one.

        Args:
            shape: Sizes by name, as for `explain`. Sizes that you do not name are those
                of the last step: name all that grow with a batch, such as nodes and
                edges (``forecast().shape`` has the sizes that vary).
            budget: The budget of the step, as for `attach`; None for the session's.
            accumulating: Whether gradients exist when the step begins, as in all but
                the first micro-step of an accumulation. None: as in one of the last two
                steps.

        Raises:
            MimoseError: The model has no size of such a name; a size is not an integer
                of at least 1; no step was run and no state was loaded; or the session
                was detached.
            BudgetError: The budget cannot be read.
            TypeError: `shape` is not a mapping.
        """
        self._raise_if_detached()
        return self._forecasts.ask(shape, budget, accumulating)

    def largest(
        self,
        shape: Mapping[str, int],
        *,
        dim: str,
        budget: float | str | None = None,
        limit: int | None = None,
        accumulating: bool | None = None,
    ) -> int:
        """Return the largest value of one size with which a step is predicted to fit.

        ::

            rows = session.largest({"input_ids.1": 512}, dim="input_ids.0", limit=256)

        Args:
            shape: The other sizes by name, as for `forecast`. They stay the same.
            dim: The name of the size to vary.
            budget: As for `forecast`.
            limit: The largest value to consider; None for as far as predictions are
                trusted.
            accumulating: As for `forecast`.

        Returns:
            The value; 0 if none fits, or if no value can be predicted yet.
            ``forecast({**shape, dim: 1}).why_not`` says which.

        Raises:
            MimoseError: As for `forecast`.
            BudgetError: The budget cannot be read.
            TypeError: `shape` is not a mapping.
            ValueError: `limit` is not an integer of at least 0.
        """
        self._raise_if_detached()
        limit = None if limit is None else check_integer("limit", limit, 0)
        return self._forecasts.largest(shape, dim, budget, limit, accumulating)

    def planning_problem(
        self, shape: Mapping[str, int] | None = None, *, start_bytes: int | None = None
    ) -> PlanningProblem:
        """Return the problem that a planner solves for a shape, without safety margin.

        Args:
            shape: Sizes by name, as for `explain`.
            start_bytes: What is held when the step begins, in bytes; None for what is
                held now.

        Raises:
            MimoseError: The model has no size of such a name; a size is not an integer
                of at least 1; or no step with such inputs was measured yet.
            TypeError: `shape` is not a mapping.
        """
        step_input, _, memory = self._asked(shape)
        if start_bytes is not None:
            memory = memory._replace(start_bytes=float(start_bytes))
        return fill_problem(self._engine.learner.model, step_input, memory)

    def _pace(self) -> dict[str, Any]:
        """Return the fields of a `Summary` about seconds."""
        last, model = self._engine.last_steps.last, self._engine.learner.model
        if last is None or last[0].context not in model.patterns:
            return {}
        step_input, table = last
        rates = self._engine.seconds.rates(step_input.context)
        if rates is None or len(step_input.sizes) != len(table.names):
            return {}
        keep = [model.menu.first] * len(model.pattern(step_input).calls)
        seconds, fixed, _ = rates.parts(*step_work(model, step_input, keep))
        first_times = self._engine.seconds.first_times(step_input.context)
        return {
            "fixed_seconds": fixed,
            "batch_seconds": seconds - fixed,
            "first_times": first_times,
        }

    def _asked(
        self, shape: Mapping[str, int] | None
    ) -> tuple[StepInput, SizeTable, Memory]:
        step_input, table = self._engine.last_steps.asked(shape)
        self._engine.worker.catch_up()
        if step_input.context not in self._engine.learner.model.patterns:
            msg = "no step with such inputs was measured yet: train a few steps first"
            raise MimoseError(msg)
        return step_input, table, self._engine.budget.memory_now()
