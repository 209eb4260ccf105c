"""The reference run: what a change to the library's internals must not change.

Eight small models train on the simulated device that computes, under three budgets and
two menus, and five large ones on the hollow card. The small ones have expandable
segments, because segments of fixed size are as large as what they hold. The plan, the
peak and the loss of each step, and the virtual times, are compared with
`reference.json` in this folder, and each difference is listed. ``--update`` writes that
file again: a difference must be intended and named in the commit, or it is a bug.

    python -m benchmarks.proofs reference
    python -m benchmarks.proofs reference --models gpt2 --no-times
"""

from __future__ import annotations

import gc
import itertools
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

import mimose
from benchmarks.proofs import common
from benchmarks.proofs.common import Answer, Bar, Options, Rows, Settings, Task
from benchmarks.proofs.models import names_of
from mimose.bench.device import SIM
from mimose.bench.zoo import ZOO, builder, moved

QUESTION = "What is another step than it was, or another result?"
DEFAULTS = {"seed": 1, "threads": 1, "device": SIM}
OPTIONS = (
    common.flag("--update", "store what is found"),
    common.flag("--no-times", "leave the hollow card out"),
)
_STORED = Path(__file__).with_suffix(".json")
_STEPS = 40
_TIGHTNESS = {"tight": 0.3, "half": 0.6, "wide": 0.9}
"""Shares of what lies between recomputing everything and keeping everything."""
_ACTIONS = {"exact": "whole", "fine": "selective"}
"""Menus by the names that the stored values have."""
_HOLLOW = (
    ("bert-large", 16),
    ("llama-8b-lora", 40),
    ("llama-1b", 24),
    ("t5-large", 24),
    ("vit-huge", 24),
)
"""Workloads of `benchmarks.scale`, each with its card's GiB."""
_HOLLOW_STEPS = 30
_TIMED = "seconds", "ooms", "over", "reruns", "reserved_bytes"
_FAILED = "did not fit"
"""Stands for a loss. With growths of a few MiB, little memory is left between segments.
Later steps are not compared with the bare model's, which trains on that batch."""
_LARGEST = 0.01
"""Share by which a virtual time may differ."""


class _Model(NamedTuple):
    build: Callable[[], nn.Module]
    like: str
    """The zoo's model whose batches it takes."""
    sizes: Callable[[int], dict[str, int]]
    """Returns the sizes of a batch of a length."""
    longest: int = 192


def _text(length: int) -> dict[str, int]:
    return {"batch": 4, "length": length}


