"""The public surface: `attach` a planner to a model, and the `Session` it returns."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from os import PathLike
from typing import Any, TypeVar

import numpy as np
from torch import nn
from torch.distributed import ProcessGroup

from mimose.actions.host import Host, make_host
from mimose.actions.registry import choose, need_host
from mimose.arguments import (
    check_agree,
    check_choices,
    check_shapes,
    check_watched,
    layers_of,
    raise_if_no_model,
)
from mimose.budget import Budget, format_bytes
from mimose.cost.problem import Memory, step_work
from mimose.exceptions import (
    BudgetError,
    MimoseError,
    StateMismatchError,
)
from mimose.forecast import Forecast, Forecasts, asked
from mimose.inputs.describe import SizeTable
from mimose.inputs.layers import LayersSpec
from mimose.inputs.placement import only_device
from mimose.inputs.sharding import (
    inside_ddp,
    own_class,
    parallel_shares,
    raise_if_unplannable,
    sharding,
)
from mimose.memory.meters import BasicMeter, Meter
from mimose.micro_batches import Batch, Lengths, Loss, Splitter
from mimose.planners import Planner, PlanningProblem, lay_out, make_planner
from mimose.predictors import Estimator, check_estimator
from mimose.records import Summary
from mimose.report import text as _report
from mimose.report.columns import terminal_width
from mimose.runtime.engine import Options, make_engine, raise_if_attached
from mimose.runtime.retry import Attempts, saved_gradients
from mimose.runtime.watched import watched
from mimose.state import (
    describe,
    plain,
    raise_if_damaged,
    raise_if_of_another,
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
    meter: Meter | BasicMeter | str | None = None,
    record_to: str | PathLike[str] | None = None,
    host_budget: float | str | None = None,
    wall: bool = True,
    agree: str | ProcessGroup | None = "auto",
    **others: Any,
) -> Session:
    """Plan every training step of a model within a memory budget.

    The loop stays as it is. Each forward of the model in training mode, with grad
    enabled, gets a plan for the shape of its inputs: which layers keep their
    activations, and which recompute them in backward. Evaluation passes straight
    through. Gradients, random state and buffers are bit for bit those of the bare
    model, unless lossy actions are asked for.

    Args:
        model: The model, on its device. Its names, `state_dict` and configuration do
            not change. Of `DistributedDataParallel` it is the module inside.
        budget: The most bytes the device (on CPU: the process's resident set) may
            hold at any moment of a step, parameters, gradients and optimizer state
            included: ``"6GiB"``, ``"6GB"``, an integer number of bytes, a float in
            (0, 1] or ``"80%"``, a fraction of the device's memory, or ``"+400MiB"``,
            so much more than is held at attach. None on an accelerator: what is free
            there and what this process holds, less 3% or 512 MiB, whichever is more,
            and 1 GiB more where ranks communicate. A function without arguments that
            returns one of these is asked here, and in the first forward of each
            accumulation window. `Session.budget` can be set.
        layers: The modules to plan for: None to discover them, a module class, a
            qualified name, several of these, or a predicate over ``(module)`` or
            ``(name, module)``. ``units`` is another name of it.
        actions: What may happen to a layer's activations: ``"auto"`` for what is best
            by default, which is to keep or recompute whole layers (``"whole"``);
            ``"all"`` for lossy ones and those that use the host's memory as well; or
            the names of those beside ``"keep"`` and ``"recompute"``, such as
            ``"selective"``, which rebuilds what a layer's cheap operators have made.
            Only ``"all"``, ``"pool"``, ``"pool4"``, ``"quantize"`` and ``"quantize4"``
            change gradients.
        planner: ``"auto"``, ``"optimal"``, ``"greedy"`` (Mimose's Algorithm 1),
            ``"none"``, ``"full"``, ``"every-K"``, or a `mimose.planners.Planner`.
        predictor: What fits bytes and FLOPs to sizes, a copy for each quantity: an
            estimator with ``fit`` and ``predict``, such as scikit-learn's. None for
            `mimose.predictors.LeastSquares`.
        cache_size: The most plans kept.
        refine: Whether a thread beside training makes fits, makes plans for shapes
            that are on their way and replaces plans by proven optimal ones. Without it
            all but the latter is done in the steps, and equal runs make equal plans.
        on_infeasible: ``"raise"`` or ``"warn"`` and train on with the least plan.
        meter: Where memory is read: None to choose by the device, a name or an object
            (see `mimose.memory.meters.make_meter`).
        record_to: A file to append each step's record to, as a line of JSON. Its
            folder is made if it is not there.
        host_budget: The most memory of the host that ``"offload"`` and
            ``"offload_input"`` may hold, as `budget` but for ``"+…"``: ``"16GiB"``, or
            a share of what is free there as the session begins. None for half of it.
        wall: Whether an accelerator's allocator keeps the budget itself
            (``set_per_process_memory_fraction``), from a training forward to the end of
            its backward. At the wall it frees its cached blocks, and fails only where
            that is not enough. Without effect on a CPU.
        agree: Whether the ranks of a distributed training agree on each forward's plan,
            by one small exchange: ``"auto"`` where a layer's own forward waits for
            other ranks (batch norm over all ranks, tensor parallelism, FSDP groups
            inside the layer), None never, or the process group of those that run the
            same layers, of gloo, where the layers send something by their own calls
            (experts on other ranks, attention over a ring).
        others: ``units``, another name of `layers`.

    Returns:
        The session; also a context manager.

    Raises:
        BudgetError: A budget cannot be read, no wall can be set at it, or there is
            nothing that a budget of the host would be for.
        InfeasibleBudgetError: More than the budget is held already; where ranks agree,
            on any rank.
        OtherRankError: Where ranks agree, another could not attach, or did not wait
            for this one any longer.
        NoUnitsError: No modules to plan for were found.
        AlreadyAttachedError: The model has a session already.
        CheckpointingConflictError: The model's own checkpointing is switched on.
        MimoseError: The model is compiled, a CUDA graph, or on several devices; or the
            ranks that are to agree plan different things, not all of them have layers
            that wait, or not all attach.
        ValueError: Another argument is none of those above.
        TypeError: The model is no module, or there is no such argument (any more).
    """
    layers = layers_of(attach, layers, others)
    check_agree(agree)
    check_choices(on_infeasible, cache_size)
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
        refine=refine,
        agree=agree,
    )
    return Session(model, options)


def _host(
    model: nn.Module, actions: str | Sequence[str], host_budget: float | str | None
) -> Host | None:
    """Return what holds tensors on the host; None where nothing does."""
    if need_host(actions):
        raise_if_no_model(model)
        return make_host(only_device(model), host_budget)
    if host_budget is not None:
        msg = (
            f"host_budget {host_budget!r}: none of the actions {actions!r} holds "
            f"anything on the host; add 'offload' or 'offload_input', or leave it out"
        )
        raise BudgetError(msg)
    return None


class Session:
    """The planner of one model, from `attach` until `detach`.

    A context manager; leaving it detaches.

    Attributes:
        records: The last steps' `StepRecord`, a bounded sequence, oldest first.
    """

    def __init__(self, model: nn.Module, options: Options) -> None:
        raise_if_no_model(model)
        model = inside_ddp(model)
        raise_if_attached(model)
        raise_if_unplannable(model)
        self._model: nn.Module | None = model
        """None once it is detached: who keeps the session keeps no model."""
        self._of: dict[str, Any] = {}
        """What was learned of whom, once it is detached."""
        self._engine = make_engine(model, options)
        self._n_layers = len(self._engine.layers)
        self.records = self._engine.records
        self._is_attached = False
        self._ahead = self._engine.ahead
        self._forecasts = Forecasts(self._engine)
        self.attempts = partial(Attempts, self._engine)
        self._splitter = Splitter(self._engine, self._forecasts)
        try:
            self._engine.attach(model)
            self._is_attached = True
        except BaseException:
            self.detach()
            raise
        _log.info(
            "mimose: planning %d layers of %s within %s",
            len(self._engine.layers),
            type(model).__name__,
            format_bytes(self.budget_bytes),
        )

    @property
    def budget_bytes(self) -> int:
        """The budget that holds now, in bytes. ``budget`` is the same."""
        return self._engine.memory_limit.budget_bytes

    @property
    def budget(self) -> int:
        """The budget, in bytes; to be set to whatever `attach` takes for it.

        ::

            session.budget = "40GiB"
            session.budget = lambda: "60GiB" if engine.sleeps else "20GiB"

        A share is one of what is free and what this process holds by now, ``"+1GiB"``
        counts from what is held now, and None takes all there is now, as `attach` does.
        Between steps the budget holds at once, and cached blocks above it are freed.
        Set within an accumulation window (between a forward and its backward, or before
        the optimizer's step that uses the gradients that are there) it holds from the
        next window on. A function is asked in the first forward of each window. Where
        ranks agree each rank has its own budget, and the plans keep all of them.

        Raises:
            BudgetError: It cannot be read.
            InfeasibleBudgetError: More is held already. Where it holds from the next
                window on, that window's first forward raises this. The budget stays
                what it was.
            MimoseError: The session was detached.
        """
        return self.budget_bytes

    @budget.setter
    def budget(self, value: Budget | Callable[[], Budget]) -> None:
        self._raise_if_detached()
        self._engine.set_budget(value)

    def detach(self) -> None:
        """Give the model back as it was. Harmless twice.

        What happened and what was learned stay readable; the model is freed.
        """
        self._ahead.close()
        self._engine.detach()
        if self._is_attached and self._model is not None:
            self._of = self._description(self._model)
        try:
            self._engine.end()
        finally:
            self._model = None

    def __enter__(self) -> Session:
        """Return the session."""
        return self

    def __exit__(self, *_: object) -> None:
        """Detach."""
        self.detach()

    @property
    def peak_bytes(self) -> int:
        """The highest reading since the session began, optimizer steps included.

        The session resets the device's peak counter; use this in its place.
        """
        return self._engine.memory_limit.highest_bytes()

    def step(self, closure: Callable[[], _Result]) -> _Result:
        """Run a forward and its backward; again, from the start, if they fail.

        Running out of memory in backward cannot be hidden from a user's loop. This
        can: gradients, random state and running statistics are put back, and the
        closure is run again with everything recomputed. A layer that turned out not
        to be recomputable is kept in the next run, and so are those that are built
        alike; it is repeated as long as such are found. Where gradients are there
        already (accumulation), a copy of them is held meanwhile.

        Args:
            closure: Runs forward and backward, and returns anything, such as the loss.

        Returns:
            What `closure` returns.

        Raises:
            RuntimeError: It failed with nothing new found, or in another way; or other
                ranks take part in it, so that no rank can run it again alone.
            MimoseError: The session was detached.
        """
        restore_gradients = saved_gradients(self._raise_if_detached())
        snapshot = self._engine.rollback.snapshot()
        snapshot.take()
        attempts = self.attempts()
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
        self, batch: Batch, *, lengths: Lengths = None, loss: Loss = "rows"
    ) -> Iterator[tuple[Batch, float]]:
        """Split a batch by rows into micro-batches that fit and take least time.

        ::

            for micro_batch, weight in session.micro_batches(batch, loss="tokens"):
                (weight * model(**micro_batch).loss).backward()
            optimizer.step()

        Rows of like lengths come together, without the columns that are padding in all
        of them. The sum of the weighted losses is the loss of the whole batch, and so
        are the gradients, but for rounding and for dropout, which draws anew. Each row
        comes once. Micro-batches are made as the loop asks for them: what is learned in
        one serves the next. The first one of a session without knowledge is one row.

        The loss has to be a mean over rows, over label tokens, or over what a function
        counts. (One that is a sum needs no weight.) A loss that compares rows with each
        other, as contrastive ones do, or an auxiliary one over the batch, as those that
        balance experts, is no such mean, and its parts have other gradients.

        Under `DistributedDataParallel` the numbers of micro-batches may differ by rank:
        all but the last run under ``no_sync``, and the loop stays as it is. Where ranks
        wait for each other's forwards (FSDP2, experts), all run as many: the smallest
        comes again, with a weight of 0.

        Args:
            batch: Tensors, in a mapping, a tuple or a list, however nested. Dimension 0
                is the rows. Lists with an item a row are split too; numbers, texts and
                tensors with one row or none are passed on.
            lengths: How many columns of each row count, from the left; or, where
                several tensors have different lengths, that by the tensor's name.
                None for what ``attention_mask`` and ``decoder_attention_mask`` say, and
                labels of -100; a column that one of them counts is never cut. Tensors
                with as many columns (dimension 1) are cut alike; what belongs to a
                decoder (``decoder_…``, its ``labels``) by itself. Padding on the left
                is cut where the batch has ``position_ids`` or positions are rotary.
                To cut nothing, as for a model that padding changes, give the padded
                length of each.
            loss: ``"rows"`` for a mean over rows (a warning where labels differ in
                number); ``"tokens"`` for one over
                ``batch["labels"]`` that are not -100, without the first column where a
                causal model of transformers shifts them (rows without a label are left
                out); or a function of a batch that counts what the loss is a mean over,
                which adds up over rows, such as
                ``lambda part: (part["labels"][:, 1:] != -100).sum()``.

        Returns:
            An iterator of micro-batches, built as the batch is, and their weights.

        Raises:
            MimoseError: The session was detached; a layer of batch norm is in training
                mode; or the model is shared by tensor parallelism.
            TypeError: The batch is none of those above.
            ValueError: Another argument is none of those above; a tensor has another
                number of rows; or nothing counts.
            InfeasibleBudgetError: While it is iterated over: no plan fits a row by
                itself.
        """
        return self._splitter.split(self._raise_if_detached(), batch, lengths, loss)

    def watch(self, loader: Iterable[_Batch]) -> Iterable[_Batch]:
        """Know the next batch's shape while a step runs, so that its plan is ready.

        ::

            for batch in session.watch(loader):
                ...

        The batches are the loader's own, in its order, and it may be watched anew in
        each epoch. They are read one ahead in lists, tuples and a `DataLoader` with
        workers. Any other loader is returned as it is, for reading ahead may change
        what it draws: its plans are made as shapes come, in some milliseconds once.

        Args:
            loader: An iterable of batches: tensors, or mappings, tuples, lists and
                dataclasses of them, however nested.

        Returns:
            An iterable of the same batches; its length, if it has one, and all other
            attributes are those of the loader.

        Raises:
            TypeError: The loader cannot be iterated over.
        """
        check_watched(loader)
        return watched(loader, self._ahead)

    def expect(self, shapes: Iterable[Mapping[str, int]]) -> None:
        """Tell the sizes of all batches to come, where a sampler knows them.

        ::

            session.expect({"input_ids.1": length} for length in lengths)

        A budget that cannot hold for the largest of them is then an error (or a
        warning, under ``on_infeasible="warn"``) in the first step whose predictions
        reach so far, rather than where that batch comes. Given before the first step,
        names are looked at with the second one; a name that is not one of the model's
        is a warning then, and nothing is expected.

        Args:
            shapes: Sizes by name, as for `explain`; those that are not named are as in
                the step that is about to run. They take the place of shapes given
                before.

        Raises:
            MimoseError: A name is not one of the model's; or the session was
                detached.
            TypeError: A shape is no mapping.
            ValueError: A size is no integer of at least 1.
        """
        self._raise_if_detached()
        last = self._engine.describer.last
        table = None if last is None else last[1]
        self._engine.to_come.expect(check_shapes(shapes), table)

    def _raise_if_detached(self) -> nn.Module:
        if self._model is None:
            msg = (
                "the session was detached, so it plans for no model any more: call "
                "mimose.attach again (its state_dict() can be loaded there)"
            )
            raise MimoseError(msg)
        return self._model

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return what was learned, ready for JSON: no tensors, no pickled objects.

        `torch.load` takes a checkpoint with it under `weights_only=True`, too.
        A session that loads it plans from its first step on, within any budget. Plans
        are not part of it: a new one takes about a millisecond.
        """
        of = self._of if self._model is None else self._description(self._model)
        return sealed(plain({"of": of, **self._engine.state_dict()}))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what another session learned, in place of what this one has.

        The budget, the planner and the predictor may be others: samples are fitted
        again.

        Args:
            state: What ``state_dict`` returned, or what came back from JSON.

        Raises:
            StateMismatchError: It is of another model, device or torch, of a time when
                losses went by rows in all steps, or it is damaged. Nothing has changed
                then.
            MimoseError: The session was detached.
        """
        raise_if_of_another(state, self._description(self._raise_if_detached()))
        raise_if_damaged(state)
        before = self.state_dict()
        try:
            self._engine.load_state_dict(state)
        except Exception as error:  # it may be made by hand
            self._engine.load_state_dict(before)
            msg = f"the state is damaged: {type(error).__name__}: {error}"
            raise StateMismatchError(msg) from error

    def _description(self, model: nn.Module) -> dict[str, Any]:
        shared = sharding(model)
        return describe(
            own_class(model).__qualname__,
            model,
            self._engine.device,
            [layer.name for layer in self._engine.layers],
            parallel_shares(model),
            actions=", ".join(self._engine.learner.model.menu.names),
            meter=type(self._engine.meter).__qualname__,
            compiled=", ".join(
                layer.name for layer in self._engine.layers if layer.is_compiled
            ),
            **({"sharding": shared} if shared else {}),
        )

    # ------------------------------------------------------------------ reporting

    def report(self, width: int | None = None) -> str:
        """Return what happened so far, as text for people.

        Args:
            width: In so many columns; None for the terminal's.
        """
        width = width or terminal_width()
        return _report.report(self.summary(), list(self.records), width)

    def summary(self) -> Summary:
        """Return the session in numbers."""
        snapshot = self._engine.snapshot
        return _report.summarise(
            self.records,
            budget_bytes=self.budget_bytes,
            peak_bytes=self.peak_bytes,
            layers=self._n_layers,
            plans=self._engine.policy.plans,
            margin=self._engine.policy.margin.share,
            kept_units=dict(self._engine.findings.kept),
            **self._engine.memory_limit.summary(),
            **self._pace(),
            inexact_layers=dict(self._engine.findings.inexact),
            largest_to_come=self._engine.to_come.largest,
            least_peak_to_come=self._engine.to_come.least_peak_bytes,
            host=self._engine.host_use,
            agreement=snapshot.agreement_use,
        )

    def explain(self, shape: Mapping[str, int] | None = None) -> str:
        """Return the plan for a shape, call by call, and which segment binds.

        Args:
            shape: Sizes by name, such as ``{"input_ids.1": 512}``; the others are as
                in the last step. None for the last step's shape.

        Raises:
            MimoseError: A name is not one of the model's, or no step with such inputs
                was measured yet.
            InfeasibleBudgetError: No plan keeps the budget at this shape.
        """
        step_input, table, memory = self._asked(shape)
        problem, plan, why = self._engine.policy.explain(step_input, memory)
        model, seconds = self._engine.learner.model, self._engine.seconds
        rates = seconds.rates(step_input.context)
        index = {action: i for i, action in enumerate(problem.actions)}
        choice = np.array([index[action] for action in plan.actions], dtype=np.intp)
        return _report.explain(
            problem,
            lay_out(problem, choice),
            shape=table.named(step_input.sizes),
            why=why,
            seconds=rates and rates.parts(*step_work(model, step_input, plan.actions)),
            by_rows=self._engine.snapshot.can_go_by_rows,
            width=terminal_width(),
        )

    def forecast(
        self,
        shape: Mapping[str, int] | None = None,
        budget: float | str | None = None,
        *,
        accumulating: bool | None = None,
    ) -> Forecast:
        """Return what a step of a shape would take; nothing changes by it.

        ::

            session.forecast({"input_ids.0": 32, "input_ids.1": 512}).fits

        It may be asked between any two steps, and before the first one of a session
        that has loaded a state. Asked again it takes a part of a millisecond, at a new
        shape a few of them.

        Args:
            shape: Sizes by name, as for `explain`; the others are as in the last step.
            budget: Within which, as for `attach`; None for the session's.
            accumulating: Whether the step finds gradients there, as all but the first
                of an accumulation do; None for whether one of the last two steps did.

        Raises:
            MimoseError: A name is not one of the model's; no step was run and no state
                was loaded; or the session was detached.
            BudgetError: The budget cannot be read.
        """
        self._raise_if_detached()
        return self._forecasts.ask(shape, budget, accumulating)

    def largest(
        self,
        shape: Mapping[str, int],
        *,
        vary: str,
        budget: float | str | None = None,
        most: int | None = None,
        accumulating: bool | None = None,
    ) -> int:
        """Return the largest value of one size with which a step is known to fit.

        ::

            rows = session.largest({"input_ids.1": 512}, vary="input_ids.0", most=256)

        Args:
            shape: The other sizes by name, as for `forecast`.
            vary: The name of the size.
            budget: As for `forecast`.
            most: No more is asked for; None for as far as predictions are trusted.
            accumulating: As for `forecast`.

        Returns:
            0 where none fits, or where it is not known of any; `forecast` of one says
            which.

        Raises:
            MimoseError: As for `forecast`.
            BudgetError: The budget cannot be read.
        """
        self._raise_if_detached()
        return self._forecasts.largest(shape, vary, budget, most, accumulating)

    def planning_problem(
        self, shape: Mapping[str, int] | None = None, *, start_bytes: int | None = None
    ) -> PlanningProblem:
        """Return what a planner would be given for a shape, no margin taken off.

        Args:
            shape: Sizes by name, as for `explain`.
            start_bytes: Held when the step begins; None for what is held now.

        Raises:
            MimoseError: A name is not one of the model's, or the shape's kind of
                inputs was not measured yet.
        """
        step_input, _, memory = self._asked(shape)
        if start_bytes is not None:
            memory = memory._replace(start_bytes=float(start_bytes))
        return self._engine.policy.problem(step_input, memory)

    def _pace(self) -> dict[str, Any]:
        """Return the fields of a `Summary` that say what larger batches bring."""
        last, model = self._engine.snapshot.last, self._engine.learner.model
        if last is None or last[0].context not in model.patterns:
            return {}
        step_input, table = last
        rates = self._engine.seconds.rates(step_input.context)
        if rates is None or len(step_input.sizes) != len(table.names):
            return {}
        keep = [model.menu.first] * len(model.pattern(step_input).calls)
        name, rows = table.rows(step_input.sizes)
        seconds, fixed, _ = rates.parts(*step_work(model, step_input, keep))
        return {
            "fixed_seconds": fixed,
            "row_seconds": {name: (seconds - fixed) / rows},
        }

    def _asked(
        self, shape: Mapping[str, int] | None
    ) -> tuple[StepInput, SizeTable, Memory]:
        step_input, table = asked(self._engine, shape)
        self._engine.worker.catch_up()
        if step_input.context not in self._engine.learner.model.patterns:
            msg = "no step with such inputs was measured yet; train a few first"
            raise MimoseError(msg)
        memory = self._engine.snapshot.memory
        assert memory is not None
        return step_input, table, memory
