"""The child process of a rehearsal: trains on one simulated card, and says what it saw.

Note: [What lies outside of the allocator]
A process holds half a GiB of a card before its first tensor: that of an H200 had 139.3
of 139.8 GiB free (``docs/results/nvidia-h200/check.csv``). NCCL holds about a GiB more
(1.06 GB on each of 8 H100s before an all-to-all, NVIDIA/nccl#1685). Both are taken from
the card as memory of others.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
import math
import resource
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from mimose.bench.advise.methods import OPTIMIZERS, loss_of
from mimose.bench.child import RunFailedError
from mimose.bench.device import SIM
from mimose.bench.rehearse.batches import Batches
from mimose.bench.rehearse.foreign import named_in, raise_if_foreign, values_read
from mimose.bench.rehearse.holders import at_peak
from mimose.bench.rehearse.host import of_session
from mimose.bench.step_meter import autocast
from mimose.bench.usage import UsageError
from mimose.bench.zoo import called_by_name
from mimose.exceptions import (
    BudgetError,
    InfeasibleBudgetError,
    MimoseError,
    first_line,
)
from mimose.session import Session, attach
from mimose.sim import use
from mimose.sim.hollow import HOST, clock
from mimose.state import rehearsed
from mimose.tensors import tensors_in
from mimose.torch_private import begin_one_of_ranks

_OUTSIDE_BYTES, _NCCL_BYTES = 2**29, 2**30
"""See Note: [What lies outside of the allocator]."""
_AMPLE_BYTES = 2**41
"""While the model is built, the card holds as much as any host."""
_FIRST = 10
"""The steps before are left out of rates and errors."""
_MOST_TRIALS, _NEAR = 10, 0.02
"""The most steps that look for the largest value of a size, and when it is found."""

Shape = Mapping[str, int]


def work(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rehearse one card; yield each step, and at the end what was found.

    Args:
        task: The fields of `mimose.bench.rehearse.command.Settings`, with one ``card``
            and its ``gib``, and ``records``, a file.
    """
    warnings.filterwarnings("ignore")
    sim = use()
    sim.set_total_memory(_AMPLE_BYTES)
    sim.set_hollow(sim.CARDS[task["card"]], HOST)
    if task["ranks"] > 1:
        sim.set_link(sim.LINKS[task["card"]])
        begin_one_of_ranks(SIM, task["ranks"])
    training = _Training(task)
    gc.collect()
    sim.empty_cache()
    outside = _OUTSIDE_BYTES + (_NCCL_BYTES if task["ranks"] > 1 else 0)
    total = int(task["gib"] * 2**30)
    told = {"total_bytes": total, "outside_bytes": outside}
    missing = sim.memory_allocated() - (total - outside)
    if missing >= 0:
        yield {**told, "missing_bytes": missing, "held": training.held()}
        return
    notes = training.notes()  # a bare forward may need more than the card has
    gc.collect()
    sim.empty_cache()
    sim.set_total_memory(total)
    sim.set_others(outside)
    options = {"record_to": task["records"], "actions": task["actions"]}
    try:
        session = attach(
            training.model, task["budget"], refine=False, agree=None, **options
        )
    except InfeasibleBudgetError as error:
        yield {**told, **_missing(error), "held": training.held(), "notes": notes}
        return
    except BudgetError as error:
        if task["budget"] is not None:
            raise RunFailedError(first_line(error)) from error
        why = {"why": first_line(error)}
        yield {**told, **why, "held": training.held(), "notes": notes}
        return
    except MimoseError as error:
        raise RunFailedError(first_line(error)) from error
    with session:
        charge = of_session(session)
        for n, (shape, batch) in enumerate(training.batches()):
            step = training.watched(session, shape, batch, charge)
            yield {"step": n, **step}
            if step["no_room"] and task["ranks"] > 1:
                break  # the other ranks wait, so no training goes on
        if not training.steps:
            msg = f"batches() of {task['model'].partition(':')[0]} yielded no batch"
            raise RunFailedError(msg)
        if task["ranks"] > 1 and not any(s["collectives"] for s in training.steps):
            notes.append(
                f"nothing was sent between the {task['ranks']} ranks: the function "
                f"does not shard or wrap the model (fully_shard, DDP), so this is what "
                f"one process alone would do"
            )
        learned = (
            rehearsed(session.state_dict(), task["card"]) if task["save"] else None
        )
        found = {"state": learned, **_found(session, training, charge)}
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    own = {"cpu_seconds": time.process_time(), "host_peak_bytes": peak}
    yield {**told, **found, **own, "held": training.held(), "notes": notes}


