"""Fits of Lightning's Trainer by mpips' strategy: what every rank has seen, checked on each."""

import os
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.plugins.precision import MixedPrecision
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

import mpips.lightning
from mpips.errors import UserError

WORLD = MPI.COMM_WORLD
COUNT, EPOCHS, SIZE = 103, 3, 8
pixels = torch.rand(COUNT, 1, 6, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(pixels, torch.arange(COUNT))


class Classes(lightning.LightningModule):
    """A classifier in two ways of optimization, with a schedule by steps."""

    def __init__(self, steps: int, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 2))
        self.steps, self.automatic_optimization = steps, not manual
        self.accuracy = torchmetrics.classification.BinaryAccuracy()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a number for each of two classes."""
        return self.net(x.flatten(1).to(self.net[0].weight.dtype))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch; step, if that is not left to Lightning."""
        x, k = batch
        loss = F.cross_entropy(self(x), k % 2)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss, and the accuracy over all workers."""
        x, k = batch
        out = self(x)
        self.accuracy(out.argmax(1), k % 2)
        self.log("accuracy", self.accuracy)
        self.log("val_loss", F.cross_entropy(out, k % 2), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> Any:
        """Return the optimizer, whose bias has no decay, and its schedule."""
        named = dict(self.named_parameters())
        groups = [
            {"params": [p for name, p in named.items() if name.endswith("weight")]},
            {"params": [p for name, p in named.items() if name.endswith("bias")], "lr": 0.01},
        ]
        groups[1]["weight_decay"] = 0.0
        optimizer = torch.optim.AdamW(groups, 0.02, weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.OneCycleLR(
            optimizer, [0.2, 0.1], total_steps=self.steps, cycle_momentum=False
        )
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Seen(lightning.Callback):
    """Notes which samples this rank has trained on in which epoch."""

    def __init__(self) -> None:
        self.samples = Counter[tuple[int, int]]()

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        """Note those of the batch, which comes before its number."""
        self.samples.update((trainer.current_epoch, int(sample)) for sample in given[-2][-1])


def make(mode: str, out: Path, **more: Any) -> lightning.Trainer:
    """Return a Trainer of all ranks."""
    servers = {"servers": 1} if mode in ("async", "ssp") else {}
    given = {"max_epochs": EPOCHS, "log_every_n_steps": 2, **more}
    options = {"out": str(out), "eval_every": 0, **servers, **given.pop("options", {})}
    return lightning.Trainer(
        strategy=mpips.lightning.Strategy(mode, **options), accelerator="cpu",
        logger=given.pop("logger", False), default_root_dir=str(out.with_suffix(".lightning")),
        enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=any(isinstance(c, ModelCheckpoint) for c in given["callbacks"]),
        **given,
    )  # fmt: skip


def weights(module: nn.Module) -> np.ndarray:
    """Return all parameters as one vector."""
    return np.concatenate([p.detach().double().numpy().ravel() for p in module.parameters()])


def alike(values: Any) -> bool:
    """Whether every rank has the same."""
    return all(np.array_equal(values, other) for other in WORLD.allgather(values))


def check_fit(mode: str, folder: Path) -> None:
    """Fit, validate and test, with a checkpoint and a log: all are alike on every rank."""
    seen, best = Seen(), ModelCheckpoint(folder / mode, monitor="val_loss", save_last=True)
    log = CSVLogger(folder, name=f"log-{mode}")
    trainer = make(mode, folder / f"run-{mode}", callbacks=[seen, best], logger=log)
    module = Classes(1000)
    module.net[0].bias.data += WORLD.rank  # of other numbers on each rank
    before = weights(module)
    loaders = DataLoader(DATA, SIZE, shuffle=True), DataLoader(DATA, 2 * SIZE)
    trainer.fit(module, *loaders)
    found = WORLD.allgather((trainer.global_rank, trainer.is_global_zero, seen.samples))
    assert sorted(rank for rank, _, _ in found) == list(range(WORLD.size))
    assert sum(zero for _, zero, _ in found) == 1
    assert trainer.world_size == WORLD.size - (mode in ("async", "ssp"))
    every = Counter((epoch, k) for epoch in range(EPOCHS) for k in range(COUNT))
    assert sum((samples for _, _, samples in found), Counter[tuple[int, int]]()) == every
    assert alike(weights(module))
    assert not np.array_equal(weights(module), before)
    assert trainer.current_epoch == EPOCHS
    assert alike(best.best_model_path)
    assert alike(float(trainer.callback_metrics["val_loss"]))
    plain = Classes.load_from_checkpoint(best.last_model_path, steps=1000)
    assert alike(weights(plain))
    told = trainer.validate(module, loaders[1], verbose=False)
    assert told == trainer.test(module, loaders[1], verbose=False)
    assert alike(told[0]["val_loss"])
    x, k = DATA.tensors
    padded = F.cross_entropy(module(x), k % 2).item()
    assert abs(told[0]["val_loss"] - padded) < 0.02
    lines = (Path(log.log_dir) / "metrics.csv").read_text().splitlines()
    assert "val_loss" in lines[0]
    assert len(lines) > EPOCHS
    WORLD.barrier()


def plain_trainer(**more: Any) -> lightning.Trainer:
    """Return a Trainer of this rank alone."""
    given = {"accelerator": "cpu", "devices": 1, "logger": False, "enable_progress_bar": False}
    given |= {"enable_model_summary": False, "enable_checkpointing": False}
    return lightning.Trainer(**given, **more)


def check_equal(folder: Path) -> None:
    """In sync all workers make the steps that one Trainer makes of all their samples."""
    count = COUNT - COUNT % (2 * WORLD.size)
    data = TensorDataset(*(tensor[:count] for tensor in DATA.tensors))
    for batches, manual in ((1, False), (2, False), (1, True)):
        more: dict[str, Any] = {"precision": "64-true", "max_epochs": 6}
        if not manual:
            more["gradient_clip_val"] = 0.3
        plain = Classes(6, manual)
        alone = plain_trainer(**more)
        alone.fit(plain, DataLoader(data, count))
        ours = Classes(6, manual)
        more["accumulate_grad_batches"] = batches
        trainer = make("sync", folder / f"equal-{batches}-{manual}", callbacks=[], **more)
        trainer.fit(ours, DataLoader(data, count // WORLD.size // batches))
        assert trainer.global_step == alone.global_step == 6
        assert np.allclose(weights(ours), weights(plain), 0, 1e-6), (batches, manual)
        assert trainer.gradient_clip_val == more.get("gradient_clip_val")


def check_accuracy(folder: Path) -> None:
    """A metric of torchmetrics is that over all workers: its state is gathered."""
    module = Classes(6)
    data = TensorDataset(*(tensor[:96] for tensor in DATA.tensors))
    found = make("async", folder / "accuracy", callbacks=[]).validate(
        module, DataLoader(data, 11), verbose=False
    )
    x, k = data.tensors
    mean = (module(x).argmax(1) == k % 2).double().mean()
    assert abs(found[0]["accuracy"] - mean) < 1e-6


class Leave(lightning.Callback):
    """Has the Trainer leave its loop within a pass; in sync on every worker in the same step."""

    def __init__(self, one: bool = False) -> None:
        self.one = one  # whether worker 0 alone asks; others clear the request of the run's end

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        """Leave."""
        here = trainer.is_global_zero if self.one else given[-1] >= 1
        trainer.should_stop = trainer.current_epoch >= 1 and here


def check_account(
    mode: str, out: Path, stop: lightning.Callback, epochs: int = 50
) -> lightning.Trainer:
    """A run whose Trainer stops counts what was trained, and goes on with the rest."""
    seen, loaders = Seen(), (DataLoader(DATA, SIZE, shuffle=True), DataLoader(DATA, 64))
    trainer = make(mode, out, callbacks=[seen, stop], max_epochs=epochs)
    trainer.fit(Classes(1000), *loaders)
    counted = trainer.strategy.result.summary["samples"]
    assert counted == WORLD.allreduce(seen.samples.total()), (mode, counted)
    whole = 4
    if mode == "async":  # a worker that got few batches stops late
        whole = max(4, counted // COUNT + 1)
    more: dict[str, Any] = {"max_epochs": whole, "options": {"resume": "auto"}}
    again = make(mode, out, callbacks=[seen], **more)
    again.fit(Classes(1000), *loaders)
    samples = sum(WORLD.allgather(seen.samples), Counter[tuple[int, int]]())
    assert samples == Counter((epoch, k) for epoch in range(whole) for k in range(COUNT)), mode
    return trainer


def check_ends(folder: Path) -> None:
    """A Trainer stops early, or after so many steps."""
    for mode in ("sync", "async"):
        stop = EarlyStopping("val_loss", patience=0, min_delta=9.0)
        trainer = check_account(mode, folder / f"early-{mode}", stop)
        assert trainer.current_epoch in (2, 3), (mode, trainer.current_epoch)
        assert stop.stopped_epoch or WORLD.rank
        left = "local_sgd" if mode == "sync" else mode
        check_account(left, folder / f"left-{mode}", Leave(), epochs=-1)
        loader = DataLoader(DATA, SIZE, shuffle=True)
        trainer = make(mode, folder / f"steps-{mode}", callbacks=[], max_epochs=-1, max_steps=8)
        trainer.fit(Classes(1000), loader)
        steps = WORLD.allgather(trainer.global_step)
        assert (mode == "async" and max(steps) >= 8) or steps == [8] * WORLD.size, (mode, steps)
        assert trainer.max_steps == 8
    trainer = make("async", folder / "one", callbacks=[Leave(one=True)], max_epochs=-1)
    trainer.fit(Classes(1000), loader)
    assert trainer.should_stop == trainer.strategy.ranks.works


class Signal(lightning.Callback):
    """Has the whole job asked to save and to end, in a step of worker 0."""

    def on_train_batch_end(self, trainer: Any, *given: Any) -> None:
        """Send the signal."""
        if trainer.is_global_zero and trainer.global_step == 6:
            os.kill(os.getpid(), signal.SIGTERM)


def check_resumed(folder: Path) -> None:
    """A signal ends the job with 85; resumed, each sample comes once an epoch."""
    every = Counter((epoch, k) for epoch in range(EPOCHS) for k in range(COUNT))
    for mode in ("sync", "async"):
        seen, loader = Seen(), DataLoader(DATA, SIZE, shuffle=True)
        last = ModelCheckpoint(folder / f"last-{mode}", save_last=True)
        out, options = folder / f"resumed-{mode}", {"checkpoint_every": 0, "resume": "auto"}
        trainer = make(mode, out, callbacks=[seen, last, Signal()], options=options)
        with pytest.raises(SystemExit) as ended:
            trainer.fit(Classes(100), loader)
        assert ended.value.code == 85
        trainer = make(mode, out, callbacks=[seen, last], options=options)
        module = Classes(100)
        trainer.fit(module, loader, ckpt_path="last" if mode == "sync" else None)
        samples = sum(WORLD.allgather(seen.samples), Counter[tuple[int, int]]())
        assert samples == every, (mode, samples - every, every - samples)
        if mode == "sync":
            updates = trainer.strategy.result.summary["global_step"]
            assert trainer.global_step == updates
            assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == updates


def check_continued(folder: Path) -> None:
    """A checkpoint of plain Lightning goes on, with its optimizer's state; and the other way."""
    count = COUNT - COUNT % WORLD.size
    data = TensorDataset(*(tensor[:count] for tensor in DATA.tensors))
    more: dict[str, Any] = {"precision": "64-true"}
    loaders = DataLoader(data, count), DataLoader(data, count // WORLD.size)
    whole = Classes(6)
    plain_trainer(max_epochs=6, **more).fit(whole, loaders[0])
    half = plain_trainer(max_epochs=3, **more)
    half.fit(Classes(6), loaders[0])
    path = WORLD.bcast(str(folder / "half.ckpt"))
    if WORLD.rank == 0:
        half.save_checkpoint(path)
    WORLD.barrier()
    ours = Classes(6)
    trainer = make("sync", folder / "continued", callbacks=[], max_epochs=6, **more)
    trainer.fit(ours, loaders[1], ckpt_path=path)
    assert trainer.current_epoch == trainer.global_step == 6
    assert np.allclose(weights(ours), weights(whole), 0, 1e-6)
    trainer.save_checkpoint(folder / "ours.ckpt")
    WORLD.barrier()
    back, there = plain_trainer(max_epochs=6, **more), Classes(6)
    back.fit(there, loaders[0], ckpt_path=folder / "ours.ckpt")
    assert back.current_epoch == 6
    assert np.allclose(weights(there), weights(ours), 0, 1e-6)


def check_refused(folder: Path) -> None:
    """What cannot be is an error on every rank, in Python's words; nothing has begun."""
    loader = DataLoader(DATA, SIZE)

    class Odd(Classes):
        def __init__(self, *optimizers: Any) -> None:
            super().__init__(9, manual=len(optimizers) > 1)
            self.made = optimizers

        def configure_optimizers(self) -> Any:
            return [make(self.parameters(), 0.1) for make in self.made], []

    sgd, rprop = torch.optim.SGD, torch.optim.Rprop
    weighted = DataLoader(DATA, SIZE, sampler=WeightedRandomSampler([1.0] * COUNT, COUNT))
    scaled = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu"))
    for words, module, more, data in (
        ("returns SGD and SGD, expected one optimizer", Odd(sgd, sgd), {}, loader),
        ("returns torch.optim.Rprop, expected one of torch.optim.SGD", Odd(rprop), {}, loader),
        ("sampler=WeightedRandomSampler", Classes(9), {}, weighted),
        ("gradient_clip_algorithm='value'", Classes(9),
         {"gradient_clip_val": 1.0, "gradient_clip_algorithm": "value"}, loader),
        ("precision='16-mixed'", Classes(9), {"plugins": [scaled]}, loader),
    ):  # fmt: skip
        trainer = make("sync", folder / "refused", callbacks=[], **more)
        with pytest.raises(UserError, match=re.escape(words)):
            trainer.fit(module, data)
        WORLD.barrier()
    for words, options in (
        ("epochs= to the strategy, expected it in Trainer(max_epochs=)", {"epochs": 3}),
        ("option 'server'", {"server": 1}),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            mpips.lightning.Strategy("sync", **options)
        WORLD.barrier()


def check_precisions(folder: Path) -> None:
    """Fit in bfloat16, by autocast and by a module that is all of it."""
    for precision in ("bf16-mixed", "bf16-true"):
        trainer = make("async", folder / precision, callbacks=[], precision=precision)
        module = Classes(99)
        trainer.fit(module, DataLoader(DATA, SIZE))
        assert module.net[0].weight.dtype == (
            torch.bfloat16 if precision == "bf16-true" else torch.float32
        )
        assert alike(weights(module))


def check_fabric(folder: Path) -> None:
    """A loop of Fabric: each sample once an epoch; in sync as one process of all samples."""
    count = COUNT - COUNT % WORLD.size
    data = TensorDataset(*(tensor[:count] for tensor in DATA.tensors))

    def main(fabric: Any, size: int, kept: list[Any]) -> str:
        module = Classes(8).double()
        optimizer = module.configure_optimizers()[0][0]
        kept.append(module)
        model, optimizer = fabric.setup(module, optimizer)
        loader = fabric.setup_dataloaders(DataLoader(data, size))
        for epoch in range(EPOCHS):
            for x, k in loader:
                optimizer.zero_grad()
                fabric.backward(F.cross_entropy(model(x), k % 2))
                optimizer.step()
                kept.extend((epoch, int(sample)) for sample in k)
        return "done"

    alone = lightning.Fabric(accelerator="cpu", devices=1)
    plain: list[Any] = []
    main(alone, count, plain)
    every = Counter((epoch, k) for epoch in range(EPOCHS) for k in range(count))
    for mode, options in (("sync", {}), ("async", {"servers": 1})):
        strategy = mpips.lightning.FabricStrategy(
            mode, epochs=EPOCHS, out=str(folder / f"fabric-{mode}"), **options
        )
        kept: list[Any] = []
        fabric = lightning.Fabric(strategy=strategy, accelerator="cpu")
        told = fabric.launch(main, count // WORLD.size, kept)
        assert told == ("done" if fabric.global_rank < fabric.world_size else None)
        samples = sum(WORLD.allgather(Counter(kept[1:])), Counter[Any]())
        assert samples == every, mode
        assert alike(weights(kept[0]))
        if mode == "sync":
            assert np.allclose(weights(kept[0]), weights(plain[0]), 0, 1e-12)


CHECKS = {
    "equal": check_equal, "accuracy": check_accuracy, "ends": check_ends,
    "resumed": check_resumed, "continued": check_continued, "refused": check_refused,
    "precisions": check_precisions, "fabric": check_fabric,
}  # fmt: skip


def main() -> None:
    """Do the checks that are named."""
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        CHECKS[name](folder) if name in CHECKS else check_fit(name, folder)
    print(f"rank {WORLD.rank}: {len(sys.argv) - 2} checks", flush=True)


main()
