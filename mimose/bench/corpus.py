"""Real text that is always there: the docstrings of the standard library.

Nothing is downloaded. The sources of the running interpreter's standard library are
parsed, never imported, and every docstring of a module, class or function becomes a
text whose label is the top-level package or module it stands in (``asyncio``,
``tkinter``, ``typing``). Lengths have the heavy tail that makes input-aware planning
worth while: half of the texts have fewer than 30 tokens, one in a hundred nearly 500.

The rule, so that two people with one Python version get the same corpus:

- files below the standard library's folder, in the order of their paths, without
  third-party packages, tests, bundled tools and generated help (`_LEFT_OUT`);
- a docstring as `ast.get_docstring` cleans it; of equal texts the first;
- the most frequent labels only (`load_corpus`);
- held out is a text whose CRC-32 is divisible by eight.
"""

from __future__ import annotations

import ast
import functools
import json
import sysconfig
import warnings
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

VOCABULARY_SIZE = 8192
PADDING_ID = 0

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
    """The top-level package or module of the standard library it stands in."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Labelled texts, with some of them held out."""

    labels: tuple[str, ...]
    """Package names, the most frequent first; a text's class is its index here."""

    train: tuple[Docstring, ...]
    """Texts to learn from."""

    held_out: tuple[Docstring, ...]
    """Texts to judge by, about an eighth of all."""


@dataclass(frozen=True, slots=True)
class EncodedText:
    """One text as a classifier takes it."""

    token_ids: tuple[int, ...]
    """Beginning and end marks included."""

    label: int
    """Index into the labels."""


@dataclass(frozen=True, slots=True)
class EncodedCorpus:
    """A corpus in tokens. It can be saved, so that every process reads the same."""

    labels: tuple[str, ...]
    vocabulary_size: int
    train: tuple[EncodedText, ...]
    held_out: tuple[EncodedText, ...]

    def save(self, path: Path) -> None:
        """Write everything into one JSON file."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> EncodedCorpus:
        """Read what `save` wrote."""
        raw = json.loads(path.read_text(encoding="utf-8"))
        return cls(
            labels=tuple(raw["labels"]),
            vocabulary_size=raw["vocabulary_size"],
            **{
                part: tuple(
                    EncodedText(tuple(text["token_ids"]), text["label"])
                    for text in raw[part]
                )
                for part in ("train", "held_out")
            },
        )


def read_docstrings(root: Path | None = None) -> tuple[Docstring, ...]:
    """Read every docstring below a folder of Python sources.

    Args:
        root: The folder; None for the running interpreter's standard library.

    Returns:
        The texts in the order of their files' paths, equal texts once. Files that do
        not parse are passed over.
    """
    root = Path(sysconfig.get_path("stdlib")) if root is None else root
    found: dict[str, Docstring] = {}
    for path in _source_files(root):
        package = path.relative_to(root).parts[0].removesuffix(".py")
        for text in _docstrings_in(path):
            found.setdefault(text, Docstring(text, package))
    return tuple(found.values())


@functools.cache
def load_corpus(n_labels: int = 24, root: Path | None = None) -> Corpus:
    """Build the classification task: from which package does a docstring come?

    Args:
        n_labels: How many of the most frequent packages are kept; the texts of all
            others are dropped. (One class for them would be the largest.)
        root: A folder of sources; None for the standard library.

    Returns:
        The same corpus on every call with one Python version.
    """
    texts = read_docstrings(root)
    counts = Counter(text.package for text in texts)
    labels = tuple(sorted(counts, key=lambda name: (-counts[name], name))[:n_labels])
    kept = [text for text in texts if text.package in labels]
    return Corpus(
        labels=labels,
        train=tuple(text for text in kept if not _is_held_out(text)),
        held_out=tuple(text for text in kept if _is_held_out(text)),
    )


def train_tokenizer(
    texts: Iterable[str], vocabulary_size: int = VOCABULARY_SIZE
) -> Tokenizer:
    """Learn a byte-pair vocabulary from texts, in well under a second.

    Args:
        texts: What to learn from, in a fixed order.
        vocabulary_size: The most tokens, special ones and 256 bytes included.

    Returns:
        A tokenizer that puts ``[CLS]`` before and ``[SEP]`` behind a text and knows
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


def _source_files(root: Path) -> list[Path]:
    return sorted(
        path
        for path in root.rglob("*.py")
        if not _LEFT_OUT.intersection(path.relative_to(root).parts)
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

    Definitions inside an ``if`` or ``try`` are not visited: they are few, and walking
    every expression would take longer than parsing.
    """
    text = ast.get_docstring(node)
    if text:
        yield text
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings_below(child)


def _is_held_out(text: Docstring) -> bool:
    return zlib.crc32(text.text.encode()) % _HELD_OUT_EVERY == 0