def _missing(error: InfeasibleBudgetError) -> dict[str, Any]:
    missing = error.least_peak_bytes - error.budget_bytes
    return {"missing_bytes": missing, "why": first_line(error)}


def _made(source: str) -> tuple[nn.Module, Any, torch.optim.Optimizer | None]:
    """Call the user's function under the device.

    Raises:
        RunFailedError: It failed, or returned something else.
    """
    try:
        with torch.device(SIM):
            made = called_by_name(source)
    except ValueError as error:
        text, advice = str(error), named_in(error)
        if not advice and ("cuda" in text.lower() or "nvidia" in text.lower()):
            advice = (
                ". The rehearsal's device is torch's default one, and there is no "
                "other: leave .cuda() and device='cuda' out, or take "
                "torch.get_default_device()"
            )
        raise RunFailedError(text + advice) from error
    parts = made if isinstance(made, tuple) else (made,)
    model, batch, optimizer = (*parts, None, None, None)[:3]
    if not isinstance(model, nn.Module) or batch is None or len(parts) > 3:
        msg = (
            f"--model {source}: the function must return (model, batch) or (model, "
            f"batch, optimizer); it returned {type(made).__name__}"
        )
        raise RunFailedError(msg)
    return model, batch, optimizer


class _Training:
    """The user's model, batches and optimizer, and a plain loop."""

    def __init__(self, task: Mapping[str, Any]) -> None:
        self._task = task
        self._device = torch.device(SIM)
        self.model, batch, optimizer = _made(task["model"])
        self.model.train()
        raise_if_foreign(self.model, optimizer)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = optimizer or OPTIMIZERS[task["optimizer"]](trained)
        try:
            self.own = Batches(self.model, batch, task["lengths"])
        except UsageError as error:
            raise RunFailedError(str(error)) from error
        own = [*self.model.parameters(), *self.model.buffers()]
        self._weight_bytes, self._gradient_bytes = _bytes(own), 0
        self.ranks: int = task["ranks"]
        self.steps: list[dict[str, Any]] = []
        self.highest: tuple[Shape | None, Any] = (None, None)
        """The shape and the batch of the step with the highest level."""
        self._highest_bytes = -1

    def notes(self) -> list[str]:
        """Return where results would depend on numbers that are not computed.

        Raises:
            RunFailedError: The forward cannot run.
        """
        batch = self._moved(self.own.made(self.own.shape()))
        try:
            found = list(values_read(lambda: self._loss(batch)))
        except Exception as error:  # the user's code, whatever it does
            raise self._failed(error) from error
        sizes = zip(self.own.names, self.own.longest, strict=True)
        longest = max((n for name, n in sizes if name != self.own.rows), default=0)
        if longest > self.n_positions:
            found.append(
                f"lengths up to {longest} pass the model's table of "
                f"{self.n_positions:,} positions: a card would refuse them"
            )
        return found

    @property
    def n_positions(self) -> float:
        """The rows of the smallest table of positions that the model learns."""
        tables = (
            module.num_embeddings
            for name, module in self.model.named_modules()
            if isinstance(module, nn.Embedding) and "pos" in name.rpartition(".")[2]
        )
        return min(tables, default=math.inf)

    def batches(self) -> Iterator[tuple[Shape | None, Any]]:
        """Yield the user's own batches, or those of the lengths, with their shapes."""
        module = importlib.import_module(self._task["model"].partition(":")[0])
        n = self._task["steps"]
        if callable(getattr(module, "batches", None)):
            for batch in itertools.islice(module.batches(), n):
                yield None, batch
            return
        for sizes in self.own.drawn(n, self._task["seed"]):
            shape = self.own.shape(sizes)
            yield shape, self.own.made(shape)

    def watched(
        self,
        session: Session,
        shape: Shape | None,
        batch: Any,
        charge: Callable[[], None],
    ) -> dict[str, Any]:
        """Train a batch; keep and return what the card and the session say of it."""
        before = clock()
        n_before = session.records[-1].step if session.records else -1
        step: dict[str, Any] = {"shape": dict(shape or {}), "no_room": ""}
        try:
            self._train(batch, charge)
        except (InfeasibleBudgetError, torch.OutOfMemoryError) as error:
            what = first_line(error)
            step["no_room"] = what.replace("SIM out", f"Step {len(self.steps)} ran out")
            if isinstance(error, InfeasibleBudgetError):
                step |= _missing(error)
            error.__traceback__ = None  # its frames hold the step's tensors
        except Exception as error:
            raise self._failed(error) from error
        if step["no_room"]:
            self.optimizer.zero_grad()
            gc.collect()
        elif session.records and session.records[-1].step > n_before:
            record = session.records[-1]
            step |= {
                "shape": dict(shape or record.shape),
                "record": record.step,
                "phase": record.phase,
                "recomputed": record.n_recomputed,
                "calls": len(record.actions),
                "predicted": record.predicted_peak_bytes,
                "observed": record.observed_peak_bytes,
                "reserved": record.reserved_peak_bytes,
                "error": record.prediction_error,
                "over": record.is_over,
                "retries": record.retries,
            }
            if (record.observed_peak_bytes or 0) > self._highest_bytes:
                self._highest_bytes = record.observed_peak_bytes or 0
                self.highest = shape, batch
        passed = clock().since(before)
        step |= {"seconds": passed.user, "collectives": passed.collectives}
        first = next(each for each in tensors_in(batch) if each.ndim)
        step["items"] = first.numel() if self.own.unit == "tokens" else len(first)
        self.steps.append(step)
        return step

    def held(self) -> dict[str, float]:
        """Return the bytes that stay between steps, by what they are."""
        state = tensors_in(list(self.optimizer.state.values()))
        return {
            "weights": self._weight_bytes,
            "gradients": self._gradient_bytes,
            "optimizer": _bytes(t for t in state if t.device.type == SIM),
        }

    def _train(self, batch: Any, charge: Callable[[], None]) -> None:
        loss = self._loss(self._moved(batch))
        charge()
        torch.autograd.backward(loss)
        del loss
        if not self.steps:
            self._gradient_bytes = _bytes(
                p.grad for p in self.model.parameters() if p.grad is not None
            )
        self.optimizer.step()
        self.optimizer.zero_grad()

    def _loss(self, batch: Any) -> torch.Tensor:
        with autocast(self._device, self._task["dtype"]):
            is_named = isinstance(batch, Mapping)
            output = self.model(**batch) if is_named else self.model(*batch)
        loss = loss_of(output)
        return loss if loss.ndim == 0 else loss.float().mean()

    def _moved(self, batch: Any) -> Any:
        def moved(each: Any) -> Any:
            return each.to(self._device) if isinstance(each, torch.Tensor) else each

        if isinstance(batch, Mapping):
            return {name: moved(each) for name, each in batch.items()}
        return tuple(map(moved, batch if isinstance(batch, (tuple, list)) else [batch]))

    def _failed(self, error: Exception) -> RunFailedError:
        what = first_line(error).partition(": it has no kernel")[0]
        text = f"the model's step failed: {type(error).__name__}: {what}"
        return RunFailedError(text + named_in(error))


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Return the bytes that tensors hold on this rank, shared ones once."""
    storages = {}
    for each in tensors:
        local: torch.Tensor = each.to_local() if hasattr(each, "to_local") else each
        storage = local.untyped_storage()
        storages[id(local) if not storage else storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


# ------------------------------------------------------------------ what was found


def _found(
    session: Session, training: _Training, charge: Callable[[], None]
) -> dict[str, Any]:
    """Return what the steps and the session say, and what they still find out."""
    done = [step for step in training.steps if not step["no_room"]]
    late = [s for s in training.steps[_FIRST:] if not s["no_room"]] or done[-1:]
    once = [step for step in late if step["error"] is not None and not step["retries"]]
    errors = sorted(abs(step["error"]) for step in once)
    seconds = sum(step["seconds"] for step in late)
    failed = [step for step in training.steps if step["no_room"]]
    found: dict[str, Any] = {
        "budget_bytes": session.budget,
        "unit": training.own.unit,
        "over": sum(step["over"] for step in done),
        "reruns": sum(step["retries"] for step in done),
        "errors": errors,
        "items_per_second": sum(s["items"] for s in late) / seconds if late else None,
        "collective_seconds": sum(s["collectives"] for s in late) / max(1, len(late)),
        "peak_bytes": session.peak_bytes,
        "missing_bytes": max((s.get("missing_bytes", 0) for s in failed), default=0),
        "why": failed[-1]["no_room"] if failed else "",
    }
    if not done:
        return found
    highest = max(done, key=lambda step: step["observed"] or 0)
    if not failed or training.ranks == 1:  # a failed backward leaves ranks unusable
        found["holders"] = _holders(session, training, charge)
    found["extra_share"] = _extra(session, [step["shape"] for step in late])
    if highest["shape"] and not failed:
        found["largest"] = _largest(session, training, charge)
    return found


def _holders(
    session: Session, training: _Training, charge: Callable[[], None]
) -> dict[str, float]:
    """Return what holds the highest step's level, run again; nothing without one."""
    shape, batch = training.highest
    if batch is None:
        return {}
    held = {name: n for name, n in training.held().items() if name != "gradients"}

    def step() -> None:
        training.watched(session, shape, batch, charge)

    return at_peak(training.model, training.optimizer, held, step)


