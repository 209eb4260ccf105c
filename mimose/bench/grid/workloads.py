"""What `mimose bench` and `mimose demo` train: a model, and batches of varying sizes.

These are the four language tasks of the Mimose paper, and the demonstration's text
classification. Models are built from configurations without downloads: at ``base`` with
the published batch sizes, at ``small`` with a quarter of them, at ``tiny`` as much
smaller models. Except in the demonstration, tokens are random, because memory and time
depend only on their number, which comes from `traces`.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Generator, nn

from mimose.bench.corpus import OURS
from mimose.bench.grid.traces import (
    Sizes,
    SizeTrace,
    bell_with_spike,
    long_tail,
    pairs,
)
from mimose.bench.zoo import builder, called_by_name

_Sizes: TypeAlias = Mapping[str, int]
_Batch: TypeAlias = dict[str, Any]
_VOCABULARY = {"tiny": 512, "small": 4_096, "base": 30_000}
_CHOICES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A task: a model and batches of the sizes of a trace."""

    name: str
    what: str
    """One line for people."""
    build: Callable[[str], nn.Module]
    """Takes a scale; returns the model in training mode."""
    batch: Callable[[_Sizes, str, Generator], _Batch]
    """Takes sizes, a scale and a generator; returns the model's keyword arguments, with
    labels."""
    sizes: tuple[str, ...]
    """Names of the sizes that vary."""
    trace: SizeTrace | None
    """None for a user's model: only the user knows its lengths, on which the best
    strategy depends."""
    is_synthetic: bool = True
    """Whether the trace is generated, not taken from real data."""
    learning_rate: float = 1e-4
    prepare: Callable[[Path], None] = lambda _: None
    """Takes a folder that all processes share. Each process calls it first; one makes
    data, and the others read it."""
    evaluate: Callable[[nn.Module], float | None] = lambda _: None
    """Takes the model; returns its accuracy on held-out data, if there is any."""


def size_of(sizes: _Sizes) -> int:
    """Return the one size by which the published system describes a batch.

    It is the length of a text, the source's for pairs, height times width of images.
    """
    if "height" in sizes:
        return sizes["height"] * sizes["width"]
    return sizes.get("source", next(iter(sizes.values())))


def largest(sizes: Sequence[Sizes]) -> list[Sizes]:
    """Return a few batches, one of which needs most memory.

    They have the largest product or sum of squares of sizes, or the largest value of
    one size.
    """
    keys: list[Callable[[Sizes], int]] = [
        lambda each: math.prod(each.values()),
        lambda each: sum(size * size for size in each.values()),
        *(lambda each, name=name: each[name] for name in sizes[0]),
    ]
    found = [max(sizes, key=key) for key in keys]
    return [each for i, each in enumerate(found) if each not in found[:i]]


def _sized(
    config: str,
    model: str,
    tiny: Mapping[str, Any],
    small: Mapping[str, Any],
    **always: Any,
) -> Callable[[str], nn.Module]:
    """Return a function that builds a transformers' model at a scale."""
    build = builder(config, model, **always)
    changes = {"tiny": tiny, "small": small}
    return lambda scale: build(vocab_size=_VOCABULARY[scale], **changes.get(scale, {}))


_TINY_ENCODER = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
_encoder = functools.partial(
    _sized,
    tiny=_TINY_ENCODER,
    small={**_TINY_ENCODER, "hidden_size": 256, "intermediate_size": 1024},
    attn_implementation="eager",
)


def _tokens(shape: tuple[int, ...], scale: str, generator: Generator) -> torch.Tensor:
    return torch.randint(1, _VOCABULARY[scale], shape, generator=generator)


def _classes(n: int, n_classes: int, generator: Generator) -> torch.Tensor:
    return torch.randint(0, n_classes, (n,), generator=generator)


def _choice_batch(sizes: _Sizes, scale: str, generator: Generator) -> _Batch:
    n = {"tiny": 8, "small": 4, "base": 16}[scale]
    ids = _tokens((n, _CHOICES, sizes["length"]), scale, generator)
    return {"input_ids": ids, "labels": _classes(n, _CHOICES, generator)}


def _answer_batch(sizes: _Sizes, scale: str, generator: Generator) -> _Batch:
    n, length = {"tiny": 2, "small": 3, "base": 12}[scale], sizes["length"]
    return {
        "input_ids": _tokens((n, length), scale, generator),
        "start_positions": _classes(n, length, generator),
        "end_positions": _classes(n, length, generator),
    }


