"""The demonstration's task, on real text that needs no download.

The sources of the running interpreter's standard library are parsed, never imported.
Each docstring of a module, class or function becomes a text, whose label is its
top-level package or module (``asyncio``, ``tkinter``, ``typing``). The lengths have a
long tail, for which plans by shape are useful: half of the texts have fewer than 30
tokens, one in a hundred nearly 500.

These rules give the same corpus for one Python version:

- files below the standard library's folder, in the order of their paths, without
  third-party packages, tests, bundled tools and generated help (`_LEFT_OUT`);
- docstrings as `ast.get_docstring` cleans them, and of equal texts the first;
- only the most frequent labels (`load_corpus`);
- texts whose CRC-32 is divisible by eight are held out.

The task: from which package does a docstring come? A small BERT encoder without
pretrained weights learns it. With batches of 16 texts, padded to the longest, lengths
are from about 40 to 512 tokens.
"""

from __future__ import annotations

import ast
import functools
import pickle
import sysconfig
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Generator, nn
from torch.nn import functional

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import BertModel

VOCABULARY_SIZE = 8192
PADDING_ID = 0
MOST_TOKENS = 512
"""Longer texts are cut to this."""
N_TEXTS = 16
"""The number of texts in a batch of the demonstration."""

_SPECIAL_TOKENS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
_HELD_OUT_EVERY = 8
_LEFT_OUT = frozenset(
    {
        "__pycache__",
        "ensurepip",
        "idlelib",
        "lib2to3",
        "pydoc_data",
        "site-packages",
        "dist-packages",
        "test",
        "tests",
        "turtledemo",
    }
)


@dataclass(frozen=True, slots=True)
class Docstring:
    """One text and where it comes from."""

    text: str
    """The cleaned docstring, never empty."""

    package: str
    """Its top-level package or module of the standard library."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Labelled texts, with some of them held out."""

    labels: tuple[str, ...]
    """Package names, the most frequent first; a text's class is its index here."""

    train: tuple[Docstring, ...]
    """Texts to learn from."""

    held_out: tuple[Docstring, ...]
    """Texts for the accuracy, about an eighth of all."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """One text in tokens."""

    token_ids: tuple[int, ...]
    """The tokens, with ``[CLS]`` and ``[SEP]``."""

    label: int
    """Index into the labels."""


@dataclass(frozen=True, slots=True)
class EncodedCorpus:
    """A corpus in tokens."""

    labels: tuple[str, ...]
    vocabulary_size: int
    train: tuple[EncodedText, ...]
    held_out: tuple[EncodedText, ...]


def read_docstrings(root: Path | None = None) -> tuple[Docstring, ...]:
    """Read every docstring below a folder of Python sources.

    Args:
        root: The folder; None for the running interpreter's standard library.

    Returns:
        The texts in the order of their files' paths, equal texts once. Files that do
        not parse are skipped.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found: dict[str, Docstring] = {}
    for path in sorted(root.rglob("*.py")):
        if _LEFT_OUT.intersection(path.relative_to(root).parts):
            continue
        package = path.relative_to(root).parts[0].removesuffix(".py")
        for text in _docstrings_in(path):
            found.setdefault(text, Docstring(text, package))
    return tuple(found.values())


@functools.cache
def load_corpus(n_labels: int = 24, root: Path | None = None) -> Corpus:
    """Build the classification task: from which package does a docstring come?

    Args:
        n_labels: The number of packages, the most frequent ones. The texts of all
            others are dropped. (One class for them would be the largest.)
        root: A folder of sources; None for the standard library.

    Returns:
        The same corpus on every call with one Python version.
    """
    texts = read_docstrings(root)
    counts = Counter(text.package for text in texts)
    labels = tuple(sorted(counts, key=lambda name: (-counts[name], name))[:n_labels])
    kept = [text for text in texts if text.package in labels]
    checks = ((text, zlib.crc32(text.text.encode())) for text in kept)
    held_out = dict.fromkeys(t for t, check in checks if check % _HELD_OUT_EVERY == 0)
    return Corpus(
        labels=labels,
        train=tuple(text for text in kept if text not in held_out),
        held_out=tuple(held_out),
    )