def _extra(session: Session, shapes: Iterable[Shape]) -> float | None:
    """Return the part of the seconds of steps that recomputation takes."""
    told = [session.forecast(shape) for shape in shapes]
    known = [t for t in told if t.extra_seconds is not None and t.seconds]
    whole = sum(t.seconds or 0.0 for t in known)
    return sum(t.extra_seconds or 0.0 for t in known) / whole if whole else None


def _largest(
    session: Session, training: _Training, charge: Callable[[], None]
) -> dict[str, int]:
    """Return the largest rows, and the largest of each size, that were trained.

    The others stay at their largest of the rehearsal. A trial takes no card, so each
    answer is one that was trained: twice as much while it fits, then what the session
    predicts, then halves.
    """
    own = training.own
    longest = own.shape(own.longest)
    found = {}
    for vary in dict.fromkeys((*own.names, own.rows)):
        best, too_many = longest.get(vary) or own.own_size(vary), 0
        for _ in range(_MOST_TRIALS):
            others = {name: n for name, n in longest.items() if name != vary}
            size = (best + too_many) // 2 if too_many else 2 * best
            if too_many:
                with contextlib.suppress(MimoseError):
                    asked = session.largest(others, dim=vary, limit=too_many - 1)
                    size = asked if asked > best else size
            if vary != own.rows:
                size = int(min(size, training.n_positions))
            if size - best <= _NEAR * best:
                break
            shape = {**longest, vary: size}
            try:
                step = training.watched(session, shape, own.made(shape), charge)
                has_room = not step["no_room"]
            except RunFailedError:  # the model takes no such size
                has_room = False
            best, too_many = (size, too_many) if has_room else (best, size)
        found[vary] = best
    return found
