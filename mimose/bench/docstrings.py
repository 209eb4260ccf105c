"""The demonstration's task: from which package does a docstring come?

A small BERT encoder, built from a configuration and so without pretrained weights,
learns it from real text (`mimose.bench.corpus`). With 16 texts a batch, padded to the
longest, lengths run from about 40 to 512 tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Generator, nn
from torch.nn import functional

from mimose.bench.corpus import (
    PADDING_ID,
    EncodedCorpus,
    EncodedText,
    encode_corpus,
    load_corpus,
)

if TYPE_CHECKING:
    from transformers import BertModel

MOST_TOKENS = 512
"""Longer texts are cut to this."""
N_TEXTS = 16
"""In a batch."""


class ClassifierOutput(NamedTuple):
    """What the classifier returns."""

    loss: torch.Tensor | None
    """The mean over the batch, where labels are given."""
    logits: torch.Tensor
    """(texts, labels)."""


class DocstringClassifier(nn.Module):
    """A BERT encoder, the mean over a text's tokens, and one linear layer.

    The mean lets it learn within a hundred steps: with random weights the first token
    alone says nothing of a text for a long time.

    Args:
        encoder: Maps (texts, tokens) ids to (texts, tokens, width) states.
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
    ) -> ClassifierOutput:
        """Return logits, and the loss where labels are given."""
        states = self.encoder(input_ids, attention_mask=attention_mask)[0]
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(dim=1) / weights.sum(dim=1)
        logits = self.classifier(self.dropout(mean))
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return ClassifierOutput(loss, logits)


def encoder_config(corpus: EncodedCorpus, scale: str = "tiny") -> dict[str, Any]:
    """Return the encoder's configuration: four layers, narrow where it is tiny."""
    # More than one head would multiply time and memory alike.
    width, heads = {"tiny": (64, 1), "small": (256, 4)}.get(scale, (768, 12))
    return {
        "vocab_size": corpus.vocabulary_size,
        "hidden_size": width,
        "num_hidden_layers": 4,
        "num_attention_heads": heads,
        "intermediate_size": 4 * width,
        "max_position_embeddings": MOST_TOKENS,
        "pad_token_id": PADDING_ID,
    }


def collate(texts: Sequence[EncodedText]) -> dict[str, torch.Tensor]:
    """Pad texts to the longest of them.

    Returns:
        ``input_ids`` and ``attention_mask`` (texts, tokens), ``labels`` (texts,).
    """
    length = max(len(text.token_ids) for text in texts)
    input_ids = torch.full((len(texts), length), PADDING_ID)
    mask = torch.zeros((len(texts), length), dtype=torch.int64)
    for row, text in enumerate(texts):
        input_ids[row, : len(text.token_ids)] = torch.tensor(text.token_ids)
        mask[row, : len(text.token_ids)] = 1
    labels = torch.tensor([text.label for text in texts])
    return {"input_ids": input_ids, "attention_mask": mask, "labels": labels}


class Docstrings:
    """Models and batches of one corpus.

    Args:
        corpus: None for that of the standard library, which takes seconds to read.
    """

    def __init__(self, corpus: EncodedCorpus | None = None) -> None:
        self._corpus = corpus
        self._by_length: list[EncodedText] = []

    @property
    def corpus(self) -> EncodedCorpus:
        """The texts, in tokens."""
        if self._corpus is None:
            self._corpus = encode_corpus(load_corpus(), MOST_TOKENS)
        return self._corpus

    def prepare(self, folder: Path) -> None:
        """Read the corpus from a folder, or be the one that writes it there."""
        path = folder / "docstrings.json"
        if self._corpus is None and path.exists():
            self._corpus = EncodedCorpus.load(path)
        elif not path.exists():
            self.corpus.save(path)

    def build(self, scale: str) -> DocstringClassifier:
        """Build the classifier, in training mode."""
        from transformers import BertConfig, BertModel

        config = BertConfig(**encoder_config(self.corpus, scale))
        encoder = BertModel(config, add_pooling_layer=False)
        n_labels = len(self.corpus.labels)
        return DocstringClassifier(encoder, n_labels, 0.1).train()

    def trace(
        self, generator: np.random.Generator, n_batches: int
    ) -> list[dict[str, int]]:
        """Draw batches; return the length of each one's longest member."""
        lengths = np.array([len(text.token_ids) for text in self.corpus.train])
        drawn = generator.choice(lengths, (n_batches, N_TEXTS)).max(axis=1)
        return [{"length": int(length)} for length in drawn]

    def batch(
        self, sizes: Mapping[str, int], _scale: str, generator: Generator
    ) -> dict[str, torch.Tensor]:
        """Draw a batch whose longest member has some length, the others any up to it.

        Where no text has just that length, a longer one is cut.

        Raises:
            ValueError: All texts are shorter.
        """
        if not self._by_length:
            self._by_length = sorted(
                self.corpus.train, key=lambda text: len(text.token_ids)
            )
        length = sizes["length"]
        lengths = [len(text.token_ids) for text in self._by_length]
        first, last = (int(i) for i in np.searchsorted(lengths, (length, length + 1)))
        if first == len(lengths):
            msg = f"no text has {length} tokens; the longest has {lengths[-1]}"
            raise ValueError(msg)
        most = last if last > first else len(lengths)
        longest = torch.randint(first, most, (1,), generator=generator)
        others = torch.randint(max(1, last), (N_TEXTS - 1,), generator=generator)
        chosen = [self._by_length[i] for i in (*longest.tolist(), *others.tolist())]
        return collate([EncodedText(t.token_ids[:length], t.label) for t in chosen])

    def evaluate(self, model: nn.Module, batch_size: int = 32) -> float:
        """Return the share of held-out texts whose package is named correctly.

        Texts are sorted by length, so that little is padded. Training mode is put back.
        """
        texts = sorted(self.corpus.held_out, key=lambda text: len(text.token_ids))
        was_training = model.training
        device = next(model.parameters()).device
        model.eval()
        right = 0
        try:
            with torch.no_grad():
                for start in range(0, len(texts), batch_size):
                    made = collate(texts[start : start + batch_size])
                    batch = {name: value.to(device) for name, value in made.items()}
                    labels = batch.pop("labels")
                    logits = model(**batch).logits
                    right += int((logits.argmax(dim=-1) == labels).sum())
        finally:
            model.train(was_training)
        return right / len(texts)


OURS = Docstrings()
"""Of the standard library."""
