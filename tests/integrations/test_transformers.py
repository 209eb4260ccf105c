"""The callback for the Trainer of transformers."""

import copy
import dataclasses
import inspect
import json
from typing import ClassVar

import pytest
import torch

import mimose

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from toys import Grows  # noqa: E402
from trainer_toys import (  # noqa: E402
    Gradients,
    Ignores,
    Mean,
    Stream,
    Takes,
    arguments,
    collate,
    examples,
    with_labels,
)
from transformers import (  # noqa: E402
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

from mimose.integrations.transformers import MimoseCallback, fill_budget  # noqa: E402
from mimose.model.patch import Patch  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]

N_STEPS = 18


SIZES = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_labels": 3}
SIZES |= {"num_hidden_layers": 2, "num_attention_heads": 2}


def _model():
    torch.manual_seed(0)
    config = BertConfig(**SIZES, max_position_embeddings=64)
    return BertForSequenceClassification(config)


def _trainer(folder, callbacks=(), model=None, kind=Trainer, **options):
    return kind(
        model=_model() if model is None else model,
        args=arguments(folder, **options),
        train_dataset=examples(),
        eval_dataset=examples(12),
        data_collator=collate,
        callbacks=list(callbacks),
    )


def _weights(trainer):
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def _losses(trainer):
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def _is_clean(model):
    forwards = (vars(module).get("forward") for module in model.modules())
    return not any(isinstance(forward, Patch) for forward in forwards)


def test_the_same_training_within_a_budget(tmp_path, toys, meter):
    """Losses and weights are equal to the last bit, and the metrics are logged."""
    bare = _trainer(tmp_path)
    bare.train()
    longest = sorted(examples(), key=lambda each: len(each["input_ids"]))[-4:]
    budget = toys.budget_between(_model(), [collate(longest)] * 3, 0.4, meter)
    callback = MimoseCallback(budget=budget, meter=meter)
    trainer = _trainer(tmp_path, [callback])
    trainer.train()
    assert _losses(bare) == _losses(trainer)
    assert all(map(torch.equal, _weights(bare), _weights(trainer)))
    assert _is_clean(trainer.model)
    session = callback.session
    assert N_STEPS == len(session.records)
    assert 0 == session.summary().steps_over
    logged = [e for e in trainer.state.log_history if "loss" in e]
    for name in ("peak_bytes", "budget_use", "recompute_share", "cache_hit_rate"):
        assert all(f"mimose/{name}" in entry for entry in logged)
    assert 0.0 == logged[0]["mimose/phase"]
    assert 2.0 == logged[-1]["mimose/phase"]
    json.dumps(trainer.state.log_history)


def test_a_crash_leaves_the_model_clean(tmp_path, meter):
    """An exception in a step gets out, and the model is as it was."""

    class Failing(Trainer):
        """Fails in its sixth step."""

        def compute_loss(self, model, inputs, *args, **kwargs):
            """Run the forward, then fail."""
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            if self.state.global_step == 5:
                msg = "in the middle"
                raise ArithmeticError(msg)
            return loss

    callback = MimoseCallback("1TiB", meter=meter)
    trainer = _trainer(tmp_path, kind=Failing)
    trainer.add_callback(callback)
    with pytest.raises(ArithmeticError, match="in the middle"):
        trainer.train()
    assert _is_clean(trainer.model)
    assert 6 == len(callback.session.records)


def test_a_smaller_batch_after_running_out_of_memory(tmp_path, meter):
    """`auto_find_batch_size` begins anew without an end; what was learned is kept."""

    class Poor(Trainer):
        """Has no memory for four sequences."""

        def compute_loss(self, model, inputs, *args, **kwargs):
            """Fail on large batches, once some steps are done."""
            if self.state.global_step == 5 and len(inputs["labels"]) > 3:
                msg = "DefaultCPUAllocator: can't allocate memory: on purpose"
                raise RuntimeError(msg)
            return super().compute_loss(model, inputs, *args, **kwargs)

    callback = MimoseCallback("1TiB", meter=meter)
    trainer = _trainer(tmp_path, [callback], kind=Poor, auto_find_batch_size=True)
    trainer.train()
    assert N_STEPS == trainer.state.global_step
    assert 5 + N_STEPS == len(callback.session.records)
    assert _is_clean(trainer.model)


