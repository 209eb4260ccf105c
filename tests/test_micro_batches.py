"""A batch in micro-batches: each row once, and the gradients of the whole."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from toys import Residual

pytest.importorskip("hypothesis")

from hypothesis import given, settings
from hypothesis import strategies as st

import mimose

WORDS = 64
LAYERS = {
    "vocab_size": WORDS,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {"vocab_size": WORDS, "d_model": 32, "d_ff": 64, "d_kv": 16, "num_heads": 2}
T5 |= {"num_layers": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
N_ROWS, COLUMNS = 13, 33


class _Tokens(nn.Module):
    """A causal model of transformers whose loss keeps the weights' precision."""

    def __init__(self):
        super().__init__()
        config = transformers.LlamaConfig(**LAYERS, use_cache=False)
        self.inner = transformers.LlamaForCausalLM(config)

    def forward(self, labels, **inputs):
        logits = self.inner(**inputs).logits[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten())


class _Wrapped(nn.Module):
    """Hides the configuration of a model of transformers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **inputs):
        return self.inner(**inputs)


class _Lengths(nn.Module):
    """Takes its inputs by position, and knows what is padding by lengths."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(WORDS, 16)
        self.layers = nn.ModuleList(Residual(16, 16) for _ in range(3))

    def forward(self, ids, lengths, target):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        counts = (torch.arange(ids.shape[1]) < lengths[:, None])[..., None]
        return F.mse_loss((x * counts).sum(1), target)


def _padded(seed, *, is_left=False):
    """Make ids and their mask; some rows have one length, one has all columns."""
    draw = np.random.default_rng(seed)
    lengths = torch.from_numpy(draw.integers(4, COLUMNS - 5, N_ROWS))
    lengths[[3, 8]] = torch.tensor([COLUMNS - 4, 5])
    ids = torch.from_numpy(draw.integers(3, WORDS, (N_ROWS, COLUMNS)))
    columns = torch.arange(COLUMNS)
    start = (COLUMNS - lengths if is_left else 0 * lengths)[:, None]
    mask = (columns >= start) & (columns < start + lengths[:, None])
    return ids * mask, mask.long(), lengths


def _encoder():
    config = transformers.BertConfig(**LAYERS, **STILL)
    ids, mask, _ = _padded(1)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 0] % 2}
    batch = transformers.BatchEncoding({**batch, "return_dict": True})
    return transformers.BertForSequenceClassification(config), batch, {}


def _causal(*, is_left=False):
    ids, mask, _ = _padded(2, is_left=is_left)
    labels = ids.masked_fill((mask == 0) | (ids % 3 == 0), -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if is_left:
        batch["position_ids"] = (mask.cumsum(1) - 1).clamp_min(0)
        first = torch.arange(COLUMNS) == (mask == 0).sum(1)[:, None]
        labels.masked_fill_(first, -100)  # else it is predicted from padding

    def count(part):
        return (part["labels"][:, 1:] != -100).sum()

    return _Tokens(), batch, {"loss": count}


def _seq2seq():
    ids, mask, _ = _padded(3)
    targets, seen, _ = _padded(4)
    labels = targets.masked_fill(seen == 0, -100)
    batch = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(**T5, use_cache=False)
    )
    return _Wrapped(model), batch, {"loss": "tokens", "shift": False}


def _by_position():
    ids, _, lengths = _padded(5)
    batch = ids, lengths, torch.rand(N_ROWS, 16, dtype=torch.float64)
    return _Lengths(), batch, {"lengths": lengths.tolist()}


CASES = {
    "encoder, rows": _encoder,
    "causal, counted": _causal,
    "padded on the left": lambda: _causal(is_left=True),
    "sources and targets": _seq2seq,
    "by position": _by_position,
}


def _loss(model, batch):
    named = hasattr(batch, "keys")
    output = model(**batch) if named else model(*batch)
    return output if isinstance(output, torch.Tensor) else output.loss


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_whole(toys, case):
    """While nothing is known, and then; of rows, tokens, pairs, either padding."""
    torch.manual_seed(0)
    model, batch, options = CASES[case]()
    model = model.double().train()
    whole = copy.deepcopy(model)
    loss = _loss(whole, batch)
    loss.backward()
    layers = Residual if case == "by position" else None
    largest = max(p.grad.abs().max() for p in whole.parameters())
    with mimose.attach(
        model, "1TiB", layers=layers, meter=toys.BlindMeter()
    ) as session:
        for number in range(3):
            model.zero_grad()
            total, sizes = 0.0, []
            for part, weight in session.micro_batches(batch, **options):
                weighted = weight * _loss(model, part)
                weighted.backward()
                total += float(weighted.detach())
                first = part["input_ids"] if hasattr(part, "keys") else part[0]
                sizes.append(tuple(first.shape))
            assert float(loss.detach()) == pytest.approx(total, rel=1e-5)
            others = dict(whole.named_parameters())
            for name, own in model.named_parameters():
                other = others[name].grad
                # A bias of all keys changes no attention: its gradient is rounding.
                scale = largest if "key.bias" in name else other.abs().max()
                assert (own.grad - other).abs().max() <= 1e-10 * scale
            assert N_ROWS == sum(n for n, _ in sizes)
            assert max(columns for _, columns in sizes) == COLUMNS - 4
            assert number > 0 or 1 < len(sizes)  # later ones may be known to fit whole