def _pair(length: int) -> dict[str, int]:
    return {"batch": 4, "source": length, "target": max(8, length // 2)}


def _image(height: int) -> dict[str, int]:
    return {"batch": 4, "height": 32 * (height // 32), "width": 64}


def _images(n_images: int) -> dict[str, int]:
    return {"batch": n_images, "height": 224, "width": 224}


_LLAMA = builder(
    "LlamaConfig",
    "LlamaForCausalLM",
    **{"vocab_size": 512, "hidden_size": 64, "intermediate_size": 192},
    **{"num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2},
    use_cache=False,
)
_DEBERTA = builder(
    "DebertaV2Config",
    "DebertaV2ForSequenceClassification",
    **{"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 6, "num_labels": 8},
    **{"num_attention_heads": 4, "intermediate_size": 256, "position_buckets": 32},
    **{"relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
)
_MODELS: Mapping[str, _Model] = {
    "bert": _Model(ZOO["bert"].build, "bert", _text),
    "gpt2": _Model(ZOO["gpt2"].build, "gpt2", _text),
    "t5": _Model(ZOO["t5"].build, "t5", _pair),
    "vit": _Model(ZOO["vit"].build, "vit", _images, 6),
    "albert": _Model(ZOO["albert"].build, "albert", _text),
    "resnet": _Model(ZOO["resnet"].build, "resnet", _image, 320),
    "llama": _Model(_LLAMA, "gpt2", _text),
    "deberta": _Model(_DEBERTA, "bert", _text),
}


def _batches(name: str) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the run's batches: of drawn lengths, the longest among the last."""
    model, generator = _MODELS[name], torch.Generator().manual_seed(1)
    least = max(1, model.longest // 8)
    drawn = torch.randint(least, model.longest, (_STEPS,), generator=generator)
    lengths = [int(length) for length in drawn]
    lengths[-5] = model.longest
    for length in lengths:
        batch = ZOO[model.like].batch(model.sizes(length), generator)
        yield moved(batch, "sim")


def _train(
    name: str, budget: int | None = None, **options: Any
) -> tuple[list[str], list[Any], list[list[Any]]]:
    """Train a model.

    Returns:
        The bits of the losses; the gradients of the last step; of each step its sizes,
        its phase, its actions and its peak in bytes.
    """
    torch.manual_seed(0)
    model = _MODELS[name].build().to("sim")
    optimizer = torch.optim.AdamW(model.parameters())
    session = None
    if budget is not None:
        session = mimose.attach(model, budget, refine=False, **options)
    losses, gradients = [], list[Any]()
    for batch in _batches(name):
        try:
            loss = model(**batch).loss
            loss.backward()
        except (torch.OutOfMemoryError, mimose.InfeasibleBudgetError):
            losses.append(_FAILED)
            loss = None  # its graph holds what the forward has kept
            optimizer.zero_grad()
            continue
        losses.append(float(loss.detach()).hex())
        gradients = [weight.grad for weight in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    steps = []
    if session is not None:
        records = list(session.records)
        session.detach()
        steps = [
            [
                dict(record.shape),
                record.phase,
                _short(record.actions),
                record.observed_peak_bytes,
                record.reserved_peak_bytes,
            ]
            for record in records
        ]
    del model, optimizer, loss, batch
    gc.collect()
    torch.accelerator.empty_cache()
    return losses, gradients, steps


def _short(actions: tuple[str, ...]) -> str:
    """Write equal neighbours once, with their number: ``3 keep, recompute``."""
    runs = [(action, len(list(same))) for action, same in itertools.groupby(actions)]
    return ", ".join(f"{n} {action}" if n > 1 else action for action, n in runs)


def work(task: Task) -> Rows:
    """Train one small model in all ways.

    Args:
        task: ``model``, and ``budgets`` in bytes by name, empty to choose them.
    """
    warnings.filterwarnings("ignore")
    torch.get_device_module(SIM).set_expandable_segments(True)
    name, budgets = task["model"], dict(task["budgets"])
    bare, bare_gradients, _ = _train(name)
    if not budgets:
        low, high = (
            max(step[-1] for step in _train(name, 2**40, wall=False, planner=p)[2])
            for p in ("full", "auto")  # whose gradients are not to be held below
        )
        budgets = {
            key: int(low + share * (high - low)) for key, share in _TIGHTNESS.items()
        }
    for (key, budget), menu in itertools.product(budgets.items(), _ACTIONS):
        losses, gradients, steps = _train(name, budget, actions=_ACTIONS[menu])
        n_failed = losses.count(_FAILED)
        until = losses.index(_FAILED) if n_failed else len(losses)
        is_exact = losses[:until] == bare[:until]
        if not n_failed:
            is_exact = is_exact and all(map(_equal, gradients, bare_gradients))
        yield {
            "case": f"{name} {key} {menu}",
            "budget": budget,
            "n_failed": n_failed,
            "is_exact": is_exact,
            "n_over": sum((step[-1] or 0) > budget for step in steps),
            "losses": losses,
            "steps": steps,
        }


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def _cases(
    stored: Mapping[str, Any], settings: Settings, options: Options
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what is found of each case, small models first."""
    for name in names_of(_MODELS, settings.models):
        budgets = {
            case.split()[1]: told["budget"]
            for case, told in stored.items()
            if case.split()[0] == name and "budget" in told
        }
        for told in common.said_by("reference", settings, model=name, budgets=budgets):
            yield told.pop("case"), told
    hollow = [] if options.no_times else itertools.product(_HOLLOW, ("whole", "fine"))
    for (workload, gib), strategy in hollow:
        task = {"workload": workload, "gib": gib, "strategy": strategy, "seed": 1}
        task |= {"steps": _HOLLOW_STEPS, "card": "h100"}
        (told,) = common.said_by("scale", settings, **task)
        yield f"{workload} {gib}-GiB {strategy}", {name: told[name] for name in _TIMED}


def _differences(case: str, before: Any, now: Mapping[str, Any]) -> Iterator[str]:
    if before is None:
        yield f"{case}: not stored"
        return
    for name, value in now.items():
        old = before.get(name)
        if name == "seconds":
            if abs(value / old - 1) > _LARGEST:
                yield f"{case}: {1e3 * old:.2f} → {1e3 * value:.2f} ms a step"
        elif not isinstance(value, list):
            if old != value and name != "is_exact":  # reported by itself
                yield f"{case}: {name} {old} → {value}"
        elif differ := [
            i
            for i, both in enumerate(zip(old, value, strict=False))
            if both[0] != both[1]
        ]:
            i, n = differ[0], f"{len(differ)} of {len(value)}"
            yield f"{case}: {n} {name} differ, first {i}: {old[i]} → {value[i]}"


def ask(settings: Settings, options: Options) -> Answer:
    """Run, compare and tell."""
    answer, found = Answer(), dict[str, Any]()
    stored = json.loads(_STORED.read_text("utf-8")) if _STORED.exists() else {}
    for case, told in _cases(stored, settings, options):
        found[case] = told
        differences = list(_differences(case, stored.get(case), told))
        answer.notes.extend(differences)
        line: common.Row = {
            "differences": len(differences),
            "exact": told.get("is_exact"),
            "over": told.get("n_over", told.get("over")),
        }
        row = {"case": case, **line, **settings.provenance()}
        answer.add(case, [row], line, (), head="case")
    rows = answer.rows
    answer.bars = [
        Bar("differences", 0 if options.update else len(answer.notes), 0),
        Bar("cases that are not exact", sum(r["exact"] is False for r in rows), 0),
        Bar("steps over their budget", sum(row["over"] or 0 for row in rows), 0),
    ]
    if options.update:
        lines = (
            json.dumps({case: told})[1:-1] for case, told in (stored | found).items()
        )
        _STORED.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
    return answer
