"""What stays on the device where one action is everywhere, and how far off is what?

Each model runs the same step bare and under each action, on the simulated device, whose
readings are exact. All layers and the stem run alike; under lossy actions, which leave
alone what layers share, a ResNet is one layer. Bytes are requested bytes over what is
always there (weights, their gradients, buffers and the batch): saved bytes when the
forward has ended, and the highest level between two operators, gradients of weights
left out, which is what tensors hold for the backward's sake. Workspaces within
operators are the CPU library's, and differ by processor and threads. Gradients are
compared with the bare model's, dropout drawing the same.

    python -m benchmarks.proofs packing
    python -m benchmarks.proofs packing --models resnet50
"""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Row, Rows, Settings, Task
from benchmarks.proofs.models import names_of
from mimose.bench.step_meter import DeviceStepMeter
from mimose.bench.zoo import builder, moved
from mimose.planners import everywhere
from mimose.session import attach
from mimose.torch_private import TorchDispatchMode

QUESTION = "What stays on the device under each action, and what of the gradients?"
OPTIONS = (common.device("sim"),)

BARE = ""
_EXACT = ("selective", "offload", "offload_input", "recompute")
_LOSSY = ("pool", "quantize")
_STEPS = 3
_BARS: Mapping[str, tuple[str, str, float]] = {
    "resnet50": ("pool", "peak", 0.29),
    "resnet18": ("pool", "held", 0.33),
    "gpt2": ("quantize", "held", 0.4),
}
"""How much less an action is to leave of a model's bytes: held, or at the peak."""
_ERROR_BAR = 0.01


def ask(settings: Settings, _: Options) -> Answer:
    """Run every model under every action."""
    answer = Answer()
    for name in names_of(_CASES, settings.models):
        own = common.measured("packing", settings, model=name)
        answer.rows.extend(own)
        answer.table.extend(_line(own[0], row) for row in own)
        answer.bars.extend(_judge(name, {row["action"]: row for row in own}))
    return answer


def _line(bare: Row, row: Row) -> dict[str, object]:
    return {
        "model": row["model"],
        "action": row["action"] or "(bare)",
        "held": f"{-_less(bare, row, 'held'):.1%}",
        "peak": f"{-_less(bare, row, 'peak'):.1%}",
        "gradient error": f"{row['gradient_error']:.2%}",
    }


def _less(bare: Row, row: Row, which: str) -> float:
    return float(1 - row[f"{which}_bytes"] / bare[f"{which}_bytes"])


def _judge(name: str, at: Mapping[str, Row]) -> Iterator[Bar]:
    wrong = sum(not at[action]["is_exact"] for action in _EXACT)
    yield Bar(f"{name}: exact actions that are not", wrong, 0)
    action, which, bar = _BARS[name]
    less = _less(at[BARE], at[action], which)
    yield Bar(f"{name}: {action} takes off what is {which}", less, at_least=bar)
    if name == "gpt2":
        error = at["quantize"]["gradient_error"]
        yield Bar(f"{name}: gradients' error under quantize", error, _ERROR_BAR)


# ------------------------------------------------------------------------- the models


