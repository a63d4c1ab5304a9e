"""A small convolutional network that reads handwritten digits, trained in seconds, and its data."""

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from sklearn.datasets import load_digits
from torch import Tensor, nn

from laconic.tensor import TensorSpec

IMAGE = TensorSpec(name="image", dtype="float32", shape=("batch", 1, 8, 8))


class DigitsNet(nn.Module):
    """[batch, 1, 8, 8] to [batch, 10]; 98 % right after training."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.inputs = (IMAGE,)
        self.stem = nn.Sequential(nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        self.body = nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
        self.wide = nn.Sequential(nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.ReLU())
        self.head = nn.Linear(2 * width * 16, 10)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        x = self.wide((x + self.body(x)).relu())
        return self.head(x.flatten(1))


def samples() -> tuple[np.ndarray, np.ndarray]:
    """Images [1797, 1, 8, 8] float32 in 0..1, and labels [1797] int64."""
    digits = load_digits()
    return (digits.images[:, None] / 16).astype(np.float32), digits.target.astype(np.int64)


def write(folder: Path) -> tuple[Path, Path]:
    """Train; the weights, and the samples that training has not seen, with labels."""
    images, labels = samples()
    seen = 1000
    torch.manual_seed(0)
    model = DigitsNet().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    x, y = torch.from_numpy(images[:seen]), torch.from_numpy(labels[:seen])
    for _ in range(6):
        for rows in torch.randperm(seen).split(40):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
    weights, data = folder / "digits.safetensors", folder / "digits.npz"
    save_file(model.state_dict(), weights)
    np.savez(data, image=images[seen:], label=labels[seen:])
    return weights, data
