"""What stays on the device where one action is everywhere, and what of gradients?

Each model runs the same step bare and under each action, all layers and the stem alike,
on the simulated device, whose readings are exact. Bytes are requested bytes over what
is always there (weights, their gradients, buffers and the batch): what is held when the
forward has ended; the highest moment of the step, workspaces within operators included;
and the highest level between two operators of what is no gradient of a weight either,
which is what tensors hold for the backward's sake. Gradients are compared with the bare
model's, dropout drawing the same.

    python -m benchmarks.proofs packing
    python -m benchmarks.proofs packing --models resnet50
"""

from __future__ import annotations

import argparse
import gc
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from benchmarks.proofs.common import Answer, Bar, Settings, device, rows_of
from benchmarks.proofs.models import names_of
from benchmarks.proofs.numbers import percent
from mimose.bench.device import prepare
from mimose.bench.rows import Row
from mimose.bench.step_meter import DeviceStepMeter
from mimose.bench.zoo import builder, moved
from mimose.torch_private import TorchDispatchMode

QUESTION = "What stays on the device under actions that pack, and what of gradients?"
OPTIONS = (device("sim"),)

ACTIONS = (
    "keep",
    "lean",
    "pool",
    "pool4",
    "quantize",
    "quantize4",
    "offload",
    "offload_input",
    "recompute",
)
_EXACT = ("keep", "lean", "offload", "offload_input", "recompute")
_STEPS = 3
_PEAK_BAR, _HELD_BAR = 0.35, 0.33
_ROUNDED_BAR, _TIMES_BAR = 0.01, 4.0


class _Case(NamedTuple):
    build: Callable[[], tuple[nn.Module, dict[str, torch.Tensor], Any]]
    """Makes a model, a batch, and says which of its modules are units."""
    what: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PackingRow(Row):
    """One model's step under one action; "" for the bare model's."""

    model: str
    action: str
    what: str
    """The model's batch."""
    held_bytes: int
    """When the forward has ended."""
    peak_bytes: int
    between_bytes: int
    """The highest level between two operators, gradients of weights left out."""
    host_bytes: int
    """Held on the host at the most."""
    gradient_error: float
    """The norm of the difference over the norm, of all weights together."""
    is_exact: bool
    """Whether loss and gradients are the bare model's to the last bit."""


def ask(settings: Settings, options: argparse.Namespace) -> Answer:
    """Run every model under every action."""
    del options
    answer = Answer()
    for name in names_of(_CASES, settings.models):
        own = rows_of(PackingRow, "packing", settings, model=name)
        for line in _table(own):
            answer.table.append(line)
        answer.rows.extend(own)
        answer.bars.extend(_judge(own))
    return answer


def _table(rows: Sequence[PackingRow]) -> Iterator[dict[str, object]]:
    bare = rows[0]
    for row in rows:
        yield {
            "model": row.model,
            "action": row.action or "(bare)",
            "held MiB": row.held_bytes / 2**20,
            "held": percent(row.held_bytes / bare.held_bytes - 1.0),
            "peak MiB": row.peak_bytes / 2**20,
            "peak": percent(row.peak_bytes / bare.peak_bytes - 1.0),
            "over gradients": percent(row.between_bytes / bare.between_bytes - 1.0),
            "host MiB": row.host_bytes / 2**20,
            "gradient error": percent(row.gradient_error, 2),
        }


def _judge(rows: Sequence[PackingRow]) -> Iterator[Bar]:
    at = {row.action: row for row in rows}
    bare, name = at[""], rows[0].model
    wrong = sum(not at[action].is_exact for action in _EXACT)
    yield Bar(f"{name}: exact actions that are not", wrong, 0)
    if name == "resnet50":
        less = 1.0 - at["pool"].between_bytes / bare.between_bytes
        what = f"{name}: peak over gradients that pool takes off"
        yield Bar(what, less, at_least=_PEAK_BAR, is_share=True)
    if name == "resnet18":
        less = 1.0 - at["pool"].held_bytes / bare.held_bytes
        what = f"{name}: activations that pool takes off"
        yield Bar(what, less, at_least=_HELD_BAR, is_share=True)
    if name == "gpt2":
        rounded = at["quantize"]
        what = f"{name}: times fewer bytes under quantize"
        times = bare.held_bytes / rounded.held_bytes
        yield Bar(what, times, at_least=_TIMES_BAR)
        what = f"{name}: error of gradients under quantize"
        yield Bar(what, rounded.gradient_error, _ROUNDED_BAR, is_share=True)


# ------------------------------------------------------------------------- the models


_residual = builder("ResNetConfig", "ResNetForImageClassification", num_labels=10)
_blocks = builder(
    "GPT2Config",
    "GPT2Model",
    **{"n_embd": 256, "n_head": 4, "n_layer": 6, "n_positions": 512},
    **{"vocab_size": 1000, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False},
)


def _resnet(sizes: Mapping[str, Any], batch: int, side: int) -> Any:
    model: Any = _residual(**sizes)
    images = {
        "pixel_values": _smooth(batch, side),
        "labels": torch.arange(batch) % 10,
    }
    names = ["resnet.embedder"]
    for stage, depth in enumerate(model.config.depths):
        blocks = f"resnet.encoder.stages.{stage}.layers"
        names += [f"{blocks}.{number}" for number in range(depth)]
    return model, images, names


