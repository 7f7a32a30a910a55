"""Fits of Lightning's Trainer by mpips' strategy: what every rank has seen, checked on each."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from mpi4py import MPI
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import mpips.lightning

WORLD = MPI.COMM_WORLD
COUNT, EPOCHS, SIZE = 103, 3, 8
pixels = torch.rand(COUNT, 1, 6, 6, generator=torch.Generator().manual_seed(0))
DATA = TensorDataset(pixels, torch.arange(COUNT))


class LitAutoEncoder(lightning.LightningModule):
    """Lightning's own first example, on smaller images, and its validation."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(36, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 36))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss of a batch."""
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, on_epoch=True, sync_dist=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the loss of a batch."""
        x, _ = batch
        x = x.view(x.size(0), -1)
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x), sync_dist=True)

    test_step = validation_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters(), lr=1e-2)


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
    module = LitAutoEncoder()  # of other numbers on each rank
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
    plain = LitAutoEncoder.load_from_checkpoint(best.last_model_path)
    assert alike(weights(plain))
    told = trainer.validate(module, loaders[1], verbose=False)
    assert told == trainer.test(module, loaders[1], verbose=False)
    assert alike(told[0]["val_loss"])
    assert told[0]["val_loss"] < 0.2
    x = pixels.view(COUNT, -1)
    padded = F.mse_loss(module.decoder(module.encoder(x)), x).item()
    assert abs(told[0]["val_loss"] - padded) < 0.02
    lines = (Path(log.log_dir) / "metrics.csv").read_text().splitlines()
    assert "val_loss" in lines[0]
    assert len(lines) > EPOCHS
    WORLD.barrier()


def main() -> None:
    """Do the checks that are named."""
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        check_fit(name, folder)
    print(f"rank {WORLD.rank}: {len(sys.argv) - 2} fits", flush=True)


main()
