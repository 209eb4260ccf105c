"""What does a rehearsal of a large training take, and how near is it?

Models of 8 to 70 billion parameters, alone or as one rank of many, on hollow H100s.
Then three, checkpointed, on a hollow H200, beside what others estimate: accelerate for
bfloat16, DeepSpeed's formula of ZeRO-3 (4 bytes for each weight of the largest module
and 18 for each of all, on one card), and torch's memory tracker, at the longest batch.

    python -m benchmarks.proofs rehearsed
    mimose rehearse --model benchmarks.proofs.rehearsed:fsdp_70b --ranks 64
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from benchmarks.proofs import common
from benchmarks.proofs.clock import seen_of
from benchmarks.proofs.common import Answer, Bar, Options, Rows, Settings, Task
from benchmarks.scale.models import WORKLOADS, Batch
from benchmarks.scale.run import GIB, build
from mimose.bench.device import SIM
from mimose.bench.rehearse.command import rehearse
from mimose.bench.zoo import builder
from mimose.exceptions import first_line

QUESTION = "What does a rehearsal take, and how near is it?"
DEFAULTS = {"seed": 0, "threads": 1, "device": SIM}
_TRAININGS = {
    "lora": ("lora_8b", 1, 40, 4096),
    "lora-80": ("lora_8b", 1, 80, 4096),
    "fsdp": ("fsdp_8b", 8, 40, 4096),
    "fsdp-70b": ("fsdp_70b", 64, 80, 8192),
    "tensor": ("tensor_8b", 8, 40, 4096),
}
"""A function of this module, ranks, the card's GiB, and the longest batch, by name."""
_ESTIMATED = {"bert-large": (16, 60), "llama-8b-lora": (40, 50), "llama-1b": (40, 50)}
"""Workloads beside what others estimate, with the GiB and the steps of the H200's rows.
"""
OPTIONS = (
    common.some("--trainings", (*_TRAININGS, *_ESTIMATED)),
    common.count("--steps", 30, "a training, without its search for the largest batch"),
)
_SHAPES, _SECONDS, _BYTES, _ERROR = 500, 90, 4 * GIB, 0.01
_TOLD = (
    *("fits", "over", "reruns", "peak_bytes", "error_p50", "error_p99"),
    *("cpu_seconds", "host_peak_bytes"),
)

Made = tuple[Any, Batch]


def ask(settings: Settings, options: Options) -> Answer:
    """Rehearse each, in a separate process."""
    answer = Answer(path=settings.out / "rehearsed.csv")
    seen = replace(settings, seed=1)  # as the H200's rows
    for name in options.trainings:
        if name in _ESTIMATED:
            (row,) = common.measured("rehearsed", seen, training=name)
            off = abs(row["rehearsed"] / row["h200"] - 1.0)
            bars = [Bar("off what an H200 reserved", off, _ERROR, is_share=True)]
        else:
            row, bars = _rehearsed(name, settings, options.steps)
        answer.add(name, [row], common.short(row), bars, head="training")
    return answer


def _rehearsed(
    name: str, settings: Settings, steps: int
) -> tuple[common.Row, list[Bar]]:
    make, ranks, gib, longest = _TRAININGS[name]
    drawn = replace(WORKLOADS["llama-8b-lora"], spans=((256, longest),))
    lengths = [length for (length,) in drawn.sizes(_SHAPES, settings.seed)]
    how: dict[str, Any] = {"ranks": ranks, "steps": steps, "seed": settings.seed}
    source = f"{__name__}:{make}"
    (found,) = rehearse(source, f"h100:{gib}", lengths=lengths, **how)
    told = {what: getattr(found, what) for what in _TOLD}
    row = {"training": name, "gib": gib, **how, **told, **settings.provenance()}
    return row, [
        Bar("steps over the budget", found.over, 0),
        Bar("error, p99", found.error_p99, _ERROR, is_share=True),
        Bar("seconds of a core", found.cpu_seconds, _SECONDS),
        Bar("bytes of the host", found.host_peak_bytes, _BYTES),
    ]


