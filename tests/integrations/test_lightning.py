"""The callback for Lightning's Trainer."""

import functools
import gc
import importlib
import itertools
import json
import weakref

import pytest
import torch
from torch import nn

import mimose

_NAMES = ("lightning.pytorch", "pytorch_lightning")


def _packages():
    found = []
    for name in _NAMES:
        try:
            found.append(importlib.import_module(name))
        except ModuleNotFoundError:
            continue
    return found


PACKAGES = _packages()
if not PACKAGES:
    pytest.skip("no lightning is installed", allow_module_level=True)

from mimose.integrations.lightning import MimoseCallback  # noqa: E402

L = PACKAGES[0]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec.:FutureWarning"),
    pytest.mark.filterwarnings("ignore:You defined a .validation_step. but have no"),
]

N_STEPS = 16
WIDTH = 32


@functools.cache
def _class(package):
    class Lit(package.LightningModule):
        """Runs the step it is given; each epoch draws from a seed of its own."""

        def __init__(self, step, **models):
            super().__init__()
            self.step = step
            for name, model in models.items():
                setattr(self, name, model)

        def on_train_epoch_start(self):
            """Make a resumed run draw as one that never stopped."""
            torch.manual_seed(100 + self.current_epoch)

        def training_step(self, batch, index):
            """Run the step."""
            return self.step(self, batch, index)

        def validation_step(self, batch, index):
            """Run the model."""
            self.log("val_loss", self.model(batch), batch_size=len(batch))

        def configure_optimizers(self):
            """Use AdamW."""
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Lit


def _calls_model(lit, batch, index):
    return lit.model(batch)


def _lit(toys, step=_calls_model, package=L, cls=None, **models):
    models = models or {"model": toys.chain(3, WIDTH)}
    return (cls or _class(package))(step, **models)


def _batches(n_batches=N_STEPS, seed=1):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(16, 256, (n_batches,), generator=generator).tolist()
    sizes[-1] = max(sizes)  # for it to have a plan
    batches = [torch.randn(n_rows, WIDTH, generator=generator) for n_rows in sizes]
    return _Loader(batches)


class _Loader:
    """An iterable of batches; of a list Lightning would take each for a loader."""

    def __init__(self, batches):
        self._batches = batches

    def __iter__(self):
        """Iterate."""
        return iter(self._batches)

    def __len__(self):
        """Count."""
        return len(self._batches)


def _fit(lit, callbacks=(), package=L, batches=None, val=None, resume=None, **options):
    options = {
        "accelerator": "cpu",
        "max_epochs": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "log_every_n_steps": 4,
        **options,
    }
    trainer = package.Trainer(callbacks=list(callbacks), **options)
    trainer.fit(lit, _batches() if batches is None else batches, val, ckpt_path=resume)
    return trainer


def _same(one, other):
    first, second = one.state_dict(), other.state_dict()
    return first.keys() == second.keys() and all(
        torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


@pytest.fixture
def run(toys, meter):
    """Train bare and with the callback; assert that nothing but memory differs."""

    def run(make=None, share=None, module=None, **options):
        make = functools.partial(_lit, toys) if make is None else make
        with toys.untracked():
            bare = make()
            _fit(bare, **options)
        budget = "1TiB" if share is None else _budget(make, share, meter, options)
        callback = MimoseCallback(budget, meter=meter, module=module)
        lit = make()
        trainer = _fit(lit, [callback], **options)
        assert _same(bare, lit)
        assert not toys.leftovers(lit)
        return trainer, callback

    return run


def _budget(make, share, meter, options):
    """Put a budget between recomputing all (0) and keeping all (1)."""
    batches = _batches()  # held, as they will be in the run
    largest = _Loader(sorted(batches, key=len)[-6:])
    least, most = (
        _growth(make, planner, meter, batches=largest, **options)
        for planner in ("full", "none")
    )
    gc.collect()
    return int(meter.live_bytes() + least + share * (most - least))


def _growth(make, planner, meter, **options):
    """Return what a training's peak is above what is held before it."""
    gc.collect()
    held = meter.live_bytes()
    callback = MimoseCallback("1TiB", planner=planner, meter=meter)
    _fit(make(), [callback], **options)
    return callback.session.peak_bytes - held


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.__name__)
def test_the_same_training_within_a_budget(toys, run, package):
    """Weights are equal to the last bit; no step is over; the metrics are logged."""
    make = functools.partial(_lit, toys, package=package)
    trainer, callback = run(make, share=0.3, package=package)
    records = callback.session.records
    assert N_STEPS == len(records)
    assert 0 == callback.session.summary().steps_over
    assert {"keep", "recompute"} == set(records[-1].actions)
    for name in ("peak_bytes", "budget_use", "recompute_share", "cache_hit_rate"):
        assert f"mimose/{name}" in trainer.callback_metrics
    assert 2.0 == trainer.callback_metrics["mimose/phase"]


