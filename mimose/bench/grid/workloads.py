"""What `mimose bench` trains: the Mimose paper's tasks, and a language model.

Models are built from configurations, with the published batch sizes at ``base`` size,
a quarter of them at ``small`` and models much smaller at ``tiny``; nothing is
downloaded. Tokens and pixels are random, for memory and time do not depend on them;
their numbers do, and come from `traces`. Texts and images that can be learned are those
of `docstrings`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch
from torch import Generator, nn

from mimose.bench.by_name import called_by_name
from mimose.bench.grid.detector import Detector
from mimose.bench.grid.docstrings import DOCSTRINGS as DOCSTRINGS
from mimose.bench.grid.docstrings import N_TEXTS as N_TEXTS
from mimose.bench.grid.docstrings import OURS as OURS
from mimose.bench.grid.docstrings import ClassifierOutput as ClassifierOutput
from mimose.bench.grid.docstrings import DocstringClassifier as DocstringClassifier
from mimose.bench.grid.docstrings import Docstrings as Docstrings
from mimose.bench.grid.docstrings import collate as collate
from mimose.bench.grid.docstrings import encoder_config as encoder_config
from mimose.bench.grid.scaling import SCALING
from mimose.bench.grid.traces import (
    SizeTrace,
    bell_with_spike,
    docstrings,
    images,
    long_tail,
    pairs,
)
from mimose.bench.grid.workload import Workload as Workload
from mimose.bench.grid.workload import largest as largest
from mimose.bench.grid.workload import size_of as size_of
from mimose.bench.zoo import builder

_Sizes: TypeAlias = Mapping[str, int]
_Batch: TypeAlias = dict[str, Any]
SCALES = ("tiny", "small", "base")
"""Of models: made for a CPU; wide enough that matrix products take the time that they
do in real ones, which finer actions are about; as published."""
_VOCABULARY = {"tiny": 512, "small": 4_096, "base": 30_000}
_CHOICES = 4
_KINDS = 80
"""Of things in images, as in COCO."""
_IMAGES, _BOXES = 8, 8
"""In a batch, and in an image."""


def _sized(
    config: str,
    model: str,
    tiny: Mapping[str, Any],
    small: Mapping[str, Any],
    **always: Any,
) -> Callable[[str], nn.Module]:
    """Return what builds a model of transformers, of its published size or smaller."""
    build = builder(config, model, **always)
    changes = {"tiny": tiny, "small": small}
    return lambda scale: build(vocab_size=_VOCABULARY[scale], **changes.get(scale, {}))


_TINY_ENCODER = {
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "intermediate_size": 256,
}
_SMALL_ENCODER = {**_TINY_ENCODER, "hidden_size": 256, "intermediate_size": 1024}
_encoder = functools.partial(
    _sized,
    tiny=_TINY_ENCODER,
    small=_SMALL_ENCODER,
    attn_implementation="eager",
)
_multiple_choice = _encoder(
    "RobertaConfig", "RobertaForMultipleChoice", max_position_embeddings=514
)
_question_answering = _encoder("BertConfig", "BertForQuestionAnswering")
_classification = _encoder("BertConfig", "BertForSequenceClassification")
_translation = _sized(
    "T5Config",
    "T5ForConditionalGeneration",
    {"d_model": 64, "d_ff": 256, "d_kv": 16, "num_heads": 4, "num_layers": 4},
    {"d_model": 256, "d_ff": 1024, "d_kv": 64, "num_heads": 4, "num_layers": 6},
    **{"d_model": 768, "d_ff": 3072, "d_kv": 64, "num_heads": 12, "num_layers": 12},
    decoder_start_token_id=0,
)
_language_model = _sized(
    "GPT2Config",
    "GPT2LMHeadModel",
    {"n_embd": 64, "n_layer": 6, "n_head": 4},
    {"n_embd": 256, "n_layer": 6, "n_head": 4},
    **{"n_positions": 1024, "bos_token_id": 0, "eos_token_id": 0},
)


def _resnet(scale: str) -> nn.Module:
    build = builder("ResNetConfig", "ResNetForImageClassification", num_labels=_KINDS)
    return build(**_resnet_sizes(scale))


def _resnet_sizes(scale: str) -> dict[str, Any]:
    if scale == "base":
        return {}  # a ResNet-50
    return {
        "embedding_size": 8,
        "hidden_sizes": [8, 16, 32, 64],
        "depths": [4, 4, 4, 4],
        "layer_type": "basic",
    }


def _detector(scale: str) -> nn.Module:
    from transformers import ResNetBackbone, ResNetConfig

    stages: dict[str, Any] = {"out_features": ["stage2", "stage3", "stage4"]}
    backbone = ResNetBackbone(ResNetConfig(**stages, **_resnet_sizes(scale)))
    sizes = {"width": 256, "depth": 4} if scale == "base" else {"width": 32, "depth": 1}
    channels = backbone.channels
    return Detector(backbone, channels, n_classes=_KINDS, **sizes).train()


def _tokens(shape: tuple[int, ...], scale: str, generator: Generator) -> Any:
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


def _language_batch(sizes: _Sizes, scale: str, generator: Generator) -> _Batch:
    n = {"tiny": 6, "small": 2, "base": 8}[scale]
    ids = _tokens((n, sizes["length"]), scale, generator)
    return {"input_ids": ids, "labels": ids, "use_cache": False}


def _image_batch(sizes: _Sizes, _scale: str, generator: Generator) -> _Batch:
    shape = (_IMAGES, 3, sizes["height"], sizes["width"])
    pixels = torch.rand(shape, generator=generator)
    return {"pixel_values": pixels, "labels": _classes(_IMAGES, _KINDS, generator)}


def _boxes_batch(sizes: _Sizes, scale: str, generator: Generator) -> _Batch:
    batch = _image_batch(sizes, scale, generator)
    corners = torch.rand((2, _IMAGES, _BOXES, 2), generator=generator)
    low, high = corners.sort(dim=0).values
    kinds = torch.randint(0, _KINDS, (_IMAGES, _BOXES), generator=generator)
    return {**batch, "boxes": torch.cat((low, high), dim=-1), "labels": kinds}


def _images_trace(scale: str) -> SizeTrace:
    return (
        images((480, 800), 1333, 32) if scale == "base" else images((240, 400), 667, 32)
    )


WORKLOADS: Mapping[str, Workload] = {
    workload.name: workload
    for workload in (
        Workload(
            name="mc-roberta",
            what="multiple choice, RoBERTa, lengths 35-141 as in SWAG",
            build=_multiple_choice,
            batch=_choice_batch,
            sizes=("length",),
            trace=lambda _: long_tail(35, 141, 3.0),
        ),
        Workload(
            name="qa-bert",
            what="question answering, BERT, lengths 153-512 as in SQuAD",
            build=_question_answering,
            batch=_answer_batch,
            sizes=("length",),
            trace=lambda _: bell_with_spike(153, 512, 280),
        ),
        Workload(
            name="tc-bert",
            what="text classification, BERT, lengths 30-332 as in GLUE-QQP",
            build=_classification,
            batch=_text_batch,
            sizes=("length",),
            trace=lambda _: long_tail(30, 332),
        ),
        Workload(
            name="tr-t5",
            what="translation, T5, source and target 17-460 as in UN_PC",
            build=_translation,
            batch=_pair_batch,
            sizes=("source", "target"),
            trace=lambda _: pairs(17, 460),
        ),
        Workload(
            name="lm-gpt2",
            what="language modelling, GPT-2, lengths of real docstrings",
            build=_language_model,
            batch=_language_batch,
            sizes=("length",),
            trace=lambda _: docstrings(512),
            is_synthetic=False,
        ),
        Workload(
            name="ic-resnet",
            what="image classification, ResNet, sides 480-800 by up to 1333 (tiny: "
            "half)",
            build=_resnet,
            batch=_image_batch,
            sizes=("height", "width"),
            trace=_images_trace,
        ),
        Workload(
            name="od-resnet",
            what="detection, a ResNet with a feature pyramid and heads, the same sides",
            build=_detector,
            batch=_boxes_batch,
            sizes=("height", "width"),
            trace=_images_trace,
        ),
        DOCSTRINGS,
    )
}
"""The tasks, by name."""

ALL: Mapping[str, Workload] = {**WORKLOADS, **SCALING}
"""The tasks, and the models of which one thing grows."""
DEFAULT = ("mc-roberta", "qa-bert", "tc-bert", "tr-t5")
"""Run where none is named: the language tasks of the Mimose paper."""


@functools.lru_cache
def workload_named(name: str) -> Workload:
    """Return a workload, one of ours or the user's.

    Raises:
        ValueError: There is none of this name.
    """
    if name in ALL:
        return ALL[name]
    if ":" in name:
        return from_function(name)
    msg = f"no workload is called {name!r}; choose one of {', '.join(ALL)}"
    raise ValueError(msg)


def from_function(path: str) -> Workload:
    """Return a workload of the user's own.

    Args:
        path: ``module:function``. The function takes no arguments and returns
            ``(model, make_batch, names)``: the model in training mode; a function that
            takes sizes by name and a `torch.Generator` and returns the model's keyword
            arguments, labels among them, so that the model returns a loss; and the
            names of the sizes.

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