@pytest.mark.parametrize("restores", [False, True])
def test_a_run_that_goes_on_from_a_checkpoint(tmp_path, meter, restores):
    """It collects nothing again; the weights are those of one that never stopped."""
    options = {"save_strategy": "steps", "save_steps": 16}
    whole = _trainer(tmp_path / "whole", **options)
    whole.train()
    first = _trainer(
        tmp_path / "run",
        [MimoseCallback("1TiB", meter=meter, layers=_is_layer)],
        **options,
    )
    first.train()
    trainer = _trainer(
        tmp_path / "run",
        [MimoseCallback("1TiB", meter=meter, layers=_is_layer)],
        restore_callback_states_from_checkpoint=restores,
        **options,
    )
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-16"))
    (callback,) = [
        c for c in trainer.callback_handler.callbacks if isinstance(c, MimoseCallback)
    ]
    assert ["plan"] * (N_STEPS - 16) == [r.phase for r in callback.session.records]
    assert all(map(torch.equal, _weights(whole), _weights(trainer)))
    assert _is_clean(trainer.model)


def _filling(folder, seen, trainer_class=Trainer, data=None, limits=(), **options):
    def collated(batch):
        seen.append([tuple(example["input_ids"]) for example in batch])
        return collate(batch)

    limits = {"max_rows": 16, "refine": False, **dict(limits)}
    return fill_budget(trainer_class, "1TiB", **limits)(
        model=_model(),
        args=arguments(folder, save_strategy="steps", save_steps=20, **options),
        train_dataset=data or examples(),
        data_collator=collated,
    )


@pytest.mark.parametrize("n_workers", [None, 0, 2])
def test_rows_that_follow_lengths(tmp_path, n_workers):
    """Batches grow, samples come once an epoch, and a resumed run goes on there."""
    whole, rest, options = [], [], {"max_steps": 60}
    if n_workers is not None:
        options |= {"data": Stream(examples()), "dataloader_num_workers": n_workers}
        options |= {"limits": {"buffer": 60}}
    trainer = _filling(tmp_path, whole, **options)
    trainer.train()
    _filling(tmp_path, rest, **options).train(
        resume_from_checkpoint=str(tmp_path / "checkpoint-20")
    )

    samples = sorted(tuple(example["input_ids"]) for example in examples())
    drawn = [sample for batch in whole for sample in batch]
    assert sorted(drawn[: len(samples)]) == samples
    assert max(map(len, whole[:4])) < max(map(len, whole)) <= 16
    on = [sample for batch in whole[:20] + rest for sample in batch]
    assert sorted(on[: len(samples)]) == samples


def test_a_stream_saved_at_an_epochs_end(tmp_path):
    """A resumed run goes on with the next epoch."""
    options = {"data": Stream(examples(20)), "limits": {"max_rows": 1}}
    _filling(tmp_path, [], max_steps=20, **options).train()
    rest, folder = [], str(tmp_path / "checkpoint-20")
    _filling(tmp_path, rest, max_steps=40, **options).train(folder)
    every = [(tuple(example["input_ids"]),) for example in examples(20)]
    assert sorted(every) == sorted(map(tuple, rest))


@pytest.mark.parametrize(
    ("asked", "given", "found"), [(6, 4, 6), (None, 4, 4), (None, 8, 1)]
)
def test_rows_that_were_asked_for(tmp_path, caplog, asked, given, found):
    """The trainer's own number counts if it is not its default; a message says so."""
    limits, options = {"min_rows": asked}, {"per_device_train_batch_size": given}
    with caplog.at_level("INFO", "mimose"):
        trainer = _filling(tmp_path, [], limits=limits, max_steps=1, **options)
        trainer.train()
    said = [text for text in caplog.messages if "min_rows" in text]
    assert (asked is None) == len(said)
    sampler = trainer.callback_handler.train_dataloader.batch_sampler
    assert found == sampler.state_dict()["of"]["min_rows"]


def test_a_misspelt_argument_names_the_nearest():
    """Of `fill_budget` itself, and of what it passes on."""
    for wrong, right in (("lengthz", "lengths"), ("record_too", "record_to")):
        with pytest.raises(TypeError, match=f"fill_budget has no .*mean '{right}'"):
            fill_budget(Trainer, "6GiB", **{wrong: None})


class _FailsOnce(Trainer):
    """Runs out of memory in its second step."""

    def training_step(self, *args, **kwargs):
        """Train, or fail."""
        self.n_run = getattr(self, "n_run", 0) + 1
        if self.n_run == 2:
            msg = "CUDA out of memory."
            raise torch.OutOfMemoryError(msg)
        return super().training_step(*args, **kwargs)