def _text_batch(sizes: _Sizes, scale: str, generator: Generator) -> _Batch:
    n = {"tiny": 16, "small": 8, "base": 32}[scale]
    ids = _tokens((n, sizes["length"]), scale, generator)
    return {"input_ids": ids, "labels": _classes(n, 2, generator)}


def _pair_batch(sizes: _Sizes, scale: str, generator: Generator) -> _Batch:
    n = {"tiny": 4, "small": 2, "base": 8}[scale]
    return {
        "input_ids": _tokens((n, sizes["source"]), scale, generator),
        "labels": _tokens((n, sizes["target"]), scale, generator),
        "use_cache": False,
    }


DOCSTRINGS = Workload(
    name="tc-docstrings",
    what="text classification, BERT of 4 layers, real docstrings: the demonstration's",
    build=OURS.build,
    batch=OURS.batch,
    sizes=("length",),
    trace=OURS.trace,
    is_synthetic=False,
    learning_rate=1e-3,
    prepare=OURS.prepare,
    evaluate=OURS.evaluate,
)
WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="mc-roberta",
            what="multiple choice, RoBERTa, lengths 35-141 as in SWAG",
            build=_encoder(
                "RobertaConfig", "RobertaForMultipleChoice", max_position_embeddings=514
            ),
            batch=_choice_batch,
            sizes=("length",),
            trace=long_tail(35, 141, 3.0),
        ),
        Workload(
            name="qa-bert",
            what="question answering, BERT, lengths 153-512 as in SQuAD",
            build=_encoder("BertConfig", "BertForQuestionAnswering"),
            batch=_answer_batch,
            sizes=("length",),
            trace=bell_with_spike(153, 512, 280),
        ),
        Workload(
            name="tc-bert",
            what="text classification, BERT, lengths 30-332 as in GLUE-QQP",
            build=_encoder("BertConfig", "BertForSequenceClassification"),
            batch=_text_batch,
            sizes=("length",),
            trace=long_tail(30, 332),
        ),
        Workload(
            name="tr-t5",
            what="translation, T5, source and target 17-460 as in UN_PC",
            build=_sized(
                "T5Config",
                "T5ForConditionalGeneration",
                {"d_model": 64, "d_ff": 256, "d_kv": 16}
                | {"num_heads": 4, "num_layers": 4},
                {"d_model": 256, "d_ff": 1024, "d_kv": 64}
                | {"num_heads": 4, "num_layers": 6},
                **{"d_model": 768, "d_ff": 3072, "d_kv": 64},
                **{"num_heads": 12, "num_layers": 12, "decoder_start_token_id": 0},
            ),
            batch=_pair_batch,
            sizes=("source", "target"),
            trace=pairs(17, 460),
        ),
        DOCSTRINGS,
    )
}
"""The tasks, by name."""
DEFAULT = ("mc-roberta", "qa-bert", "tc-bert", "tr-t5")
"""The default: the language tasks of the Mimose paper."""


@functools.lru_cache
def workload_named(name: str) -> Workload:
    """Return a workload by its name, or the user's.

    Raises:
        ValueError: There is none of this name.
    """
    if name in WORKLOADS:
        return WORKLOADS[name]
    if ":" in name:
        return from_function(name)
    msg = f"no workload is called {name!r}; choose one of {', '.join(WORKLOADS)}"
    raise ValueError(msg)


def from_function(path: str) -> Workload:
    """Return a user's workload.

    Args:
        path: ``module:function``. The function takes no arguments and returns
            ``(model, make_batch, names)``: the model in training mode; a function that
            takes sizes by name and a `torch.Generator` and returns the model's keyword
            arguments, with labels, so that the model returns a loss; and the names of
            the sizes.

    Raises:
        ValueError: There is no such function, or it returns something else.
    """
    made = called_by_name(path)
    try:
        _, make_batch, names = made
    except (TypeError, ValueError) as error:
        msg = (
            f"--model {path}: the function must return (model, make_batch, names of "
            f"sizes), and returned {type(made).__name__}"
        )
        raise ValueError(msg) from error
    return Workload(
        name=path,
        what="the user's own",
        build=lambda _: called_by_name(path)[0],
        batch=lambda sizes, _, generator: make_batch(sizes, generator),
        sizes=tuple(names),
        trace=None,
    )