def test_validation_in_the_middle(run):
    """It passes through: no step, no plan; and the sanity check before is none."""
    val = _batches(4, seed=2)
    trainer, callback = run(share=0.4, val=val, val_check_interval=6)
    assert N_STEPS == len(callback.session.records)
    assert "val_loss" in trainer.callback_metrics


# -------------------------------------------------------------------- ends


def _fails_at(n, error):
    def step(lit, batch, index):
        loss = lit.model(batch)
        if index == n:
            raise error
        return loss

    return step


def test_a_crash_leaves_the_model_clean(toys, meter):
    """An exception in a step gets out, and the model is as it was, weights too."""
    n = 5
    with toys.untracked():
        bare = _lit(toys, _fails_at(n, ArithmeticError("in the middle")))
        with pytest.raises(ArithmeticError, match="in the middle"):
            _fit(bare)
    lit = _lit(toys, _fails_at(n, ArithmeticError("in the middle")))
    callback = MimoseCallback("1TiB", meter=meter)
    with pytest.raises(ArithmeticError, match="in the middle"):
        _fit(lit, [callback])
    assert n + 1 == len(callback.session.records)
    assert _same(bare, lit)
    assert not toys.leftovers(lit)


# -------------------------------------------------------------------- state


def _saving(folder, every=None):
    checkpoints = importlib.import_module(f"{L.__name__}.callbacks")
    options = {"save_top_k": -1, "every_n_train_steps": every}
    return checkpoints.ModelCheckpoint(
        folder, "{step}" if every else "{epoch}", **options
    )


@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
def test_a_run_that_goes_on_from_a_checkpoint(toys, meter, tmp_path):
    """It collects nothing again; the weights are those of one that never stopped."""
    options = {"max_epochs": 2, "enable_checkpointing": True}
    with toys.untracked():
        whole = _lit(toys)
        _fit(whole, max_epochs=2)
    callbacks = [MimoseCallback("1TiB", meter=meter), _saving(tmp_path)]
    _fit(_lit(toys), callbacks, **options)
    lit, callback = _lit(toys), MimoseCallback("1TiB", meter=meter)
    path = tmp_path / "epoch=0.ckpt"
    _fit(lit, [callback, _saving(tmp_path / "on")], resume=str(path), **options)
    # Lightning keeps the last step's gradients until this one's forward has run, so no
    # step but the first has none: that one may recompute all.
    first, *later = (record.phase for record in callback.session.records)
    assert first in ("plan", "fallback")
    assert ["plan"] * (N_STEPS - 1) == later
    assert _same(whole, lit)
    assert not toys.leftovers(lit)
    saved = torch.load(path, weights_only=True)["callbacks"]["MimoseCallback"]
    assert saved == json.loads(json.dumps(saved))