def test_what_does_not_follow_rows_is_handed_on():
    """Lists with an item a row are split; settings and what all rows share are not."""
    model = nn.Sequential(Residual(4, 4), Residual(4, 4))
    batch = {
        "x": torch.arange(24.0).reshape(6, 4),
        "nested": [{"y": torch.arange(6)}, torch.tensor(0.5)],
        "names": ["a", "b", "c", "d", "e", "f"],
        "boxes": [torch.full((i, 4), float(i)) for i in range(6)],
        "shared": torch.ones(1, 4),
        "flag": True,
        "array": np.arange(12).reshape(6, 2),
    }
    seen = []
    with mimose.attach(model, "1TiB", layers=Residual) as session:
        for part, weight in session.micro_batches(batch):
            own = part["nested"][0]["y"].tolist()
            assert torch.equal(part["x"], batch["x"][own])
            assert part["names"] == [batch["names"][row] for row in own]
            assert [len(box) for box in part["boxes"]] == own
            assert part["array"].tolist() == batch["array"][own].tolist()
            assert part["shared"] is batch["shared"]
            assert part["flag"] is True
            assert part["nested"][1] is batch["nested"][1]
            assert weight == pytest.approx(len(own) / 6)
            (weight * model(part["x"]).mean()).backward()
            seen += own
    assert sorted(seen) == list(range(6))


def _refused(batch=None, model=None, **options):
    model = model or nn.Sequential(Residual(4, 4), Residual(4, 4))
    x = torch.ones(6, 4)
    with mimose.attach(model, "1TiB", layers=Residual) as session:
        for part, _ in session.micro_batches({"x": x, **(batch or {})}, **options):
            model(part["x"]).sum().backward()


def _ragged(n, columns):
    """Make labels of 1; row i ignores those after column i."""
    after = torch.arange(columns) > torch.arange(n)[:, None]
    return torch.ones(n, columns, dtype=torch.long).masked_fill(after, -100)


def _decoder(kind):
    """Make a decoder of transformers, alone, and a batch of ragged rows."""
    torch.manual_seed(0)
    ids, mask, _ = _padded(6)
    batch = {"input_ids": ids, "attention_mask": mask}
    batch["labels"] = ids.masked_fill(mask == 0, -100)
    if kind == "llama":
        config = transformers.LlamaConfig(**LAYERS, use_cache=False)
        return transformers.LlamaForCausalLM(config).train(), batch
    sizes = {"vocab_size": WORDS, "d_model": 32, "decoder_layers": 2}
    sizes |= {"decoder_ffn_dim": 64, "decoder_attention_heads": 2, "dropout": 0.0}
    config = transformers.BartConfig(
        **sizes, is_decoder=True, is_encoder_decoder=False, use_cache=False
    )
    return transformers.BartForCausalLM(config).train(), batch


def _off(model, batch, session, **options):
    """Return by how much the parts' gradients differ from the whole's, at most."""
    whole = copy.deepcopy(model)
    whole(**batch).loss.backward()
    for part, weight in session.micro_batches(batch, **options):
        (weight * model(**part).loss).backward()
    wanted = [p.grad for p in whole.parameters() if p.grad is not None]
    found = [p.grad for p in model.parameters() if p.grad is not None]
    pairs = zip(found, wanted, strict=True)
    errors = [float((own - other).abs().max()) for own, other in pairs]
    return max(errors) / max(float(grad.abs().max()) for grad in wanted)


