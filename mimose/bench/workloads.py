"""A training task for demonstrations and benchmarks: where does a docstring come from?

A small BERT encoder, built from a configuration and so without pretrained weights,
learns to tell the package of a docstring (`mimose.bench.corpus`). Batches are padded to
their longest member: with 16 texts a batch, lengths run from about 40 to 512 tokens,
and activations with them over more than an order of magnitude. Everything is settled
by the seed: weights, the order of the batches and dropout.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.nn import functional

from mimose.bench.corpus import PADDING_ID, EncodedCorpus, EncodedText
from mimose.bench.tasks import Workload

if TYPE_CHECKING:
    from transformers import BertModel


@dataclass(frozen=True, slots=True)
class Batch:
    """The texts of one step, padded to the longest."""

    input_ids: torch.Tensor
    """(texts, tokens) int64."""

    attention_mask: torch.Tensor
    """(texts, tokens) int64, 1 where there is text."""

    labels: torch.Tensor
    """(texts,) int64."""

    @property
    def size(self) -> int:
        """Number of texts."""
        return int(self.input_ids.shape[0])

    @property
    def length(self) -> int:
        """Tokens of the longest text."""
        return int(self.input_ids.shape[1])

    def as_inputs(self) -> dict[str, torch.Tensor]:
        """Return what the model's forward takes, the labels included."""
        return {
            "input_ids": self.input_ids,
            "attention_mask": self.attention_mask,
            "labels": self.labels,
        }


class DocstringClassifier(nn.Module):
    """A BERT encoder, the mean over a text's tokens, and one linear layer.

    The mean is what lets it learn within a hundred steps: with random weights the
    first token alone says nothing of a text for a long time.

    Args:
        encoder: Turns (texts, tokens) ids into (texts, tokens, width) states.
        n_labels: Number of classes.
        dropout: Of the mean.
    """

    def __init__(self, encoder: BertModel, n_labels: int, dropout: float) -> None:
        super().__init__()
        self.encoder = encoder
        self.dropout = nn.Dropout(dropout)
        self.classifier = nn.Linear(encoder.config.hidden_size, n_labels)

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        labels: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return logits (texts, labels), and the mean loss where labels are given."""
        states = self.encoder(input_ids, attention_mask=attention_mask)[0]
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(dim=1) / weights.sum(dim=1)
        logits = self.classifier(self.dropout(mean))
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return logits, loss


def make_model(workload: Workload, corpus: EncodedCorpus) -> DocstringClassifier:
    """Build the classifier, in training mode, with weights settled by the seed.

    The random state of the caller is put back afterwards.

    Raises:
        ModuleNotFoundError: transformers is missing (``pip install 'mimose[bench]'``).
    """
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=corpus.vocabulary_size,
        hidden_size=workload.hidden_size,
        num_hidden_layers=workload.layers,
        num_attention_heads=workload.heads,
        intermediate_size=4 * workload.hidden_size,
        hidden_dropout_prob=workload.dropout,
        attention_probs_dropout_prob=workload.dropout,
        max_position_embeddings=workload.max_tokens,
        pad_token_id=PADDING_ID,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(workload.seed)
        encoder = BertModel(config, add_pooling_layer=False)
        n_labels = len(corpus.labels)
        return DocstringClassifier(encoder, n_labels, workload.dropout).train()


def make_optimizer(
    workload: Workload, model: nn.Module, n_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """Build AdamW and its schedule: a linear warm-up, then linearly towards zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=workload.learning_rate)

    def share(step: int) -> float:
        rise = (step + 1) / workload.warm_up_steps
        return max(0.0, min(1.0, rise, 1.0 - step / n_steps))

    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, share)


def iterate_batches(
    workload: Workload, corpus: EncodedCorpus, n_batches: int
) -> Iterator[Batch]:
    """Yield shuffled training batches, epoch after epoch; all are full.

    The same workload and corpus give the same batches in the same order.
    """
    generator = torch.Generator().manual_seed(workload.seed)
    order: list[int] = []
    for _ in range(n_batches):
        if len(order) < workload.batch_size:
            order = torch.randperm(len(corpus.train), generator=generator).tolist()
        members, order = order[: workload.batch_size], order[workload.batch_size :]
        yield collate([corpus.train[index] for index in members])


def collate(texts: Sequence[EncodedText]) -> Batch:
    """Pad texts to the longest of them."""
    length = max(len(text.token_ids) for text in texts)
    input_ids = torch.full((len(texts), length), PADDING_ID)
    mask = torch.zeros((len(texts), length), dtype=torch.int64)
    for row, text in enumerate(texts):
        input_ids[row, : len(text.token_ids)] = torch.tensor(text.token_ids)
        mask[row, : len(text.token_ids)] = 1
    return Batch(input_ids, mask, torch.tensor([text.label for text in texts]))


def evaluate(model: nn.Module, corpus: EncodedCorpus, batch_size: int = 32) -> float:
    """Return the share of held-out texts whose package is named correctly.

    Texts are sorted by length first, so that little is padded and little memory is
    needed. Training mode is put back afterwards.
    """
    texts = sorted(corpus.held_out, key=lambda text: len(text.token_ids))
    was_training = model.training
    model.eval()
    right = 0
    try:
        with torch.no_grad():
            for start in range(0, len(texts), batch_size):
                batch = collate(texts[start : start + batch_size])
                logits, _ = model(batch.input_ids, batch.attention_mask)
                right += int((logits.argmax(dim=-1) == batch.labels).sum())
    finally:
        model.train(was_training)
    return right / len(texts)