def train_tokenizer(
    texts: Iterable[str], vocabulary_size: int = VOCABULARY_SIZE
) -> Tokenizer:
    """Learn a byte-pair vocabulary from texts, in well under a second.

    Args:
        texts: The texts, in a fixed order.
        vocabulary_size: The most tokens, with special ones and 256 bytes.

    Returns:
        A tokenizer that puts ``[CLS]`` before and ``[SEP]`` after a text and knows
        every byte.

    Raises:
        ModuleNotFoundError: tokenizers is missing (``pip install 'mimose[bench]'``).
    """
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[
            (name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")
        ],
    )
    return tokenizer


@functools.cache
def encode_corpus(
    corpus: Corpus, max_tokens: int = 512, vocabulary_size: int = VOCABULARY_SIZE
) -> EncodedCorpus:
    """Turn a corpus into tokens of a vocabulary learned from its training texts.

    Args:
        corpus: The texts.
        max_tokens: Longer texts are cut to this many tokens.
        vocabulary_size: See `train_tokenizer`.
    """
    tokenizer = train_tokenizer((text.text for text in corpus.train), vocabulary_size)
    tokenizer.enable_truncation(max_tokens)
    classes = {name: index for index, name in enumerate(corpus.labels)}

    def encode(texts: tuple[Docstring, ...]) -> tuple[EncodedText, ...]:
        encodings = tokenizer.encode_batch([text.text for text in texts])
        return tuple(
            EncodedText(tuple(encoding.ids), classes[text.package])
            for encoding, text in zip(encodings, texts, strict=True)
        )

    return EncodedCorpus(
        labels=corpus.labels,
        vocabulary_size=tokenizer.get_vocab_size(),
        train=encode(corpus.train),
        held_out=encode(corpus.held_out),
    )


def _docstrings_in(path: Path) -> Iterator[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in old sources
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    yield from _docstrings_below(tree)


def _docstrings_below(
    node: ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef,
) -> Iterator[str]:
    """Yield a definition's docstring, then those of the definitions in its body.

    Definitions inside an ``if`` or ``try`` are not visited: they are few, and to walk
    all expressions would take longer than parsing.
    """
    text = ast.get_docstring(node)
    if text:
        yield text
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings_below(child)


class ClassifierOutput(NamedTuple):
    """What the classifier returns."""

    loss: torch.Tensor | None
    """The mean over the batch; None without labels."""
    logits: torch.Tensor
    """(texts, labels)."""


class DocstringClassifier(nn.Module):
    """A BERT encoder, the mean over a text's tokens, and one linear layer.

    With the mean it learns within a hundred steps. With random weights, the state of
    the first token alone says nothing about a text for a long time.

    Args:
        encoder: Maps (texts, tokens) ids to (texts, tokens, width) states.
        n_labels: Number of classes.
        dropout: The dropout rate of the mean.
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
        """Return logits, and the loss if there are labels."""
        states = self.encoder(input_ids, attention_mask=attention_mask)[0]
        weights = attention_mask.unsqueeze(-1).to(states.dtype)
        mean = (states * weights).sum(dim=1) / weights.sum(dim=1)
        logits = self.classifier(self.dropout(mean))
        loss = None if labels is None else functional.cross_entropy(logits, labels)
        return ClassifierOutput(loss, logits)


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
        corpus: The corpus; None for the standard library's, which takes seconds to
            read.
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
        """Read the corpus from a folder; write it there if it is missing."""
        path = folder / "docstrings.pickle"
        if self._corpus is None and path.exists():
            self._corpus = pickle.loads(path.read_bytes())
        elif not path.exists():
            path.write_bytes(pickle.dumps(self.corpus))

    def build(self, scale: str) -> DocstringClassifier:
        """Build the classifier, in training mode."""
        from transformers import BertConfig, BertModel

        # More than one head would multiply time and memory alike.
        width, heads = {"tiny": (64, 1), "small": (256, 4)}.get(scale, (768, 12))
        config = BertConfig(
            vocab_size=self.corpus.vocabulary_size,
            hidden_size=width,
            num_hidden_layers=4,
            num_attention_heads=heads,
            intermediate_size=4 * width,
            max_position_embeddings=MOST_TOKENS,
            pad_token_id=PADDING_ID,
        )
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

        Texts are sorted by length, so that little is padded. Training mode is restored.
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
"""The models and batches of the standard library's docstrings."""
