"""Fits of Lightning's Trainer by mpips' strategy: what every rank has seen, checked on each."""

import os
import re
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    EarlyStopping,
    LambdaCallback,
    LearningRateFinder,
    ModelCheckpoint,
    StochasticWeightAveraging,
)
from lightning.pytorch.plugins.precision import MixedPrecision
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import mpips.lightning
import mpips.torch as mt
from mpips.errors import UserError
from mpips.lightning.rates import Rates

WORLD = MPI.COMM_WORLD
COUNT, EPOCHS, SIZE, LATE_S = 103, 3, 8, 0.5
pixels = torch.rand(COUNT, 1, 6, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(pixels, torch.arange(COUNT))
Seen = Counter[tuple[int, int]]  # by epoch and sample


class Classes(lightning.LightningModule):
    """A classifier in two ways of optimization, with a schedule by steps."""

    def __init__(self, steps: int, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 2))
        self.steps, self.automatic_optimization = steps, not manual
        self.accuracy = torchmetrics.classification.BinaryAccuracy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.flatten(1).to(self.net[0].weight.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch; step, if that is not left to Lightning."""
        loss = F.cross_entropy(self(batch[0]), batch[1] % 2)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        if not self.automatic_optimization:
            self.optimizers().zero_grad()
            self.manual_backward(loss)
            self.optimizers().step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, k = batch
        out = self(x)
        self.accuracy(out.argmax(1), k % 2)
        self.log("accuracy", self.accuracy)
        self.log("val_loss", F.cross_entropy(out, k % 2), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        matrices, biases = ([p for p in self.parameters() if p.dim() == k] for k in (2, 1))
        groups = [{"params": matrices}, {"params": biases, "lr": 0.01, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, 0.02, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [0.2, 0.1], total_steps=self.steps, cycle_momentum=False
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Notes(lightning.Callback):
    """Notes which samples this rank has trained on in which epoch."""

    def __init__(self) -> None:
        self.samples = Seen()

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        self.samples.update((trainer.current_epoch, int(sample)) for sample in given[-2][-1])


def come_late(trainer: Any, *given: Any) -> None:
    """Leave the batches of the last epochs to other workers, where they wait for none."""
    if trainer.is_global_zero and not trainer.global_step:
        time.sleep(LATE_S)


def leave(trainer: Any, *given: Any) -> None:
    """Have the Trainer leave its loop within a pass; in sync on every worker in the same step."""
    trainer.should_stop = trainer.current_epoch >= 1 and given[-1] >= 1


def leave_alone(trainer: Any, *given: Any) -> None:
    """Ask for it on worker 0 alone; others clear the request of the run's end."""
    trainer.should_stop = trainer.current_epoch >= 1 and trainer.is_global_zero


def ask_to_end(trainer: Any, *given: Any) -> None:
    """Ask the whole job to save and to end, in a step of worker 0."""
    if trainer.is_global_zero and trainer.global_step == 6:
        os.kill(os.getpid(), signal.SIGTERM)


PLAIN: dict[str, Any] = {
    "accelerator": "cpu", "logger": False, "enable_progress_bar": False,
    "enable_model_summary": False, "enable_checkpointing": False,
}  # fmt: skip


def make(mode: str, out: Path, options: Any = None, **more: Any) -> lightning.Trainer:
    servers = {"servers": 1} if mode in ("async", "ssp") else {}
    strategy = mpips.lightning.Strategy(
        mode, out=str(out), eval_every=0, **servers, **(options or {})
    )
    saves = any(isinstance(each, ModelCheckpoint) for each in more.get("callbacks", ()))
    given = {**PLAIN, "max_epochs": EPOCHS, "log_every_n_steps": 2, "enable_checkpointing": saves}
    root = str(out.with_suffix(".lightning"))
    return lightning.Trainer(strategy=strategy, default_root_dir=root, **{**given, **more})


def plain(module: Any, data: Any, epochs: int = 6, path: Any = None, **more: Any) -> Any:
    """Return a Trainer of this rank alone that has fitted a module, on one batch of all samples."""
    trainer = lightning.Trainer(devices=1, max_epochs=epochs, **{**PLAIN, **DOUBLE, **more})
    trainer.fit(module, DataLoader(data, len(data)), ckpt_path=path)
    return trainer


DOUBLE: dict[str, Any] = {"precision": "64-true"}


def first(count: int, of: int = 1) -> TensorDataset:
    return TensorDataset(*(tensor[: count - count % of] for tensor in DATA.tensors))


def shuffled() -> DataLoader[Any]:
    return DataLoader(DATA, SIZE, shuffle=True)


def every(epochs: int, count: int = COUNT) -> Seen:
    return Seen((epoch, k) for epoch in range(epochs) for k in range(count))


def gathered(seen: Seen) -> Seen:
    return sum(WORLD.allgather(seen), Seen())


def weights(module: nn.Module) -> np.ndarray:
    return np.concatenate([p.detach().double().numpy().ravel() for p in module.parameters()])


def close(one: nn.Module, other: nn.Module, within: float = 1e-6) -> bool:
    return np.allclose(weights(one), weights(other), 0, within)


def alike(values: Any) -> bool:
    return all(np.array_equal(values, other) for other in WORLD.allgather(values))


def check_fit(mode: str, folder: Path) -> None:
    """Fit, validate and test, with a checkpoint: all are alike on every rank."""
    notes, best = Notes(), ModelCheckpoint(folder / mode, monitor="val_loss", save_last=True)
    module = Classes(1000)
    module.net[0].bias.data += WORLD.rank  # of other numbers on each rank
    before, held_out = weights(module), DataLoader(DATA, 2 * SIZE)
    late = LambdaCallback(on_train_batch_start=come_late)
    trainer = make(mode, folder / f"run-{mode}", callbacks=[notes, best, late])
    trainer.fit(module, shuffled(), held_out)
    ranks = WORLD.allgather((trainer.global_rank, trainer.is_global_zero))
    assert sorted(rank for rank, _ in ranks) == list(range(WORLD.size))
    assert sum(zero for _, zero in ranks) == 1
    assert trainer.world_size == WORLD.size - (mode in ("async", "ssp"))
    assert gathered(notes.samples) == every(EPOCHS)
    assert alike(weights(module))
    assert not np.array_equal(weights(module), before)
    assert trainer.current_epoch == EPOCHS
    assert alike(best.best_model_path)
    assert alike(float(trainer.callback_metrics["val_loss"]))
    assert alike(weights(Classes.load_from_checkpoint(best.last_model_path, steps=1000)))
    told = trainer.validate(module, held_out, verbose=False)
    assert told == trainer.test(module, held_out, verbose=False)
    assert alike(told[0]["val_loss"])
    x, k = (whole := first(96)).tensors  # a metric of torchmetrics is that over all workers
    told = trainer.validate(module, DataLoader(whole, 11), verbose=False)
    assert abs(told[0]["accuracy"] - (module(x).argmax(1) == k % 2).double().mean()) < 1e-6


def check_equal(folder: Path) -> None:
    """In sync all workers make the steps that one Trainer makes of all their samples."""
    data = first(COUNT, 2 * WORLD.size)
    for batches, manual in ((1, False), (2, False), (1, True)):
        clip = None if manual else 0.3
        alone, ours = Classes(6, manual), Classes(6, manual)
        plain(alone, data, gradient_clip_val=clip)
        more = {**DOUBLE, "gradient_clip_val": clip, "accumulate_grad_batches": batches}
        trainer = make("sync", folder / f"equal-{batches}-{manual}", max_epochs=6, **more)
        trainer.fit(ours, DataLoader(data, len(data) // WORLD.size // batches))
        assert trainer.global_step == 6
        assert close(ours, alone), (batches, manual)
        assert trainer.gradient_clip_val == clip


def check_account(
    mode: str, out: Path, stop: lightning.Callback, epochs: int = 50
) -> lightning.Trainer:
    """A run whose Trainer stops counts what was trained, and goes on with the rest."""
    notes, loaders = Notes(), (shuffled(), DataLoader(DATA, 64))
    trainer = make(mode, out, callbacks=[notes, stop], max_epochs=epochs)
    trainer.fit(Classes(1000), *loaders)
    counted = trainer.strategy.result.summary["samples"]
    assert counted == WORLD.allreduce(notes.samples.total()), (mode, counted)
    # In async a worker that got few batches stops late.
    whole = max(4, counted // COUNT + 1) if mode == "async" else 4
    again = make(mode, out, {"resume": "auto"}, callbacks=[notes], max_epochs=whole)
    again.fit(Classes(1000), *loaders)
    assert gathered(notes.samples) == every(whole), mode
    return trainer


def check_ends(folder: Path) -> None:
    """A Trainer stops early, or after so many steps."""
    for mode in ("sync", "async"):
        stop = EarlyStopping("val_loss", patience=0, min_delta=9.0)
        trainer = check_account(mode, folder / f"early-{mode}", stop)
        most = 3 if mode == "sync" else 49  # others go on until worker 0 stops
        assert 2 <= trainer.current_epoch <= most, (mode, trainer.current_epoch)
        assert alike(trainer.current_epoch)
        assert stop.stopped_epoch or WORLD.rank
        left = "local_sgd" if mode == "sync" else mode
        stop = LambdaCallback(on_train_batch_end=leave)
        check_account(left, folder / f"left-{mode}", stop, epochs=-1)
        trainer = make(mode, folder / f"steps-{mode}", max_epochs=-1, max_steps=8)
        trainer.fit(Classes(1000), shuffled())
        steps = WORLD.allgather(trainer.global_step)
        assert (mode == "async" and max(steps) >= 8) or steps == [8] * WORLD.size, (mode, steps)
        assert trainer.max_steps == 8
    stop = LambdaCallback(on_train_batch_end=leave_alone)
    trainer = make("async", folder / "one", callbacks=[stop], max_epochs=-1)
    trainer.fit(Classes(1000), shuffled())
    assert trainer.should_stop == trainer.strategy.ranks.works


def check_resumed(folder: Path) -> None:
    """A signal ends the job with 85; resumed, each sample comes once an epoch."""
    for mode in ("sync", "async"):
        notes, last = Notes(), ModelCheckpoint(folder / f"last-{mode}", save_last=True)
        out, options = folder / f"resumed-{mode}", {"checkpoint_every": 0, "resume": "auto"}
        ends = LambdaCallback(on_train_batch_end=ask_to_end)
        trainer = make(mode, out, options, callbacks=[notes, last, ends])
        with pytest.raises(SystemExit) as ended:
            trainer.fit(Classes(100), shuffled())
        assert ended.value.code == 85
        trainer = make(mode, out, options, callbacks=[notes, last])
        trainer.fit(Classes(100), shuffled(), ckpt_path="last" if mode == "sync" else None)
        samples = gathered(notes.samples)
        assert samples == every(EPOCHS), (mode, samples - every(EPOCHS), every(EPOCHS) - samples)
        if mode == "sync":
            updates = trainer.strategy.result.summary["global_step"]
            assert trainer.global_step == updates
            assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == updates


class Apart(Classes):
    """Has a frozen parameter, and its groups in an order of its own."""

    def configure_optimizers(self) -> Any:
        first, _, last = self.net
        last.bias.requires_grad_(False)
        rest = [first.weight, first.bias]
        groups = [{"params": [last.weight, last.bias], "lr": 0.01}, {"params": rest}]
        return torch.optim.AdamW(groups, 0.02, weight_decay=0.1)


def check_continued(folder: Path) -> None:
    """A checkpoint of plain Lightning goes on, with its optimizer's state; and the other way."""
    data = first(COUNT, WORLD.size)
    for kind in (Classes, Apart):
        for limit in ("max_epochs", "max_steps"):
            whole, ours, back = kind(6), kind(6), kind(6)
            plain(whole, data)
            half, path = plain(kind(6), data, 3), WORLD.bcast(str(folder / "half.ckpt"))
            if WORLD.rank == 0:
                half.save_checkpoint(path)
            WORLD.barrier()
            name = f"continued-{kind.__name__}-{limit}"
            trainer = make("sync", folder / name, **{"max_epochs": -1, limit: 6}, **DOUBLE)
            loader = DataLoader(data, len(data) // WORLD.size)
            trainer.fit(ours, loader, ckpt_path=path)
            assert trainer.current_epoch == trainer.global_step == 6
            assert close(ours, whole), name
    trainer.save_checkpoint(folder / "ours.ckpt")
    WORLD.barrier()
    assert plain(back, data, path=folder / "ours.ckpt").current_epoch == 6
    assert close(back, ours)
    trainer = make("sync", folder / "none", max_epochs=-1, max_steps=3)
    with pytest.raises(UserError, match=r"fit\(\) of max_steps=3, behind 3 steps"):
        trainer.fit(kind(6), loader, ckpt_path=path)


class Plateau(Classes):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [{"scheduler": schedule, "monitor": "train_loss"}]


def check_plateau(folder: Path) -> None:
    """A run with a scheduler that needs metrics goes on."""
    for epochs in (1, 2):
        trainer = make("sync", folder / "plateau", {"resume": "auto"}, max_epochs=epochs)
        trainer.fit(Plateau(9), shuffled())
        assert trainer.current_epoch == epochs


class Chained(Classes):
    """Steps a chain of schedulers by a hook of its own; has a sparse buffer."""

    def __init__(self, rank: int) -> None:
        super().__init__(9)
        self.register_buffer("graph", (rank * torch.eye(2)).to_sparse())
        self.stepped = 0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        parts = [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.9)]
        schedule = lr_scheduler.ChainedScheduler(parts)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        self.stepped += 1
        super().lr_scheduler_step(scheduler, metric)


def check_steps(folder: Path) -> None:
    """Steps of two batches, of a share of the data: a schedule counts them in each mode.

    A worker has 3 of its 5 batches, so that an epoch's second step has one batch alone.
    """
    for mode in ("sync", "local_sgd"):
        notes, module = Notes(), Chained(WORLD.rank)
        more = {"limit_train_batches": 0.7, "accumulate_grad_batches": 2, "callbacks": [notes]}
        trainer = make(mode, folder / f"stepped-{mode}", **more)
        assert trainer.strategy.broadcast(WORLD.rank) == 0, "before a fit, as for log_dir"
        trainer.fit(module, shuffled())
        assert trainer.global_step == module.stepped == 2 * EPOCHS, mode
        samples = {sample for _, sample in gathered(notes.samples)}
        assert len(samples) == 3 * SIZE * WORLD.size
        assert max(samples) >= len(samples), "they are random ones"
        assert alike(module.graph.to_dense().numpy())
    trainer = make("sync", folder / "more", max_epochs=-1, max_steps=3)
    for steps in (3, 7):
        trainer.fit_loop.epoch_loop.max_steps = steps
        trainer.fit(Classes(9), shuffled())
        assert trainer.global_step == steps
        WORLD.barrier()
        if WORLD.rank == 0:
            (folder / "more").rename(folder / f"more-{steps}")
        WORLD.barrier()


def check_uneven(folder: Path) -> None:
    """In an epoch's last round some workers have fewer batches, or none: nobody waits for them."""
    seldom = {"val_check_interval": 2, "check_val_every_n_epoch": None}
    cases = (6, 1, 1, {}), (9, 2, 2, {}), (6, 1, 2, {}), (9, 1, 2, seldom)
    for case, (more_than, batches, steps, given) in enumerate(cases):
        count = more_than * WORLD.size + 1
        notes, by_steps = Notes(), {"every_n_train_steps": steps}
        saved = {"monitor": "val_loss", "save_top_k": 2} if given else by_steps
        saves = ModelCheckpoint(folder / f"saves-{case}", **saved)
        more = {"callbacks": [notes, saves], "accumulate_grad_batches": batches, **given}
        trainer = make("sync", folder / f"uneven-{case}", **more)
        trainer.fit(Classes(1000), DataLoader(first(count), 3), DataLoader(DATA, 64))
        assert gathered(notes.samples) == every(EPOCHS, count)
        assert alike(np.array(trainer.global_step))


class Odd(Classes):
    def __init__(self, *optimizers: Any) -> None:
        super().__init__(9, manual=len(optimizers) > 1)
        self.made = optimizers

    def configure_optimizers(self) -> Any:
        return [make(self.parameters(), 0.1) for make in self.made], []


def check_refused(folder: Path) -> None:
    """What cannot be is an error on every rank, in Python's words; nothing has begun."""
    sgd, rprop, loader = torch.optim.SGD, torch.optim.Rprop, DataLoader(DATA, SIZE)
    weighted = DataLoader(DATA, SIZE, sampler=WeightedRandomSampler([1.0] * COUNT, COUNT))
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    averages = StochasticWeightAveraging(0.1)
    clipped = {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}

    def fit(module: Any, data: Any, more: dict[str, Any]) -> None:
        if module is None:
            mpips.lightning.Strategy("sync", **more)
        make("sync", folder / "refused", **more).fit(module, data)

    for words, *given in (
        ("returns SGD and SGD, expected one optimizer", Odd(sgd, sgd), loader, {}),
        ("returns torch.optim.Rprop, expected one of torch.optim.SGD", Odd(rprop), loader, {}),
        ("sampler=WeightedRandomSampler", Classes(9), weighted, {}),
        ("gradient_clip_algorithm='value'", Classes(9), loader, clipped),
        ("sync_batchnorm=True", Classes(9), loader, {"sync_batchnorm": True}),
        ("a StochasticWeightAveraging", Classes(9), loader, {"callbacks": [averages]}),
        ("a LearningRateFinder", Classes(9), loader, {"callbacks": [LearningRateFinder()]}),
        ("limit_train_batches=0", Classes(9), loader, {"limit_train_batches": 0}),
        ("precision='16-mixed'", Classes(9), loader, {"plugins": [scaled]}),
        ("epochs= to the strategy, expected it in Trainer(max_epochs=)", None, None, {"epochs": 3}),
        ("option 'server'", None, None, {"server": 1}),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            fit(*given)
        WORLD.barrier()


def check_rates(folder: Path) -> None:
    """Groups that began alike, and so are one group of the run, have one rate."""
    one, other = (nn.Parameter(torch.zeros(2)) for _ in range(2))
    given = torch.optim.SGD([{"params": [one]}, {"params": [other]}], 0.1)
    ours = mt.Optimizer([{"params": [one, other], "lr": 0.1}], print, print)
    rates = Rates(given, ours)
    for lr in (0.1, 0.2):
        given.param_groups[1]["lr"] = lr
        if lr == 0.2:
            with pytest.raises(UserError, match=r"rates \[0.1, 0.2\] of parameter groups"):
                rates.set()
        given.param_groups[0]["lr"] = lr
        rates.set()
        assert ours.param_groups[0]["lr"] == lr


def check_precisions(folder: Path) -> None:
    """Fit in bfloat16, by autocast and by a module that is all of it."""
    for precision, dtype in (("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)):
        module = Classes(99)
        make("async", folder / precision, precision=precision).fit(module, DataLoader(DATA, SIZE))
        assert module.net[0].weight.dtype == dtype
        assert alike(weights(module))


def check_fabric(folder: Path) -> None:
    """A loop of Fabric: each sample once an epoch; in sync as one process of all samples."""
    data = first(COUNT, WORLD.size)

    def main(fabric: Any, size: int, module: Classes, kept: Seen) -> str:
        model, optimizer = fabric.setup(module, module.configure_optimizers()[0][0])
        loader = fabric.setup_dataloaders(DataLoader(data, size))
        for epoch in range(EPOCHS):
            for x, k in loader:
                optimizer.zero_grad()
                fabric.backward(F.cross_entropy(model(x), k % 2))
                optimizer.step()
                kept.update((epoch, int(sample)) for sample in k)
        return "done"

    alone = Classes(8).double()
    main(lightning.Fabric(accelerator="cpu", devices=1), len(data), alone, Seen())
    for mode, options in (("sync", {}), ("async", {"servers": 1})):
        out, module, kept = str(folder / f"fabric-{mode}"), Classes(8).double(), Seen()
        strategy = mpips.lightning.FabricStrategy(mode, epochs=EPOCHS, out=out, **options)
        fabric = lightning.Fabric(strategy=strategy, accelerator="cpu")
        told = fabric.launch(main, len(data) // WORLD.size, module, kept)
        assert told == ("done" if fabric.global_rank < fabric.world_size else None)
        assert gathered(kept) == every(EPOCHS, len(data)), mode
        assert alike(weights(module))
        assert mode != "sync" or close(module, alone, 1e-12)
    with pytest.raises(UserError, match="a loop of Fabric without a run"):
        fabric.launch(lambda fabric: next(iter(fabric.setup_dataloaders(shuffled()))))


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    for mode in ("async", "sync", "local_sgd"):
        check_fit(mode, folder)
    for check in (
        check_equal, check_ends, check_resumed, check_continued, check_plateau, check_steps,
        check_uneven, check_refused, check_rates, check_precisions, check_fabric,
    ):  # fmt: skip
        check(folder)
