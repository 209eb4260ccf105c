"""Models of 0.3B to 8B parameters from their configurations, and their batches."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mimose.bench.zoo import Output, builder

Sizes = tuple[int, ...]
"""Lengths of a batch; of two where sources and targets are drawn apart."""
Batch = Mapping[str, Any]
_MIDDLE = 0.8
"""The median, as a share of the geometric middle of the shortest and the longest."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model, the variation of its batches, and its cards."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, Sizes], Batch]
    """Takes the number of samples and their lengths; on the default device."""
    rows: int
    """Samples in a batch."""
    spans: tuple[tuple[int, int], ...]
    """The shortest and the longest of each length."""
    cards: tuple[int, ...]
    """Sizes in GiB."""
    dtype: str = "amp"
    """``amp`` for float32 weights under autocast; otherwise the dtype of weights."""
    median: float | None = None
    """The median length; None for `_MIDDLE` of each span's geometric middle."""
    spread: float = 0.55
    """The spread of the logarithms of lengths, as in text corpora."""

    def sizes(self, n: int, seed: int) -> Iterator[Sizes]:
        """Yield the lengths of batches: log-normal, and the longest three times."""
        rng = random.Random(seed)
        longest = set(rng.sample(range(n // 6, n), min(3, n)))
        for step in range(n):
            drawn = tuple(self._drawn(rng, *span) for span in self.spans)
            yield self.longest if step in longest else drawn

    @property
    def longest(self) -> Sizes:
        """The longest of each."""
        return tuple(high for _, high in self.spans)

    def _drawn(self, rng: random.Random, low: int, high: int) -> int:
        median = self.median or math.sqrt(low * high) * _MIDDLE
        while True:
            length = math.exp(rng.gauss(math.log(median), self.spread))
            if low <= length <= high:
                return math.ceil(length)


def _ids(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def _tokens(n: int, sizes: Sizes) -> Batch:
    ids = _ids(n, sizes[0])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}


def _classified(n: int, sizes: Sizes) -> Batch:
    return {**_tokens(n, sizes), "labels": _ids(n)}


def _pairs(n: int, sizes: Sizes) -> Batch:
    return {**_tokens(n, sizes), "labels": _ids(n, sizes[1])}


def _pictures(n: int, sizes: Sizes) -> Batch:
    side = max(2, round(math.sqrt(sizes[0]))) * 14
    pixels = torch.randn(n, 3, side, side)
    return {"pixel_values": pixels, "labels": _ids(n), "interpolate_pos_encoding": True}


def _captioned(n: int, sizes: Sizes) -> Batch:
    return {"pixel_values": torch.randn(n, 3, 384, 384), "labels": _ids(n, *sizes)}


def _speech(n: int, sizes: Sizes) -> Batch:
    return {"input_features": torch.randn(n, 128, 3000), "labels": _ids(n, *sizes)}


_LARGE: dict[str, Any] = {"hidden_size": 1024, "intermediate_size": 4096}
_DEEP: dict[str, Any] = {"num_hidden_layers": 24, "num_attention_heads": 16}
_bert = builder(
    *("BertConfig", "BertForSequenceClassification"),
    **{**_LARGE, **_DEEP, "max_position_embeddings": 2048},
)
_POSITIONS: dict[str, Any] = {"relative_attention": True, "position_buckets": 256}
_POSITIONS |= {"pos_att_type": ["p2c", "c2p"], "share_att_key": True}
_POSITIONS |= {"position_biased_input": False, "norm_rel_ebd": "layer_norm"}
_deberta = builder(
    *("DebertaV2Config", "DebertaV2ForSequenceClassification"),
    **{**_LARGE, **_DEEP, **_POSITIONS, "vocab_size": 128100, "type_vocab_size": 0},
)
_T5: dict[str, Any] = {
    "d_model": 1024,
    "d_kv": 64,
    "d_ff": 4096,
    "num_layers": 24,
    "num_heads": 16,
}
_t5 = builder(
    *("T5Config", "T5ForConditionalGeneration"),
    **{**_T5, "decoder_start_token_id": 0, "use_cache": False},
)
_VIT: dict[str, Any] = {"hidden_size": 1280, "intermediate_size": 5120}
_VIT |= {"num_hidden_layers": 32, "num_attention_heads": 16}
_vit = builder("ViTConfig", "ViTForImageClassification", patch_size=14, **_VIT)
_WHISPER: dict[str, Any] = {"vocab_size": 51866, "num_mel_bins": 128, "d_model": 1280}
for _part in ("encoder", "decoder"):
    _WHISPER |= {f"{_part}_layers": 32, f"{_part}_attention_heads": 20}
    _WHISPER |= {f"{_part}_ffn_dim": 5120}
_whisper = builder(
    *("WhisperConfig", "WhisperForConditionalGeneration"),
    **{**_WHISPER, "max_target_positions": 448, "use_cache": False},
)


def _llama(
    hidden: int, layers: int, inner: int, *, lora: bool = True
) -> Callable[[], nn.Module]:
    sizes: dict[str, Any] = {"hidden_size": hidden, "intermediate_size": inner}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": 32}
    sizes |= {"num_key_value_heads": 8, "vocab_size": 128256}
    sizes |= {"max_position_embeddings": 131072, "tie_word_embeddings": not lora}
    build = builder("LlamaConfig", "LlamaForCausalLM", use_cache=False, **sizes)
    return (lambda: _with_lora(build())) if lora else build


def _with_lora(model: nn.Module, targets: Any = "all-linear") -> nn.Module:
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, lora_dropout=0.05, target_modules=targets)
    adapted: nn.Module = get_peft_model(model, config)
    return adapted


def _mixture() -> nn.Module:
    """Build 12 of the 32 layers of Mixtral-8x7B, whose experts get equal shares."""
    from transformers import MixtralConfig, MixtralForCausalLM
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register("balanced", _balanced)
    config = MixtralConfig(num_hidden_layers=12, use_cache=False)
    config._experts_implementation = "balanced"
    attention = ["q_proj", "k_proj", "v_proj", "o_proj"]
    return _with_lora(MixtralForCausalLM(config), attention)


def _balanced(
    experts: Any, states: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Run experts on equal shares of the tokens: a hollow card knows no other.

    Args:
        experts: Those of a layer, with all their weights.
        states: (T, H) of tokens.
        chosen: (T, k) experts, by token.
        weights: (T, k) of these.
    """
    n_chosen = chosen.shape[1]
    order = chosen.flatten().argsort()
    mine = states[order // n_chosen].view(experts.num_experts, -1, states.shape[1])
    gate, up = mine.bmm(experts.gate_up_proj.transpose(1, 2)).chunk(2, dim=-1)
    made = (experts.act_fn(gate) * up).bmm(experts.down_proj.transpose(1, 2))
    weighted = made.flatten(0, 1) * weights.flatten()[order, None]
    return torch.zeros_like(states).index_add(0, order // n_chosen, weighted)


def _captions() -> nn.Module:
    """Build a reader of pictures: ViT-huge's layers, and TrOCR-large's decoder."""
    from transformers import VisionEncoderDecoderModel

    encoder = builder("ViTConfig", "ViTModel", image_size=384, patch_size=16, **_VIT)
    decoder = builder("TrOCRConfig", "TrOCRForCausalLM", d_model=1024, use_cache=False)
    build: Any = VisionEncoderDecoderModel
    model: Any = build(
        encoder=encoder(),
        decoder=decoder(decoder_layers=12, cross_attention_hidden_size=1280),
    )
    model.config.decoder_start_token_id = model.config.pad_token_id = 0
    return model  # type: ignore[no-any-return]


class _Mix(nn.Module):
    """A layer of a model of sets: each item by itself, or with its neighbours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor, edges: torch.Tensor | None) -> torch.Tensor:
        """Return as many items; edges are pairs of places, (2, n_edges)."""
        found: torch.Tensor = self.norm(x)
        if edges is not None:
            found = torch.zeros_like(x).index_add(0, edges[1], found[edges[0]])
        found = self.down(torch.relu(self.up(found)))
        return x + found


class _Mixed(nn.Module):
    """Layers over items that stand one after the other, or with time first."""

    def __init__(self, width: int, n_layers: int, *, embeds: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(64, width) if embeds else nn.Linear(8, width)
        self.layers = nn.ModuleList(_Mix(width) for _ in range(n_layers))
        self.head = nn.Linear(width, 64)

    def forward(
        self,
        x: torch.Tensor,
        edge_index: torch.Tensor | None = None,
        starts: torch.Tensor | None = None,
    ) -> Output:
        """Return the loss."""
        del starts
        states = self.table(x)
        for layer in self.layers:
            states = layer(states, edge_index)
        return Output(self.head(states).square().mean())


def _in_a_row(n: int, sizes: Sizes) -> Batch:
    return {"x": _ids(1, sizes[0]), "starts": _ids(n + 1)}


def _graphs(n: int, sizes: Sizes) -> Batch:
    del n
    return {"x": torch.zeros(sizes[0], 8), "edge_index": _ids(2, sizes[1])}


def _time_first(n: int, sizes: Sizes) -> Batch:
    return {"x": torch.zeros(sizes[0], n, 8)}


def _workload(
    build: Callable[[], nn.Module],
    batch: Callable[[int, Sizes], Batch],
    rows: int,
    *spans: tuple[int, int],
    **where: Any,
) -> Workload:
    return Workload(build=build, batch=batch, rows=rows, spans=spans, **where)


_BERT = _workload(_bert, _classified, 32, (64, 512), cards=(10, 16, 24))
_LLAMA = _workload(_llama(4096, 32, 14336), _tokens, 2, (256, 4096), cards=(40, 80))
_LLAMA_8B = replace(_LLAMA, dtype="bfloat16")
_SMALL_LLAMA = _llama(2048, 16, 8192, lora=False)
WORKLOADS: Mapping[str, Workload] = {
    "bert-large": _BERT,
    "bert-large-long": replace(_BERT, rows=16, spans=((128, 2048),), cards=(24,)),
    "deberta-v3-large": replace(_BERT, build=_deberta, cards=(24, 40)),
    "llama-1b": replace(_LLAMA_8B, build=_SMALL_LLAMA, rows=4, cards=(24, 40)),
    "llama-8b-lora": _LLAMA_8B,
    "llama-8b-lora-8k": replace(_LLAMA_8B, spans=((256, 8192),), cards=(40,)),
    "llama-8b-lora-32k": replace(_LLAMA_8B, rows=1, spans=((512, 32768),), cards=(80,)),
    "llama-80-layers": replace(_LLAMA_8B, build=_llama(2048, 80, 5632), cards=(40,)),
    "t5-large": _workload(_t5, _pairs, 16, (64, 1024), (16, 256), cards=(24,)),
    "whisper-large": _workload(_whisper, _speech, 8, (16, 448), cards=(40,)),
    "vit-huge": _workload(_vit, _pictures, 32, (100, 600), cards=(24,)),
    "mixtral-12-layers": replace(_LLAMA_8B, build=_mixture, rows=4, cards=(80,)),
    "picture-reader": _workload(_captions, _captioned, 48, (16, 512), cards=(80,)),
}
_MIXED = Workload(
    build=lambda: _Mixed(1024, 16),
    batch=_time_first,
    rows=8,
    spans=((8, 4096),),
    cards=(16,),
    dtype="float32",
    spread=1.2,
)
OF_OTHER_DIMENSIONS: Mapping[str, Workload] = {
    "texts": replace(
        _MIXED,
        build=lambda: _Mixed(1024, 16, embeds=True),
        batch=_in_a_row,
        spans=((16, 2048),),
        spread=0.8,
    ),
    "graphs": replace(_MIXED, batch=_graphs, spans=((8, 4096), (32, 16384))),
    "time-first": _MIXED,
}
"""Texts and graphs, of nodes and edges, one after the other; frames with time first."""
"""By name; a workload's cards are those on which some of its batches do not fit."""
