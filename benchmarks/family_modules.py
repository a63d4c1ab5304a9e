"""Modules of one's own, each with samples: what people write who use no library of models."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

RNG = np.random.default_rng(0)
COUNT = 120
WORDS = 50
Arrays = Mapping[str, np.ndarray[Any, Any]]


class Perceptron(nn.Module):
    """Three linear layers, with normalization of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class Unet(nn.Module):
    """Two levels, with a skip connection."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.middle = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU())
        self.up = nn.ConvTranspose2d(32, 16, 2, stride=2)
        self.out = nn.Sequential(nn.Conv2d(32, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 2, 1))

    def forward(self, image: Tensor) -> Tensor:
        seen = self.down(image)
        found: Tensor = self.out(torch.cat([seen, self.up(self.middle(seen))], dim=1))
        return found


class Tagger(nn.Module):
    """A bidirectional LSTM over the ids of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, 16)
        self.lstm = nn.LSTM(16, 24, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 5)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.lstm(self.words(ids))[0])
        return found


class Forecaster(nn.Module):
    """A GRU over a series; its last state gives the next value."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(3, 32, num_layers=2, batch_first=True)
        self.head = nn.Linear(32, 1)

    def forward(self, series: Tensor) -> Tensor:
        found: Tensor = self.head(self.gru(series)[0][:, -1])
        return found


class Recommender(nn.Module):
    """A DLRM: bags of categories and numbers, their products, and a perceptron over them."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 16, mode="mean")
        self.item = nn.Embedding(WORDS, 16)
        self.bottom = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
        self.top = nn.Sequential(nn.Linear(19, 32), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, numbers: Tensor, bag: Tensor, item: Tensor) -> Tensor:
        found = self.bottom(numbers)
        parts = [found, self.bag(bag), self.item(item)]
        products = [(parts[i] * parts[j]).sum(dim=1, keepdim=True) for i in range(3) for j in range(i)]
        score: Tensor = self.top(torch.cat([found, *products], dim=1))
        return score


class Matcher(nn.Module):
    """Two inputs of different shapes, and two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.image = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.words = nn.Linear(10, 8)

    def forward(self, image: Tensor, words: Tensor) -> dict[str, Tensor]:
        left, right = self.image(image), self.words(words)
        return {"score": functional.cosine_similarity(left, right), "joint": torch.cat([left, right], dim=1)}


class Waves(nn.Module):
    """Convolutions over a signal, dilated, with group normalization."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv1d(1, 16, 7, stride=2, padding=3), nn.GroupNorm(4, 16), nn.SiLU(),
            nn.Conv1d(16, 32, 5, dilation=2, padding=4), nn.BatchNorm1d(32), nn.ReLU(),
        )  # fmt: skip
        self.head = nn.Linear(32, 4)

    def forward(self, signal: Tensor) -> Tensor:
        found: Tensor = self.head(self.layers(signal).mean(dim=2))
        return found


class Encoder(nn.Module):
    """A transformer of torch.nn."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, 32), nn.Parameter(torch.randn(1, 64, 32) * 0.1)
        block = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        self.encoder = nn.TransformerEncoder(block, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, 4)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.head(self.encoder(self.words(ids) + self.places[:, : ids.shape[1]]).mean(dim=1))
        return found


class Messages(nn.Module):
    """Two rounds of messages along the edges of a graph: each node takes the sum of its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 32), nn.Linear(32, 32), nn.Linear(32, 3)

    def forward(self, nodes: Tensor, sources: Tensor, targets: Tensor) -> Tensor:
        for layer in (self.first, self.second):
            said = layer(nodes).relu()
            index = sources.unsqueeze(-1).expand(-1, -1, said.shape[-1])
            into = targets.unsqueeze(-1).expand(-1, -1, said.shape[-1])
            nodes = said + torch.zeros_like(said).scatter_add(1, into, said.gather(1, index))
        found: Tensor = self.head(nodes.mean(dim=1))
        return found


class Mixture(nn.Module):
    """Four experts and a gate; each sample goes through the expert that the gate prefers, by torch.cond-free choice."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 3)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        chosen = self.gate(x).argmax(dim=1)
        answers = torch.stack([expert(x) for expert in self.experts], dim=1)
        return answers[torch.arange(x.shape[0]), chosen]


class Branching(nn.Module):
    """Control flow that depends on the values of the input, which a graph cannot hold."""

    def __init__(self) -> None:
        super().__init__()
        self.small, self.large = nn.Linear(12, 3), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        if x.abs().max() > 3:
            found: Tensor = self.large(x)
            return found
        return self.small(x)  # type: ignore[no-any-return]


class Autoencoder(nn.Module):
    """Convolutions down to a code, and transposed ones back."""

    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Sequential(nn.Conv2d(1, 16, 4, 2, 1), nn.LeakyReLU(), nn.Conv2d(16, 32, 4, 2, 1), nn.Tanh())
        self.decode = nn.Sequential(
            nn.ConvTranspose2d(32, 16, 4, 2, 1), nn.LeakyReLU(), nn.ConvTranspose2d(16, 1, 4, 2, 1), nn.Sigmoid()
        )

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        code = self.encode(image)
        return self.decode(code), code.flatten(1)


def draw(*shape: int) -> np.ndarray[Any, Any]:
    """Normally distributed samples."""
    return RNG.standard_normal((COUNT, *shape)).astype(np.float32)


def choose(high: int, *shape: int) -> np.ndarray[Any, Any]:
    """Whole numbers below `high`."""
    return RNG.integers(0, high, (COUNT, *shape))


MODULES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Arrays]]] = {
    "perceptron": (Perceptron, lambda: {"x": draw(20)}),
    "U-Net": (Unet, lambda: {"image": draw(3, 32, 32)}),
    "LSTM tagger": (Tagger, lambda: {"ids": choose(WORDS, 12)}),
    "GRU forecaster": (Forecaster, lambda: {"series": draw(20, 3)}),
    "DLRM": (Recommender, lambda: {"numbers": draw(8), "bag": choose(WORDS, 6), "item": choose(WORDS)}),
    "two inputs": (Matcher, lambda: {"image": draw(3, 16, 16), "words": draw(10)}),
    "1-D convolutions": (Waves, lambda: {"signal": draw(1, 128)}),
    "torch.nn transformer": (Encoder, lambda: {"ids": choose(WORDS, 16)}),
    "graph network": (
        Messages, lambda: {"nodes": draw(10, 8), "sources": choose(10, 20), "targets": choose(10, 20)}
    ),
    "mixture of experts": (Mixture, lambda: {"x": draw(12)}),
    "autoencoder": (Autoencoder, lambda: {"image": draw(1, 32, 32)}),
    "branching": (Branching, lambda: {"x": draw(12)}),
}  # fmt: skip
"""By name, a module and its samples. The last one cannot be captured, and is to be refused."""