def work(task: Task) -> Rows:
    """Train a workload under checkpointing; yield its peak in GiB, and estimates."""
    from accelerate.commands.estimate import estimate_training_usage
    from torch.distributed._tools.mem_tracker import MemTracker

    name = task["training"]
    workload, (gib, steps) = WORKLOADS[name], _ESTIMATED[name]
    run = build(workload, {"device": SIM, "gib": gib, "card": "h200"})
    tracked: float | str
    with run.checkpointed(everything=True):
        for sizes in workload.sizes(steps, task["seed"]):
            run.train(sizes)
        reserved = run.card.stats()["reserved_bytes.all.peak"]
        tracker: Any = MemTracker()
        tracker.track_external(run.model, run.optimizer)
        try:
            with tracker:
                run.train(workload.longest)
            tracked = max(tracker._peak_mem.values()) / GIB
        except RuntimeError as error:
            tracked = first_line(error)
    own = [p.numel() for p in run.model.parameters()]
    parts = (module.parameters(recurse=False) for module in run.model.modules())
    largest = max(sum(weight.numel() for weight in part) for part in parts)
    usage = estimate_training_usage(4 * sum(own), "bfloat16")
    yield {
        "training": name,
        "h200": seen_of("reserved_bytes")[name] / GIB,
        "rehearsed": reserved / GIB,
        "tracker": tracked,
        "accelerate": max(usage.values()) / GIB,
        "deepspeed": (4 * largest + 18 * sum(own)) / GIB,
    }


def _llama(dtype: torch.dtype = torch.bfloat16, **changes: Any) -> Any:
    """Build Llama-8B, or one of other sizes."""
    sizes = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
    torch.set_default_dtype(dtype)
    model = builder("LlamaConfig", "LlamaForCausalLM", use_cache=False, **sizes)(
        **changes
    )
    torch.set_default_dtype(torch.float32)
    return model


def _batch() -> Batch:
    ids = torch.zeros(2, 512, dtype=torch.long)
    return {"input_ids": ids, "labels": ids}


def lora_8b() -> Made:
    """Return Llama-8B in bfloat16 under LoRA."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, target_modules="all-linear")
    return get_peft_model(_llama(), config), _batch()


def _sharded(model: Any, **how: Any) -> Made:
    from torch.distributed.fsdp import fully_shard

    for part in (*model.model.layers, model):
        fully_shard(part, **how)
    return model, _batch()


def fsdp_8b() -> Made:
    """Return Llama-8B in float32 under FSDP2, computed in bfloat16."""
    from torch.distributed.fsdp import MixedPrecisionPolicy

    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    return _sharded(_llama(torch.float32), mp_policy=policy)


def fsdp_70b() -> Made:
    """Return 80 layers of Llama-70B's widths in bfloat16 under FSDP2."""
    sizes: dict[str, Any] = {"vocab_size": 32000, "intermediate_size": 28672}
    sizes |= {"hidden_size": 8192, "num_attention_heads": 64}
    return _sharded(_llama(num_hidden_layers=80, **sizes))


def tensor_8b() -> tuple[Any, Batch, torch.optim.Optimizer]:
    """Return Llama-8B in bfloat16 whose products are shared by columns and rows."""
    from torch.distributed import device_mesh, get_world_size
    from torch.distributed.tensor import parallel

    model, plan = _llama(), dict[str, Any]()
    for name in ("q", "k", "v", "gate", "up"):
        plan[f"*.{name}_proj"] = parallel.ColwiseParallel()
    for name in ("o", "down"):
        plan[f"*.{name}_proj"] = parallel.RowwiseParallel()
    mesh = device_mesh.init_device_mesh(SIM, (get_world_size(),))
    for layer in model.model.layers:
        parallel.parallelize_module(layer, mesh, plan)
    # A list of shared and of whole weights is refused.
    return model, _batch(), torch.optim.AdamW(model.parameters(), foreach=False)
