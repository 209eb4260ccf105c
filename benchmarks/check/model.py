"""A small transformer of torch's modules alone, with dropout, and its batches."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from mimose.bench.zoo import Batch, Output

_VOCABULARY = 512
_CLASSES = 8
_DROPOUT = 0.1


class Layer(nn.Module):
    """Attention and two linear layers, each behind a norm and with a residual.

    Attention is torch's where it is fused; else products and a softmax.
    """

    def __init__(self, width: int, heads: int, *, is_fused: bool) -> None:
        super().__init__()
        self._heads = heads
        self._is_fused = is_fused
        self.norm, self.second_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = nn.Dropout(_DROPOUT)
        self.wide = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(
        self, states: torch.Tensor, mask: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        states = states + self.dropout(self._attend(self.norm(states), mask))
        inner = functional.gelu(self.wide(self.second_norm(states)))
        changed: torch.Tensor = self.dropout(self.narrow(inner))
        return states + changed

    def _attend(self, states: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        batch, length, width = states.shape
        shape = batch, length, 3, self._heads, width // self._heads
        together = self.queries_keys_values(states).view(shape)
        queries, keys, values = together.permute(2, 0, 3, 1, 4)
        rate = _DROPOUT if self.training else 0.0
        attend = functional.scaled_dot_product_attention if self._is_fused else _eager
        found = attend(queries, keys, values, attn_mask=mask, dropout_p=rate)
        joined: torch.Tensor = self.out(found.transpose(1, 2).flatten(2))
        return joined


def _eager(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attn_mask: torch.Tensor | None,
    dropout_p: float,
) -> torch.Tensor:
    scores = queries @ keys.transpose(-2, -1) * queries.shape[-1] ** -0.5
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    return functional.dropout(scores.softmax(-1), dropout_p) @ values


class Transformer(nn.Module):
    """Embeddings, layers, a classifier on the mean of the states."""

    def __init__(
        self, width: int, heads: int, layers: int, longest: int, *, is_fused: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(_VOCABULARY, width)
        self.places = nn.Embedding(longest, width)
        self.layers = nn.ModuleList(
            Layer(width, heads, is_fused=is_fused) for _ in range(layers)
        )
        self.classifier = nn.Linear(width, _CLASSES)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
    ) -> Output:
        """Map tokens to the loss of their classes; True in a mask is a token."""
        mask = None if attention_mask is None else attention_mask[:, None, None, :]
        states = self.tokens(input_ids) + self.places.weight[: input_ids.shape[1]]
        for layer in self.layers:
            states = layer(states, mask)
        classes = self.classifier(states.mean(1))
        return Output(loss=functional.cross_entropy(classes, labels))


def make_batch(
    n_sequences: int, length: int, generator: torch.Generator, *, is_padded: bool
) -> Batch:
    """Make a batch on the CPU; where it is padded, all but one sequence end earlier."""
    shape = n_sequences, length
    batch = {
        "input_ids": torch.randint(_VOCABULARY, shape, generator=generator),
        "labels": torch.randint(_CLASSES, (n_sequences,), generator=generator),
    }
    if is_padded:
        least = max(1, length // 4)
        ends = torch.randint(least, length + 1, (n_sequences, 1), generator=generator)
        ends[0] = length
        batch["attention_mask"] = torch.arange(length) < ends
    return batch