def _smooth(batch: int, side: int) -> torch.Tensor:
    """Return images whose neighbouring points are alike, as those of things are."""
    small = torch.randn(batch, 3, side // 8, side // 8)
    size = (side, side)
    return nn.functional.interpolate(small, size=size, mode="bilinear")


def _resnet50() -> Any:
    return _resnet({}, 8, 96)


def _resnet18() -> Any:
    sizes = {
        "layer_type": "basic",
        "hidden_sizes": [64, 128, 256, 512],
        "depths": [2, 2, 2, 2],
    }
    return _resnet(sizes, 16, 64)


def _gpt2() -> Any:
    """Make a stack of blocks, without the head, whose logits no action reaches."""
    tokens = {"input_ids": torch.randint(0, 1000, (4, 256))}
    return _blocks(), tokens, None


_CASES = {
    "resnet50": _Case(_resnet50, "8 images of 96 x 96"),
    "resnet18": _Case(_resnet18, "16 images of 64 x 64"),
    "gpt2": _Case(_gpt2, "4 texts of 256 tokens, 6 blocks of width 256"),
}


# -------------------------------------------------------------------------- the child


def work(task: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Run one model bare and under each action."""
    prepare(task)
    case = _CASES[task["model"]]
    bare: _Ran | None = None
    with torch.autograd.set_multithreading_enabled(False):
        for action in ("", *ACTIONS):
            torch.manual_seed(task["seed"])
            ran = _run(case, action, task["device"])
            bare = bare or ran
            yield {
                "model": task["model"],
                "action": action,
                "what": case.what,
                "held_bytes": ran.held_bytes,
                "peak_bytes": ran.peak_bytes,
                "between_bytes": ran.between_bytes,
                "host_bytes": ran.host_bytes,
                "gradient_error": _error(bare, ran),
                "is_exact": all(map(torch.equal, bare.results, ran.results)),
            }


class _Ran(NamedTuple):
    held_bytes: int
    peak_bytes: int
    between_bytes: int
    host_bytes: int
    results: list[torch.Tensor]
    """The loss, and the weights' gradients, on the CPU."""


def _run(case: _Case, action: str, device: str) -> _Ran:
    import mimose
    from mimose.planners import Everywhere

    model, batch, units = case.build()
    place = torch.device(device)
    model, batch = model.to(place).train(), moved(batch, place)
    meter, session = DeviceStepMeter(place), None
    if action:
        session = mimose.attach(
            model,
            "1TiB",
            units=units,
            actions=("keep", *({action} - {"keep", "recompute"}), "recompute"),
            planner=Everywhere(action),
        )
    between = 0
    for number in range(_STEPS + 1):
        is_watched = number == _STEPS
        if not is_watched and number:
            model.zero_grad(set_to_none=False)
        gc.collect()
        always = _bytes_of([*model.parameters(), *model.buffers(), *batch.values()])
        always += _bytes_of([p.grad for p in model.parameters() if p.grad is not None])
        torch.manual_seed(1)
        if is_watched:  # by an instrument that sees between operators
            with _Between(model, meter, always) as watch:
                _loss(model(**batch)).backward()  # type: ignore[no-untyped-call]
            between = watch.highest_bytes
            break
        meter.reset_peak()
        loss = _loss(model(**batch))
        held = meter.live_bytes() - always
        loss.backward()  # type: ignore[no-untyped-call]
        peak = meter.peak_bytes() - always
        told = loss.detach()
        del loss
        results = [p.grad.cpu() for p in model.parameters() if p.grad is not None]
    host = 0
    if session is not None:
        used = session.summary().host
        host = used.peak_bytes if used else 0
        session.detach()
    return _Ran(held, peak, between, host, [told.cpu(), *results])


def _loss(output: Any) -> torch.Tensor:
    if getattr(output, "loss", None) is not None:
        told: torch.Tensor = output.loss
        return told
    last: torch.Tensor = output.last_hidden_state
    drawn = torch.randn(last.shape, generator=torch.Generator().manual_seed(2))
    return (last * drawn.to(last.device)).mean()


class _Between(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reads the level after each operator, gradients of weights left out.

    Args:
        model: Whose weights.
        meter: Reads the level.
        always_bytes: What is no part of it.
    """

    def __init__(
        self, model: nn.Module, meter: DeviceStepMeter, always_bytes: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.highest_bytes = 0
        self._meter, self._always_bytes = meter, always_bytes
        self._level = 0
        self._gradient_bytes = 0
        self._hooks = [p.register_hook(self._note) for p in model.parameters()]  # type: ignore[no-untyped-call]

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and read."""
        self._take_in()
        result = func(*args, **(kwargs or {}))
        self._level = self._meter.live_bytes() - self._always_bytes
        return result

    def _take_in(self) -> None:
        self.highest_bytes = max(self.highest_bytes, self._level - self._gradient_bytes)

    def _note(self, gradient: torch.Tensor) -> None:
        """Leave a weight's gradient out as long as it is there."""
        n_bytes = gradient.untyped_storage().nbytes()
        self._gradient_bytes += n_bytes
        weakref.finalize(gradient.untyped_storage(), self._forget, n_bytes)

    def _forget(self, n_bytes: int) -> None:
        self._gradient_bytes -= n_bytes

    def __exit__(self, *raised: Any) -> None:
        """Take the hooks off."""
        self._take_in()
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]


def _bytes_of(tensors: Sequence[torch.Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _error(bare: _Ran, other: _Ran) -> float:
    exact, found = bare.results[1:], other.results[1:]
    off = sum(_square(b - a) for a, b in zip(exact, found, strict=True))
    return float((off / sum(map(_square, exact))) ** 0.5)


def _square(tensor: torch.Tensor) -> float:
    return float(tensor.double().square().sum())