@pytest.mark.parametrize("kind", ["bart", "llama"])
def test_what_a_loss_of_labels_is_over_must_be_told(toys, kind):
    """Bart's decoder counts the first column, Llama does not: it is asked, then used.

    Neither is a loss by rows, which is asked, too, where rows have unequal labels.
    """
    model, batch = _decoder(kind)
    with mimose.attach(model, "1TiB", meter=toys.BlindMeter()) as session:
        with pytest.raises(ValueError, match="loss='tokens'"):
            session.micro_batches(batch)
        with pytest.raises(ValueError, match="shift=True"):
            session.micro_batches(batch, loss="tokens")
        told = {"loss": "tokens", "shift": kind == "llama"}
        assert _off(model, batch, session=session, **told) < 1e-5
        model.zero_grad()
        told["shift"] = not told["shift"]
        assert _off(model, batch, session=session, **told) > 1e-3
        few = {name: tensor[:1] for name, tensor in batch.items()}
        for loss in (None, "tokens"):
            assert 1 == len(list(session.micro_batches(few, loss=loss)))


class _Scored(nn.Module):
    """Scores each column, and takes the mean over what counts."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.embed = nn.Embedding(WORDS, 8)
        self.layers = nn.ModuleList(Residual(8, 8) for _ in range(2))

    def forward(self, ids, labels):
        logits = self.embed(ids)
        for layer in self.layers:
            logits = layer(logits)
        own, scores = labels, logits
        if self.kind == "shifted":
            own, scores = labels[:, 1:], logits[:, :-1]
        losses = F.cross_entropy(scores.transpose(1, 2), own, reduction="none")
        counted = own != -100
        if self.kind == "by row":  # a mean over the rows, of each row's sum
            counted = torch.ones(len(own))
        return {"logits": logits, "loss": losses.sum() / counted.sum()}


LOSSES = {
    "by row": "rows",
    "shifted": "tokens",
    "not shifted": "tokens",
    "counted": lambda part: (part["labels"] != -100).sum(),
}


@st.composite
def _batches(draw):
    """Draw a kind of loss, and two batches: padded rows, of whose labels some count."""
    batches = []
    for seed in draw(st.tuples(*[st.integers(0, 99)] * 2)):
        numbers = np.random.default_rng(seed)
        lengths = draw(st.lists(st.integers(1, 12), min_size=1, max_size=9))
        shape = len(lengths), max(2, *lengths) + draw(st.integers(0, 2))
        is_padding = np.arange(shape[1]) >= np.array(lengths)[:, None]
        ids, labels = numbers.integers(3, WORDS, shape), numbers.integers(0, 8, shape)
        share = draw(st.sampled_from([0.0, 0.1, 0.6, 1.0]))
        ignored = is_padding | (numbers.random(shape) >= share)
        ids, labels = np.where(is_padding, 0, ids), np.where(ignored, -100, labels)
        mask = torch.from_numpy(~is_padding)
        batches.append((torch.from_numpy(ids), torch.from_numpy(labels), mask))
    return draw(st.sampled_from(sorted(LOSSES))), batches


@given(drawn=_batches())
@settings(deadline=None, max_examples=40, derandomize=True)
def test_any_batch_is_split_right(toys, drawn):
    """Each row that counts comes once, and the gradients are those of the whole."""
    kind, batches = drawn
    torch.manual_seed(0)
    model = _Scored(kind).double()
    with mimose.attach(
        model, "1TiB", layers=Residual, meter=toys.BlindMeter()
    ) as session:
        for ids, labels, mask in batches:
            whole = copy.deepcopy(model)
            whole(ids, labels)["loss"].backward()
            batch = {"ids": ids, "labels": labels, "attention_mask": mask}
            batch["row"] = torch.arange(len(ids))
            seen, total = [], 0.0
            told = {"loss": LOSSES[kind], "shift": kind == "shifted"}
            model.zero_grad()
            for part, weight in session.micro_batches(batch, **told):
                (weight * model(part["ids"], part["labels"])["loss"]).backward()
                seen += part["row"].tolist()
                total += weight
            counted = labels[:, int(kind == "shifted") :] != -100
            rows = counted.any(1) | (kind == "by row")
            assert sorted(seen) == rows.nonzero().flatten().tolist()
            if not seen:
                return
            assert total == pytest.approx(1.0)
            for own, other in zip(model.parameters(), whole.parameters(), strict=True):
                most = other.grad.abs().max() + 1e-12
                assert (own.grad - other.grad).abs().max() <= 1e-9 * most


def test_a_function_that_counts_in_padding_is_told():
    """Lengths that hold what it counts are then taken."""
    model = nn.Sequential(Residual(4, 4), Residual(4, 4))
    batch = {"x": torch.rand(3, 6, 4), "mask": torch.ones(3, 6)}
    options = {"loss": lambda part: part["mask"].sum()}
    with mimose.attach(model, "1TiB", layers=Residual) as session:
        with pytest.raises(ValueError, match="lengths="):
            session.micro_batches(batch, lengths=[1, 2, 6], **options)
        assert session.micro_batches(batch, lengths=[6] * 3, **options)


def _norm():
    return nn.Sequential(Residual(4, 4), nn.BatchNorm1d(4), Residual(4, 4))


@pytest.mark.parametrize(
    ("error", "says", "arguments"),
    [
        (mimose.MimoseError, "^1: batch norm", {"model": _norm()}),
        (ValueError, "w has 5 rows .* 6", {"batch": {"w": torch.ones(5)}}),
        (ValueError, "6 integers from 0 to 4", {"lengths": [9] * 6}),
        (ValueError, "6 integers from 0 to 4", {"lengths": [0.5] * 6}),
        (ValueError, "no tensor 'z'", {"lengths": {"z": [1] * 6}}),
        (
            ValueError,
            "m has as many columns as each of x and y",
            {
                "batch": {"y": torch.ones(6, 4), "m": torch.ones(6, 4)},
                "lengths": {"x": [1] * 6, "y": [2] * 6},
            },
        ),
        (ValueError, "'rows', 'tokens'", {"loss": "mean"}),
        (ValueError, "this batch has none", {"loss": "tokens"}),
        (ValueError, "counted 1 of .* and 6 in all", {"loss": lambda part: 1.0}),
        (ValueError, "counted 1 of", {"loss": lambda part: len(part["x"]) == 6}),
        (ValueError, "at least -1", {"loss": lambda part: part["x"].sum() / -4}),
        (
            ValueError,
            "3 dimensions .* ignore_index",
            {"loss": "tokens", "batch": {"labels": torch.ones(6, 4, 2)}},
        ),
        (
            ValueError,
            "Give shift=True",
            {"loss": "tokens", "batch": {"labels": _ragged(6, 4)}},
        ),
    ],
)
def test_what_cannot_be_split_is_told(error, says, arguments):
    """Batch norm, tensors and lengths that do not belong, losses that count nothing."""
    with pytest.raises(error, match=says):
        _refused(**arguments)


def test_a_batch_is_a_container_of_tensors():
    """An object of another kind would be handed on whole."""
    model = nn.Sequential(Residual(4, 4), Residual(4, 4))
    with mimose.attach(model, "1TiB", layers=Residual) as session:
        for error, batch in ((TypeError, 7), (ValueError, {"flag": True})):
            with pytest.raises(error, match="batch"):
                session.micro_batches(batch)


@pytest.mark.sim
def test_a_tight_budget_is_kept_from_the_first_row_on(sim):
    """Nothing known, batches far too large: no step over, none that is run again."""
    torch.manual_seed(0)
    config = {**LAYERS, "hidden_size": 128, "intermediate_size": 512, **STILL}
    config = transformers.BertConfig(**config, max_position_embeddings=256)
    model = transformers.BertForSequenceClassification(config).to("sim").train()
    optimizer = torch.optim.AdamW(model.parameters())
    draw = np.random.default_rng(0)

    def train(session, lengths):
        lengths = torch.as_tensor(lengths)
        mask = (torch.arange(int(lengths.max())) < lengths[:, None]).long()
        batch = {"input_ids": 5 * mask, "attention_mask": mask, "labels": lengths % 2}
        n = 0
        for part, weight in session.micro_batches(batch):
            part = {name: tensor.to("sim") for name, tensor in part.items()}
            (weight * model(**part).loss).backward()
            n += 1
        optimizer.step()
        optimizer.zero_grad()
        return n

    with mimose.attach(model, "120MiB", refine=False) as session:
        counts = [train(session, draw.integers(20, 200, 96)) for _ in range(4)]
        records = list(session.records)
        assert all(record.highest_bytes <= record.budget_bytes for record in records)
        assert 0 == sum(record.retries for record in records)
        assert "plan" == records[-1].phase
        whole = {"input_ids.0": 96, "input_ids.1": 199}
        assert session.forecast(whole).fits is not True
        assert counts[-1] < counts[0]


def test_a_row_that_fits_under_no_plan_is_told(meter):
    """With its length, before anything of its batch is run."""
    model, batch, _ = _encoder()
    with mimose.attach(model, "1GiB", meter=meter) as session:
        for _ in range(2):
            for part, weight in session.micro_batches(batch):
                (weight * model(**part).loss).backward()
            model.zero_grad()
        session.budget = int(meter.live_bytes() + 10_000)
        n_steps = len(session.records)
        with pytest.raises(mimose.InfeasibleBudgetError, match=r"Row 3 .* 29 columns"):
            next(session.micro_batches(batch))
        assert n_steps == len(session.records)
