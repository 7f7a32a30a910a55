r"""A convolutional net in PyTorch learns which figure is on an image.

    python jobs/images_torch.py figures
    mpirun -n 3 python -m mpips.train --problem jobs/images_torch.py:Net --lr 2e-3 \
        --batch-size 64 --epochs 3 --dataset 'figures/*.tar'

The first line makes 20,000 images of 32 x 32 in 50 tar files (59 MB), in some 20 s; the second
trains on them, a fifth of which is held out: expect 99 % accuracy there. --alone is plain PyTorch
in one process on the same files.
"""

import argparse
import io
import tarfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import nn
from torch.nn import functional as F

FIGURES = ("disc", "ring", "square", "triangle", "cross")
SIDE, SAMPLES, FILES, BATCH, RATE = 32, 20_000, 50, 64, 2e-3


class Net(nn.Module):
    """Three convolutions, a mean over the image, a layer; 25,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((3, 16), (16, 32), (32, 64))
        self.layers = nn.ModuleList(nn.Conv2d(a, b, 3, stride=2, padding=1) for a, b in sizes)
        self.last = nn.Linear(64 * 16, len(FIGURES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (n, 5), of images of shape (n, 32, 32, 3)."""
        x = x.permute(0, 3, 1, 2) - 0.5
        for layer in self.layers:
            x = F.relu(layer(x))
        return self.last(x.flatten(1))


def draw(figure: str, rng: np.random.Generator) -> Image.Image:
    """Draw a figure of some size, place and colour on a noisy ground."""
    low, high = rng.integers(0, 100, 3), rng.integers(150, 256, 3)
    ground, colour = (low, high) if rng.random() < 0.5 else (high, low)
    noise = rng.normal(0, 20, (SIDE, SIDE, 3))
    image = Image.fromarray(np.clip(ground + noise, 0, 255).astype("u1"))
    size = int(rng.integers(12, 24))
    x, y = rng.integers(0, SIDE - size, 2).tolist()
    box, fill, pen = (x, y, x + size, y + size), tuple(map(int, colour)), ImageDraw.Draw(image)
    third = size // 3
    if figure == "disc":
        pen.ellipse(box, fill)
    elif figure == "ring":
        pen.ellipse(box, outline=fill, width=3)
    elif figure == "square":
        pen.rectangle(box, fill)
    elif figure == "triangle":
        pen.polygon([(x, y + size), (x + size, y + size), (x + size // 2, y)], fill)
    else:
        pen.rectangle((x + third, y, x + 2 * third, y + size), fill)
        pen.rectangle((x, y + third, x + size, y + 2 * third), fill)
    return image


def make(folder: Path, samples: int, files: int) -> None:
    """Write images and their classes, mixed, into tar files."""
    rng = np.random.default_rng(0)
    folder.mkdir(parents=True, exist_ok=True)
    for part, numbers in enumerate(np.array_split(np.arange(samples), files)):
        with tarfile.open(folder / f"train-{part:02d}.tar", "w") as file:
            for k in numbers.tolist():
                label, data = int(rng.integers(len(FIGURES))), io.BytesIO()
                draw(FIGURES[label], rng).save(data, "jpeg", quality=90)
                for suffix, content in (("jpg", data.getvalue()), ("cls", b"%d" % label)):
                    member = tarfile.TarInfo(f"{k:05d}.{suffix}")
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))


def read(folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all images, uint8, and their classes."""
    images, labels = [], []
    for path in sorted(folder.glob("train-*.tar")):
        with tarfile.open(path) as file:
            for member in file:
                content = file.extractfile(member).read()
                if member.name.endswith("cls"):
                    labels.append(int(content))
                else:
                    images.append(np.asarray(Image.open(io.BytesIO(content))))
    return torch.from_numpy(np.stack(images)), torch.tensor(labels)


def alone(folder: Path, epochs: int) -> float:
    """Train in one process of plain PyTorch; returns the held-out accuracy."""
    torch.manual_seed(0)
    (x, y), model = read(folder), Net()
    n, opt = len(x) * 4 // 5, torch.optim.Adam(model.parameters(), RATE)
    for _ in range(epochs):
        for some in torch.randperm(n).split(BATCH):
            opt.zero_grad()
            F.cross_entropy(model(x[some].float() / 255), y[some]).backward()
            opt.step()
    with torch.no_grad():
        found = [model(part.float() / 255).argmax(1) for part in x[n:].split(1000)]
    return float((torch.cat(found) == y[n:]).float().mean())


def main() -> None:
    """Make the files, or train in one process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, help="where the files are, or will be")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--files", type=int, default=FILES)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--alone", action="store_true", help="plain PyTorch in one process")
    args = parser.parse_args()
    if args.alone:
        print(f"alone: accuracy {alone(args.folder, args.epochs):.4f}", flush=True)
    else:
        make(args.folder, args.samples, args.files)


if __name__ == "__main__":
    main()