def _rows_by_length(kind):
    generator = torch.Generator().manual_seed(2)
    lengths = torch.randint(4, 64, (90,), generator=generator).tolist()
    samples = [torch.randn(n, WIDTH, generator=generator) for n in lengths]
    collate = functools.partial(nn.utils.rnn.pad_sequence, batch_first=True)
    if kind == "stream":
        options = {"length": len, "collate_fn": collate, "buffer": 30, "max_rows": 12}
        return lengths, mimose.BatchStream(samples, **options)
    sampler = mimose.BatchSampler(lengths, max_rows=12)
    options = {"batch_sampler": sampler, "collate_fn": collate}
    return lengths, torch.utils.data.DataLoader(samples, **options)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:The dirpath has changed:UserWarning")
@pytest.mark.parametrize("kind", ["sampler", "stream"])
@pytest.mark.parametrize("every", [None, 9])
def test_rows_that_follow_lengths(toys, meter, tmp_path, kind, every):
    """The callback's session draws batches to each epoch's end, resumed or not."""

    def fit(folder, resume=None):
        seen = []

        def step(lit, batch, index):
            seen.append((batch != 0.0).any(-1).sum(1).tolist())
            return lit.model(batch)

        lengths, loader = _rows_by_length(kind)
        callbacks = [MimoseCallback("1TiB", meter=meter), _saving(folder, every)]
        options = {"max_epochs": 3, "enable_checkpointing": True}
        _fit(_lit(toys, step), callbacks, batches=loader, resume=resume, **options)
        return lengths, seen

    lengths, whole = fit(tmp_path)
    name = f"step={every}.ckpt" if every else "epoch=0.ckpt"
    _, rest = fit(tmp_path / "on", str(tmp_path / name))

    assert sorted(itertools.chain(*whole)) == sorted(3 * lengths)
    before = whole[: every or 0]
    assert sorted(itertools.chain(*before, *rest)) == sorted(
        (3 if every else 2) * lengths
    )
    assert max(map(len, whole[:4])) < max(map(len, whole)) <= 12


class _Epochs:
    """Begins anew, and notes its epochs."""

    def __init__(self, samples):
        self._samples, self.epochs = samples, []

    def __iter__(self):
        return iter(self._samples)

    def set_epoch(self, epoch):
        """Note it."""
        self.epochs.append(epoch)


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.parametrize("kind", [iter, _Epochs])
def test_a_stream_begins_once(toys, meter, kind):
    """What Lightning draws before the training is not lost, in the first epoch."""
    seen = []

    def step(lit, batch, index):
        seen.append(len(batch))
        return lit.model(batch)

    samples = kind([torch.randn(9, WIDTH) for _ in range(40)])
    options = {"length": len, "collate_fn": torch.stack, "max_rows": 12, "buffer": 20}
    stream = mimose.BatchStream(samples, **options)
    _fit(_lit(toys, step), [MimoseCallback("1TiB", meter=meter)], batches=stream)
    assert 40 == sum(seen)
    assert 12 > seen[0]
    assert 0 == stream.epoch
    assert {0} == {*getattr(samples, "epochs", [0])}


# -------------------------------------------------------------------- the root


class _Stack(nn.Module):
    """Blocks one after the other."""

    def __init__(self, toys, n_blocks=2):
        super().__init__()
        self.blocks = nn.ModuleList(toys.Block(WIDTH) for _ in range(n_blocks))

    def forward(self, x):
        """Run them."""
        for block in self.blocks:
            x = block(x)
        return x


def _pair(toys, step, cls=None):
    torch.manual_seed(4)
    return _lit(toys, step, cls=cls, encoder=_Stack(toys), decoder=_Stack(toys))


def test_a_module_by_name(toys, run, meter, caplog):
    """The one that was asked for, and no warning of the other; a wrong name is told."""

    def step(lit, batch, index):
        return lit.decoder(lit.encoder(batch)).square().mean()

    _, callback = run(functools.partial(_pair, toys, step), module="decoder")
    assert 2 == len(callback.session.records[-1].actions)
    assert callback.session.records[-1].events[0].startswith("blocks.0")
    assert "WARNING" not in caplog.text
    with pytest.raises(AttributeError, match="encode"):
        _fit(_pair(toys, step), [MimoseCallback("1TiB", module="encode", meter=meter)])