def test_a_training_that_begins_again(tmp_path):
    """After a failure, or its end: at an epoch's start, with the session's rows."""
    seen = []
    options = {"max_steps": 6, "auto_find_batch_size": True}
    trainer = _filling(tmp_path, seen, _FailsOnce, **options)
    for n_failed in (2, 0):
        seen.clear()
        trainer.train()
        handler = trainer.callback_handler
        sampler = handler.train_dataloader.batch_sampler
        assert len(seen) - n_failed == sampler.n_drawn
        assert sampler.session in [vars(c).get("session") for c in handler.callbacks]
        assert sampler.session is not None


def test_what_leaves_no_choice_of_rows(tmp_path):
    """It is refused, with what to set."""
    for n in (1, 2):
        options = {"max_steps": -1, "gradient_accumulation_steps": n}
        with pytest.raises(mimose.MimoseError, match=r"is -1, .* set .*max_steps="):
            _filling(tmp_path, [], **options).train()


def _accumulating(
    folder, model, labels, max_rows, n_examples, resume=None, is_stream=False
):
    """Train without learning; return the batches, and the gradients of steps."""
    seen, gradients = [], Gradients()

    def collated(batch):
        seen.append(batch)
        return with_labels(batch, labels)

    trainer = fill_budget(Trainer, "1TiB", max_rows=max_rows, refine=False)(
        model=model().double(),
        args=arguments(
            folder,
            max_steps=10,
            gradient_accumulation_steps=6,
            learning_rate=0.0,
            max_grad_norm=0.0,
            save_strategy="steps",
            save_steps=1,
        ),
        train_dataset=Stream(examples()) if is_stream else examples(n_examples),
        data_collator=collated,
        callbacks=[gradients],
    )
    trainer.train(resume_from_checkpoint=resume)
    sampler = trainer.callback_handler.train_dataloader.batch_sampler
    found = sampler.session.collation.shape((max_rows, 9 * max_rows, 9))
    assert 9 == found["input_ids.1"]  # each batch is paired with its step
    return seen, gradients.found


