"""The cost model: what measured steps have taught, as one immutable value.

A step's `Context` says all that changes costs at one shape. For each context the model
has the pattern of the calls (which ran, of what family, how their own sizes follow
from the batch's), and for each family the samples of its quantities. Who reads it never
changes it; who teaches it gets another one, of a higher version, that shares all that
stayed as it was.

Note: [Whose series]
A series belongs to what its sizes are sizes of. A family's are a layer's own; the
head's and the loss's are the root's, of one context. What runs between layers is
predicted by the root's sizes too, but alike in all contexts of one structure of
arguments. The backward of a forward's first call goes on to what lies in front of it:
an embedding, or the head and the loss of the forward before. So it is the root's, of
one context, as well. Where the owner is forgotten, so are its series.

Note: [Valid since]
Plans name the version that they were made from. What makes all earlier plans useless,
such as a step over the budget or a layer that must be kept, raises the version since
which plans are valid, and no cache has to be cleared.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from mimose.cost.pattern import Around, LayerCall, Pattern, as_tuples
from mimose.cost.series import Kind, Samples, Series
from mimose.planners import Menu
from mimose.planners.actions import EXACT_MENU
from mimose.types import MOST_CONTEXTS, Context, Sizes, StepInput

Key: TypeAlias = tuple[Hashable, ...]
"""Names a series: its kind, its owner (Note: [Whose series]), and what it is of."""
Readings: TypeAlias = Mapping[Key, Iterable[tuple[Sizes, float]]]
"""By series, sizes and values."""


AGAIN = "again"
"""Stands for an action where a recomputation shows a forward that keeps."""


def flops_of_a_byte(device_type: str) -> float:
    """Return the FLOPs that take as long as rebuilding a byte by pointwise operators.

    These wait for memory, and move 2.5 bytes for each. In bf16 an H100, A100, RTX 4090
    or A10 computes 117 to 170 FLOPs while it moves a byte. On one CPU core
    `selective` took 24% of a BERT layer's time, its whole recomputation 41%.

    Args:
        device_type: The model's; nothing else counts, so equal runs make equal plans.
    """
    return 25.0 if device_type == "cpu" else 2.5 * 128.0


@dataclass(frozen=True, slots=True)
class CostModel:
    """What is known of costs at one moment. Nothing in it is ever written to."""

    kinds: Mapping[str, Kind]
    """How each sort of quantity is fitted."""
    menu: Menu = EXACT_MENU
    version: int = 0
    """How often something was taken in."""
    valid_since: int = 0
    """Note: [Valid since]."""
    scale: float = 0.0
    """How large steps are, in bytes of growth: errors are small against that."""
    n_steps: int = 0
    """Measured steps taken in."""
    patterns: dict[Context, Pattern] = field(default_factory=dict)
    """The least recently used first."""
    samples: Mapping[Key, Samples] = field(default_factory=dict)
    copied: Mapping[str, float] = field(default_factory=dict)
    """By family, the copies of weights in what a call holds: Note: [Copies]."""
    byte_flops: float = 25.0
    """FLOPs that take as long as rebuilding a byte: see `flops_of_a_byte`."""
    limits: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """Of layers that may not run under every action, those under which they may."""

    # ------------------------------------------------------------------ reading

    def allowed(self, layer: int) -> tuple[str, ...]:
        """Return the actions under which a layer may run, in the menu's order."""
        return self.limits.get(layer, self.menu.names)

    def is_settled(self, layer: int) -> bool:
        """Whether there is no choice about a layer: it is always kept."""
        return len(self.allowed(layer)) == 1

    def copied_bytes(self, call: LayerCall) -> float:
        """Return a call's copies of weights; a layer that is always kept is alike."""
        settled = self.is_settled(call.layer)
        return 0.0 if settled else self.copied.get(call.family, 0.0)

    def keeps_copies(self, action: str) -> bool:
        """Whether what is held under an action has the copies among it."""
        return not self.menu.spec(action).recomputes

    def copies_gone(self, calls: Sequence[LayerCall], actions: Sequence[str]) -> float:
        """Return the copies that go where their context ends: no graph saves them.

        Args:
            calls: Of a step.
            actions: Theirs.
        """
        pairs = list(zip(calls, actions, strict=True))
        kept = {call.layer for call, action in pairs if self.keeps_copies(action)}
        copied = {call.layer: self.copied_bytes(call) for call in calls}
        return sum(n_bytes for layer, n_bytes in copied.items() if layer not in kept)

    def pattern(self, step_input: StepInput) -> Pattern:
        """Return the pattern of a step: of the calls that ran, or else may run.

        Args:
            step_input: The step's; its context is known.
        """
        pattern = self.patterns[step_input.context]
        if step_input.counts:
            return pattern.ran(step_input.counts)
        return pattern.expected(step_input.sizes)

    def varies(self, context: Context) -> bool:
        """Whether steps of the same sizes are known to run different layers."""
        return context in self.patterns and self.patterns[context].may_vary

    def exact(self, *key: Hashable) -> Series:
        """Return what is known of something counted, such as held bytes or FLOPs."""
        return self._series(("exact", *key))

    def transient(self, *key: Hashable) -> Series:
        """Return what is known of a segment's rise over the level it begins at."""
        return self._series(("transient", *key))

    def retained(self, *key: Hashable) -> Series:
        """Return what is known of a segment's change of the level."""
        return self._series(("retained", *key))

    def _series(self, key: Key) -> Series:
        samples = self.samples.get(key)
        if samples is None:
            samples = Samples(self.kinds[str(key[0])])
        return Series(samples, self.scale)

    # ------------------------------------------------------------------ absorbing

    def changed(self, **fields: Any) -> CostModel:
        """Return the next version, in which some fields are others."""
        return replace(self, version=self.version + 1, **fields)

    def with_readings(self, readings: Readings, **fields: Any) -> CostModel:
        """Return the next version, with more readings.

        Args:
            readings: By series.
            fields: Others that change.
        """
        samples = dict(self.samples)
        for key, more in readings.items():
            old = samples.get(key) or Samples(self.kinds[str(key[0])])
            samples[key] = old.with_readings(more)
        return self.changed(samples=samples, **fields).bounded()

    def grown(self, growth_bytes: float) -> CostModel:
        """Return the model that knows how large a step is, or could be."""
        if growth_bytes <= self.scale:
            return self
        return self.changed(scale=growth_bytes)

    def used(self, context: Context) -> CostModel:
        """Return the model in which a context, a known one, was used last."""
        patterns = dict(self.patterns)
        patterns[context] = patterns.pop(context)
        return replace(self, patterns=patterns)

    def missing(self, step_input: StepInput) -> CostModel:
        """Return the next version, which knows that more runs than it predicted.

        Args:
            step_input: The step's, with what it called.
        """
        pattern = self.patterns.get(step_input.context)
        if pattern is None:
            return self
        pattern = pattern.missing(step_input.counts)
        return self.distrusted(patterns={**self.patterns, step_input.context: pattern})

    def forgotten(self, context: Context) -> CostModel:
        """Return the next version without a context; what its families taught stays."""
        patterns = {c: p for c, p in self.patterns.items() if c != context}
        return self.distrusted(patterns=patterns)

    def restricted(self, layer: int, actions: Iterable[str]) -> CostModel:
        """Return the next version, in which a layer may run under some actions only."""
        allowed = {*actions} & {*self.allowed(layer)}
        kept = tuple(name for name in self.menu.names if name in allowed)
        return self.distrusted(limits={**self.limits, layer: kept})

    def distrusted(self, **fields: Any) -> CostModel:
        """Return the next version, before which no plan is valid."""
        return self.changed(valid_since=self.version + 1, **fields)

    def renewed(self, since: CostModel) -> CostModel:
        """Return this model again, as a version behind another's.

        Args:
            since: What was learned since, and is forgotten.
        """
        version = since.version + 1
        return replace(self, version=version, valid_since=version)

    def bounded(self) -> CostModel:
        """Return the model with no more than can be kept: Note: [Whose series]."""
        if len(self.patterns) <= MOST_CONTEXTS:
            return self
        patterns = dict(list(self.patterns.items())[-MOST_CONTEXTS:])
        families = {e.family for p in patterns.values() for e in p.calls}
        owners = {*patterns, *(p.structure for p in patterns.values()), *families}
        samples = {key: s for key, s in self.samples.items() if key[1] in owners}
        copied = {family: n for family, n in self.copied.items() if family in owners}
        return replace(self, patterns=patterns, samples=samples, copied=copied)

    # ------------------------------------------------------------------ two writers

    def make_fits(self, base: CostModel | None = None) -> Iterator[None]:
        """Make the fits that readers will ask for, one by one; they are remembered.

        Args:
            base: What was known before, whose fits are made. None: nothing.
        """
        known: Mapping[Key, Samples] = {} if base is None else base.samples
        for key, samples in self.samples.items():
            if samples is not known.get(key):
                samples.fit()
                yield
        for context, pattern in self.patterns.items():
            if base is None or pattern is not base.patterns.get(context):
                pattern.make_rules()
                yield

    def joined(self, base: CostModel, now: CostModel) -> CostModel:
        """Return what lessons made of a model, with what was written at once meanwhile.

        Args:
            base: The model that the lessons began with.
            now: What others have made of it: see `mimose.cost.learner`.
        """
        gone = base.patterns.keys() - now.patterns.keys()
        version = max(self.version, now.version) + 1
        has_distrusted = self.valid_since > base.valid_since
        return replace(
            self,
            version=version,
            valid_since=version if has_distrusted else now.valid_since,
            patterns={c: p for c, p in self.patterns.items() if c not in gone},
            limits=now.limits,
        )

    # ------------------------------------------------------------------ state

    def state_dict(self) -> dict[str, Any]:
        """Return all that was learned, ready for JSON."""
        return {
            "scale": self.scale,
            "n_steps": self.n_steps,
            "limits": {str(layer): list(names) for layer, names in self.limits.items()},
            "copied": dict(self.copied),
            "patterns": {
                context: pattern.state_dict()
                for context, pattern in self.patterns.items()
            },
            "series": [[key, s.state_dict()] for key, s in self.samples.items()],
        }

    def loaded(self, state: Mapping[str, Any]) -> CostModel:
        """Return the next version, with all that another one knew in place of this.

        Args:
            state: What ``state_dict`` returned, of a model with the same menu.
        """
        samples = {}
        for said_key, said in state["series"]:
            key = as_tuples(said_key)
            samples[key] = Samples.from_state(self.kinds[str(key[0])], said)
        return self.distrusted(
            scale=float(state["scale"]),
            n_steps=int(state["n_steps"]),
            limits={int(u): as_tuples(names) for u, names in state["limits"].items()},
            copied={str(f): float(n) for f, n in state["copied"].items()},
            patterns={
                str(context): Pattern.from_state(said)
                for context, said in state["patterns"].items()
            },
            samples=samples,
        )