def _resnet(sizes: Mapping[str, Any], batch: int, side: int) -> Any:
    """Return a ResNet, images, its layers (the stem, each block), and all as one."""
    build = builder("ResNetConfig", "ResNetForImageClassification", num_labels=10)
    model = build(**sizes)
    small = torch.randn(batch, 3, side // 8, side // 8)
    pixels = nn.functional.interpolate(small, size=(side, side), mode="bilinear")
    images = {"pixel_values": pixels, "labels": torch.arange(batch) % 10}
    layers = re.compile(r"resnet\.(embedder|encoder\.stages\.\d+\.layers\.\d+)")
    names = [name for name, _ in model.named_modules() if layers.fullmatch(name)]
    return model, images, names, ["resnet"]


def _gpt2() -> Any:
    """Return a stack of blocks, without the head, whose logits no action reaches."""
    sizes = {"n_embd": 256, "n_head": 4, "n_layer": 6, "vocab_size": 1000}
    tokens = {"n_positions": 512, "bos_token_id": 0, "eos_token_id": 0}
    model = builder("GPT2Config", "GPT2Model", **sizes, **tokens, use_cache=False)()
    return model, {"input_ids": torch.randint(0, 1000, (4, 256))}, None, None


_WIDTHS = [64, 128, 256, 512]
_RESNET18 = {"layer_type": "basic", "depths": [2] * 4, "hidden_sizes": _WIDTHS}
_CASES: Mapping[str, Callable[[], Any]] = {
    "resnet50": lambda: _resnet({}, 8, 96),
    "resnet18": lambda: _resnet(_RESNET18, 16, 64),
    "gpt2": _gpt2,
}
"""What makes a model, its batch and its layers."""


# -------------------------------------------------------------------------- the child


def work(task: Task) -> Rows:
    """Run one model bare and under each action."""
    bare: list[torch.Tensor] = []
    with torch.autograd.set_multithreading_enabled(False):
        for action in (BARE, *_EXACT, *_LOSSY):
            torch.manual_seed(task["seed"])
            case, device = _CASES[task["model"]](), torch.device(task["device"])
            levels, results = _run(case, action, device)
            bare = bare or results
            yield {
                "model": task["model"],
                "action": action,
                **levels,
                "gradient_error": _error(bare[1:], results[1:]),
                "is_exact": all(map(torch.equal, bare, results)),
            }


def _run(
    case: Any, action: str, place: torch.device
) -> tuple[dict[str, int], list[torch.Tensor]]:
    """Run a few steps under an action; the last one counts.

    Returns:
        Bytes when the forward has ended and at the peak; the loss and the weights'
        gradients.
    """
    model, batch, layers, whole = case
    model, batch = model.to(place).train(), moved(batch, place)
    session = None
    if action != BARE:
        menu = ("keep", *({action} - {"keep", "recompute"}), "recompute")
        planner = everywhere(action)
        chosen = whole if action in _LOSSY else layers
        session = attach(
            model, common.AMPLE_BYTES, layers=chosen, actions=menu, planner=planner
        )
    for _ in range(_STEPS):
        always = _begin(model, batch)
        with _Levels(model, DeviceStepMeter(place), always) as levels:
            loss = _loss(model(**batch))
            held = levels.bytes()
            loss.backward()  # type: ignore[no-untyped-call]
        results = [loss.detach(), *(p.grad for p in model.parameters())]
        results = [each.cpu() for each in results if each is not None]
        del loss
    if session is not None:
        session.detach()
    return {"held_bytes": held, "peak_bytes": levels.highest_bytes}, results


def _begin(model: nn.Module, batch: Mapping[str, Any]) -> int:
    """Make ready for a step; return the bytes that are always there."""
    model.zero_grad(set_to_none=False)
    gc.collect()
    torch.manual_seed(1)
    tensors = [*model.parameters(), *model.buffers(), *batch.values()]
    tensors += [p.grad for p in model.parameters() if p.grad is not None]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage() for t in tensors}
    return sum(storage.nbytes() for storage in storages.values())


def _loss(output: Any) -> torch.Tensor:
    first: torch.Tensor = output[0]  # the loss, where there are labels
    if not first.dim():
        return first
    drawn = torch.randn(first.shape, generator=torch.Generator().manual_seed(2))
    return (first * drawn.to(first.device)).mean()


def _error(exact: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    one, other = (torch.cat([g.flatten() for g in each]) for each in (exact, found))
    return float((other - one).double().norm() / one.double().norm())


class _Levels(TorchDispatchMode):  # type: ignore[no-untyped-call]
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
        self._hooks = [p.register_hook(self._leave_out) for p in model.parameters()]  # type: ignore[no-untyped-call]

    def bytes(self) -> int:
        """Return what is held now."""
        return self._meter.live_bytes() - self._always_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run an operator, and read."""
        self._take_in()
        result = func(*args, **(kwargs or {}))
        self._level = self.bytes()
        return result

    def _take_in(self) -> None:
        self.highest_bytes = max(self.highest_bytes, self._level - self._gradient_bytes)

    def _leave_out(self, gradient: torch.Tensor) -> None:
        """Leave a weight's gradient out as long as it is there."""
        storage = gradient.untyped_storage()
        self._gradient_bytes += storage.nbytes()
        weakref.finalize(storage, self._forget, storage.nbytes())

    def _forget(self, n_bytes: int) -> None:
        self._gradient_bytes -= n_bytes

    def __exit__(self, *raised: Any) -> None:
        """Take the hooks off."""
        self._take_in()
        for hook in self._hooks:
            hook.remove()
        super().__exit__(*raised)  # type: ignore[no-untyped-call]