def test_two_callbacks_for_two_modules(toys, meter):
    """A generator and its critic: each has a session, and a state of its own."""

    def step(lit, batch, index):
        one, two = lit.optimizers()
        for model, optimizer in ((lit.encoder, one), (lit.decoder, two)):
            optimizer.zero_grad()
            lit.manual_backward(model(batch).square().mean())
            optimizer.step()

    class Adversaries(_class(L)):
        """Has two optimizers, and steps by itself."""

        def __init__(self, step, **models):
            super().__init__(step, **models)
            self.automatic_optimization = False

        def configure_optimizers(self):
            """Give each model one."""
            models = (self.encoder, self.decoder)
            return [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in models]

    with toys.untracked():
        bare = _pair(toys, step, Adversaries)
        _fit(bare)
    callbacks = [
        MimoseCallback("1TiB", module=name, meter=meter)
        for name in ("encoder", "decoder")
    ]
    lit = _pair(toys, step, Adversaries)
    _fit(lit, callbacks)
    assert [N_STEPS] * 2 == [len(callback.session.records) for callback in callbacks]
    assert 2 == len({callback.state_key for callback in callbacks})
    assert _same(bare, lit)
    assert not toys.leftovers(lit)


def _loops(lit, batch, index):
    for block in lit.model.blocks:
        batch = block(batch)
    return batch.square().mean()


@pytest.mark.filterwarnings("ignore:Found .* in eval mode")
def test_a_model_in_evaluation_mode_is_said(toys, meter, caplog):
    """Lightning keeps the mode of from_pretrained: the message says what to call."""
    lit = _lit(toys, model=toys.chain(3, WIDTH).eval())
    callback = MimoseCallback("1TiB", meter=meter)
    _fit(lit, [callback])
    assert callback.session is None
    assert "model.train()" in caplog.text


def test_a_loop_over_the_layers_has_no_root(toys, meter, caplog):
    """Nothing is planned, and a warning says what to call."""
    lit, callback = _lit(toys, _loops), MimoseCallback("1TiB", meter=meter)
    _fit(lit, [callback])
    assert callback.session is None
    assert 1 == caplog.text.count("or self(batch), in training_step")
    assert not toys.leftovers(lit)


# -------------------------------------------------------------------- repeats


@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}])
def test_no_step_is_lost(toys, run, options):
    """Layers whose recomputation cannot be right are kept, and the step is repeated."""
    means, seen = [], toys.Grows.seen

    def step(lit, batch, index):
        noise = torch.rand(1)
        seen.clear()
        loss = lit.model(batch + noise).pow(2).mean()
        lit.log("loss", loss, on_epoch=True, batch_size=len(batch))
        seen.append(0)
        return loss

    def make():
        torch.manual_seed(0)
        layers = (toys.Grows(WIDTH) for _ in range(3))
        lit = _lit(toys, step, model=nn.Sequential(*layers, nn.Linear(WIDTH, 1)))
        lit.on_train_epoch_end = lambda: means.append(
            lit.trainer.callback_metrics["loss_epoch"]
        )
        return lit

    _, callback = run(make, **options)
    assert len(callback.session.records) > N_STEPS
    assert 3 == len(callback.session.summary().kept_units)
    assert torch.equal(*means)


def test_no_batch_is_held_by_a_closure(toys):
    """A batch is gone when its step is, with no help of the garbage collector's."""
    seen = []

    def step(lit, batch, index):
        assert not [ref for ref in seen[:-1] if ref() is not None]
        seen.append(weakref.ref(batch))
        return lit.model(batch)

    sizes = [torch.Size((8 + n, WIDTH)) for n in range(6)]

    class Fresh:
        def __iter__(self):
            return map(torch.randn, sizes)

        def __len__(self):
            return len(sizes)

    gc.disable()
    try:
        _fit(_lit(toys, step), [MimoseCallback("1TiB")], batches=Fresh())
    finally:
        gc.enable()
    assert len(sizes) == len(seen)