# ---------------------------------------------------------------------- names of series


def backward_key(step_input: StepInput, family: str, around: Around) -> Key:
    """Name the series of a backward; a transient peak's action comes behind it."""
    owner = (family,) if around[0] else (step_input.context, family)
    return *owner, "backward", around, step_input.has_gradients


def backward_sizes(step_input: StepInput, own: Sizes, around: Around) -> Sizes:
    """Return the sizes that a backward depends on: Note: [Whose series]."""
    return own if around[0] else step_input.sizes


def ends_stack(family: str, around: Around) -> bool:
    """Whether another kind of layer runs behind one, or none."""
    return around[1] != family


def beyond_key(family: str, around: Around, *, of_all: bool = False) -> Key:
    """Name the series of what a kept layer holds beyond what was counted.

    Args:
        family: The layer's.
        around: The families of its neighbours.
        of_all: Whether all layers before it are kept, too.
    """
    return family, "beyond all" if of_all else "beyond", around


def gap_key(step_input: StepInput, pair: Around) -> Key:
    """Name a gap's series; where gradients went, their memory is used again."""
    return step_input.structure, "gap", *pair, step_input.has_gradients


def head_key(step_input: StepInput, part: str) -> Key:
    """Name the series of the head or the loss."""
    return step_input.context, part, step_input.has_gradients


def numbers(sizes: Sizes) -> Sizes:
    """Put 0 for the symbol that a jagged output has for a size: its input tells it."""
    return tuple([size if isinstance(size, int) else 0 for size in sizes])