@pytest.mark.parametrize(
    ("model", "labels", "max_rows", "n_examples"),
    [
        (Mean, "none", 5, 40),
        (Mean, "tokens", 5, 40),
        (Ignores, "none", 5, 40),
        (Ignores, "rows", 5, 40),
        (Takes, "tokens", 5, 40),
        (Takes, "tokens", 1, 16),
        (Takes, "tokens", 1, 4),
        (Ignores, "rows", 5, 120),
    ],
)
def test_a_window_of_several_batches(tmp_path, model, labels, max_rows, n_examples):
    """It has the gradient of one batch, over an epoch's end, and from a checkpoint."""
    case = model, labels, max_rows, n_examples
    if n_examples == 120:
        case += None, True
    seen, gradients = _accumulating(tmp_path, *case)
    assert [6 * 10, 10] == [len(seen), len(gradients)]
    assert max_rows == 1 or len(set(map(len, seen))) > 1
    ends = _ends(seen, n_examples)
    if max_rows == 1:
        assert list(range(n_examples, 61, n_examples)) == ends
    for step in (ends[1] // 6, ends[1] // 6 + 1) if max_rows == 1 else ():
        folder = tmp_path / f"checkpoint-{step}"
        rest, after = _accumulating(tmp_path / "rest", *case, str(folder))
        _ends(seen[: 6 * step] + rest, n_examples)
        assert 10 - step == len(after)
        seen, gradients = seen + rest, gradients + after

    whole = model().double()
    for at, found in enumerate(gradients):
        window = [each for batch in seen[6 * at : 6 * at + 6] for each in batch]
        whole.zero_grad()
        whole(**with_labels(window, labels))["loss"].backward()
        for expected, actual in zip(whole.parameters(), found, strict=True):
            torch.testing.assert_close(actual, expected.grad, rtol=1e-10, atol=1e-12)


def _ends(batches, n_examples):
    """Return after which batches an epoch ends, if each has all examples once."""
    ends, epoch = [], []
    for n, batch in enumerate(batches, 1):
        epoch += [tuple(example["input_ids"]) for example in batch]
        if len(epoch) == n_examples:
            every = [tuple(each["input_ids"]) for each in examples(n_examples)]
            assert sorted(every) == sorted(epoch)
            ends.append(n)
            epoch.clear()
    assert len(epoch) < n_examples
    return ends


def test_lengths_that_are_not_those_of_the_dataset(tmp_path):
    """Too few, too many, and a dataset of which no sample can be chosen."""
    n = len(examples())
    for error, lengths, data in (
        (f"{n - 1} lengths and {n} samples", [9] * (n - 1), examples()),
        (f"{n + 1} lengths", {"labels.1": [9] * (n + 1)}, examples()),
        (r"Stream is an IterableDataset, .* list of", [9] * n, Stream(examples())),
    ):
        trainer = fill_budget(Trainer, "1TiB", lengths=lengths)(
            model=_model(),
            args=arguments(tmp_path, max_steps=2),
            train_dataset=data,
            data_collator=collate,
        )
        with pytest.raises(mimose.MimoseError, match=error):
            trainer.train()


@dataclasses.dataclass
class _Pads:
    """Pads as the collators of transformers do, and notes the lengths."""

    pad_to_multiple_of: int | None = None
    seen: ClassVar[list] = []

    def __call__(self, examples):
        """Collate."""
        multiple = self.pad_to_multiple_of or 1
        longest = max(len(example["input_ids"]) for example in examples)
        first, *rest = examples
        missing = -(-longest // multiple) * multiple - len(first["input_ids"])
        padded = {**first, "input_ids": first["input_ids"] + [0] * missing}
        self.seen.append((longest, len(padded["input_ids"])))
        return collate([padded, *rest])


@pytest.mark.parametrize(
    ("collator", "asked", "greatest", "found"),
    [
        (_Pads(), 8, 64, 8),
        (_Pads(), None, 64, None),
        (_Pads(), 16, 63, None),  # 59 tokens would become 64
        (_Pads(4), 8, 64, 4),
        (collate, 8, 64, None),
    ],
    ids=["set", "off", "too long", "the user's", "without"],
)
def test_padding_to_a_multiple(tmp_path, caplog, collator, asked, greatest, found):
    """A copy rounds up, in training alone; a value that is set stays; all is logged."""
    caplog.set_level("INFO", logger="mimose")
    before = copy.copy(collator)
    options = {} if asked == 8 else {"pad_to_multiple_of": asked}
    model = _model()
    model.config.max_position_embeddings = greatest
    trainer = fill_budget(Trainer, "1TiB", **options)(
        model=model,
        args=arguments(tmp_path, max_steps=4),
        train_dataset=examples(),
        eval_dataset=examples(12),
        data_collator=collator,
    )
    for run, multiple in (
        (trainer.train, found or 1),
        (trainer.evaluate, getattr(collator, "pad_to_multiple_of", None) or 1),
    ):
        _Pads.seen.clear()
        run()
        assert all(-(-n // multiple) * multiple == padded for n, padded in _Pads.seen)
    assert collator == before
    sampler = trainer.callback_handler.train_dataloader.batch_sampler
    assert found == sampler.state_dict()["of"]["pad_to_multiple_of"]
    logged = [text for text in caplog.messages if "pads" in text]
    is_set = getattr(collator, "pad_to_multiple_of", None) is not None
    assert (asked is not None and not is_set) == len(logged)
    assert all(("pads to multiples of" in text) == bool(found) for text in logged)


def _is_layer(module):
    return type(module).__name__ == "BertLayer"


@dataclasses.dataclass
class _OnByDefault(TrainingArguments):
    """As the configurations of TRL are."""

    gradient_checkpointing: bool = True


def test_checkpointing_that_nobody_asked_for(tmp_path):
    """The error says what to set, and setting it helps, by either of its names."""
    callback = MimoseCallback("1GiB")
    options = {"output_dir": str(tmp_path), "use_cpu": True, "report_to": []}
    complaint = r"_OnByDefault\(\.\.\., (activation|gradient)_checkpointing=False\)"
    with pytest.raises(mimose.CheckpointingConflictError, match=complaint):
        callback.on_init_end(_OnByDefault(**options), None, None)
    names = {"activation_checkpointing", "gradient_checkpointing"}
    for name in names & inspect.signature(_OnByDefault).parameters.keys():
        callback.on_init_end(_OnByDefault(**options, **{name: False}), None, None)


class _TwoCalls(torch.nn.Module):
    """A loss of a model's outputs for a batch and for its second half."""

    def __init__(self):
        super().__init__()
        self.model = _model()

    def forward(self, inputs):
        """Call the model twice."""
        half = {name: tensor[2:] for name, tensor in inputs.items()}
        return self.model(**inputs).loss + self.model(**half).loss


def test_a_loss_that_calls_the_model_twice(tmp_path, meter):
    """Attached to the loss, each of its steps is one, planned and exact."""

    class Calling(Trainer):
        """Calls a loss, which calls the model."""

        def compute_loss(self, model, inputs, **_):
            """Call the loss."""
            return losses[len(trained)](inputs)

    losses, trained = [_TwoCalls(), _TwoCalls()], []
    callback = MimoseCallback("1TiB", meter=meter, module=losses[1])
    for loss, callbacks in zip(losses, ([], [callback]), strict=True):
        trainer = _trainer(tmp_path, callbacks, loss.model, Calling)
        trainer.train()
        trained.append(trainer)
    assert _losses(trained[0]) == _losses(trained[1])
    assert all(map(torch.equal, *map(_weights, trained)))
    records = callback.session.records
    assert {4} == {len(record.actions) for record in records}
    assert (N_STEPS, "plan") == (len(records), records[-1].phase)
    assert _is_clean(losses[1])


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_layers(tmp_path, meter, caplog):
    """An error, or with `warn` a training that is not planned."""

    class Plain(torch.nn.Module):
        """One parameter and nothing to plan for."""

        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, input_ids, attention_mask, labels):
            """Return a loss."""
            del attention_mask
            mean = input_ids.float().mean(dim=1)
            return {"loss": (self.scale * mean - labels).square().mean()}

    callback = MimoseCallback("1TiB", meter=meter)
    with pytest.raises(mimose.NoUnitsError):
        _trainer(tmp_path, [callback], model=Plain(), max_steps=2).train()
    callback = MimoseCallback("1TiB", meter=meter, on_infeasible="warn")
    trainer = _trainer(tmp_path, [callback], model=Plain(), max_steps=2)
    trainer.train()
    assert 2 == trainer.state.global_step
    assert "this training runs without plans" in caplog.text
    assert callback.session is None


def test_the_callbacks_take_what_attach_takes():
    """An option of `attach` that a callback does not know cannot be had there."""
    lightning = pytest.importorskip("mimose.integrations.lightning")
    parameters = inspect.signature(mimose.attach).parameters
    options = {n: p.default for n, p in parameters.items() if n != "model"}
    options["budget"] = "1TiB"
    del options["unknown"]
    for callback in (MimoseCallback, lightning.MimoseCallback):
        callback(**options)
        with pytest.raises(TypeError, match=r"'plannr'"):
            callback("1TiB", plannr="optimal")


class _Regressor(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = torch.nn.Embedding(64, 8)
        self.layers = torch.nn.ModuleList(Grows() for _ in range(3))
        self.head = torch.nn.Linear(8, 8)

    def forward(self, input_ids, attention_mask, labels):
        Grows.seen.clear()
        x = self.embedding(input_ids) + torch.rand(1)
        for layer in self.layers:
            x = layer(x)
        loss = (self.head(x).mean((1, 2)) - labels).pow(2).mean()
        Grows.seen.append(0)
        return {"loss": loss}


class _Popping(Trainer):
    """Takes out of the batch what it uses, and draws before the model does."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        labels = inputs.pop("labels") + torch.rand(1)
        inputs = {**inputs, "labels": labels}
        return super().training_step(model, inputs, num_items_in_batch)


def test_no_step_is_lost(tmp_path, meter):
    """Layers whose recomputation cannot be right are kept, and the step is repeated."""
    options = {"kind": _Popping, "gradient_accumulation_steps": 2, "max_steps": 6}
    bare = _trainer(tmp_path, model=_Regressor(), **options)
    bare.train()
    callback = MimoseCallback("1TiB", meter=meter)
    trainer = _trainer(tmp_path, [callback], _Regressor(), **options)
    trainer.train()
    assert _losses(bare) == _losses(trainer)
    assert all(map(torch.equal, _weights(bare), _weights(trainer)))
    assert 3 == len(callback.session.summary().kept_units)
    assert len(callback.session.records) > 6 * 2
    assert _is_clean(trainer.model)


def test_what_a_file_holds_is_loaded(tmp_path, meter):
    """The first training begins with what another one, or a rehearsal, has learned."""
    first = MimoseCallback("1TiB", meter=meter)
    _trainer(tmp_path, [first]).train()
    path = tmp_path / "learned.json"
    path.write_text(json.dumps(first.session.state_dict()), encoding="utf-8")

    second = MimoseCallback("1TiB", meter=meter, learned=path)
    _trainer(tmp_path, [second]).train()

    assert {"plan"} == {record.phase for record in second.session.records}

    options = {"save_strategy": "steps", "save_steps": N_STEPS}
    _trainer(tmp_path, [MimoseCallback("1TiB", meter=meter)], **options).train()
    third = MimoseCallback("1TiB", meter=meter, learned={"of": "another model"})
    folder = str(tmp_path / f"checkpoint-{N_STEPS}")
    _trainer(tmp_path, [third], max_steps=N_STEPS + 4).train(folder)
    assert {"plan"} == {record.phase for record in third.session.records}
