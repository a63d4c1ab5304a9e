"""The models of the GPU benchmark, as plain modules with random weights: MiniLM, BERT-base, ViT-B/16 and ResNet-50.

They have the shapes of the published models and need PyTorch alone.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode

MASKED = -1e4
"""Added to the attention scores of padding: finite in every float type."""
POSITIONS = 512
"""The longest text."""


class SelfAttention(nn.Module):
    """Multi-head attention. explicit: as two products with a softmax between, the form that engines fuse, instead of
    PyTorch's fused kernel."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.explicit = heads, False
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: [batch, seq, width]. bias: [batch, 1, 1, seq], added to the scores."""
        query, key, value = (
            part(x).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        if self.explicit:
            scores = (query * query.shape[-1] ** -0.5) @ key.transpose(2, 3)
            mixed = (scores if bias is None else scores + bias).softmax(-1) @ value
        else:
            mixed = functional.scaled_dot_product_attention(query, key, value, bias)
        answer: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return answer


class EncoderBlock(nn.Module):
    """A transformer layer, normalized before its parts as ViT, or after them as BERT."""

    def __init__(self, width: int, heads: int, inner: int, *, before: bool) -> None:
        super().__init__()
        self.before = before
        self.attention = SelfAttention(width, heads)
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """[batch, seq, width] to the same."""
        first, second = self.norms
        if self.before:
            x = x + self.attention(first(x), bias)
            return x + self.feed_forward(second(x))
        x = first(x + self.attention(x, bias))
        answer: Tensor = second(x + self.feed_forward(x))
        return answer

    def feed_forward(self, x: Tensor) -> Tensor:
        """Two linear layers with GELU between."""
        answer: Tensor = self.down(functional.gelu(self.up(x)))
        return answer


class TextEncoder(nn.Module):
    """BERT, with the mean of the tokens' vectors as its output."""

    def __init__(self, words: int, width: int, layers: int, heads: int, inner: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(words, width), nn.Embedding(POSITIONS, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, inner, before=False) for _ in range(layers))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Both [batch, seq] int64, to [batch, width]."""
        x = self.norm(self.words(input_ids) + self.positions.weight[: input_ids.shape[1]])
        mask = attention_mask.to(x.dtype)
        bias = ((1 - mask) * MASKED)[:, None, None]
        for block in self.blocks:
            x = block(x, bias)
        answer: Tensor = (x * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)
        return answer


class ImageEncoder(nn.Module):
    """ViT."""

    def __init__(self, side: int, patch: int, width: int, layers: int, heads: int, inner: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.first = nn.Parameter(torch.randn(1, 1, width) * 0.02)
        self.positions = nn.Parameter(torch.randn(1, (side // patch) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads, inner, before=True) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, image: Tensor) -> Tensor:
        """[batch, 3, side, side] to [batch, classes]."""
        x = self.patches(image).flatten(2).transpose(1, 2)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], 1) + self.positions
        for block in self.blocks:
            x = block(x)
        answer: Tensor = self.head(self.norm(x)[:, 0])
        return answer


class Bottleneck(nn.Module):
    """A residual block of three convolutions."""

    def __init__(self, inputs: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.reduce = convolution(inputs, inner, 1)
        self.spatial = convolution(inner, inner, 3, stride)
        self.expand = convolution(inner, outputs, 1)
        # A trained network's activations do not grow with its depth; with the usual random weights these would.
        nn.init.constant_(self.expand.get_parameter("1.weight"), 0.3)
        self.shortcut = nn.Identity() if inputs == outputs else convolution(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, inputs, height, width] to [batch, 4 inner, height / stride, width / stride]."""
        inner = self.spatial(self.reduce(x).relu()).relu()
        answer: Tensor = (self.expand(inner) + self.shortcut(x)).relu()
        return answer


def convolution(inputs: int, outputs: int, size: int, stride: int = 1) -> nn.Sequential:
    """A convolution with batch normalization."""
    layer = nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return nn.Sequential(layer, nn.BatchNorm2d(outputs))


class ResidualNetwork(nn.Module):
    """ResNet with bottleneck blocks."""

    def __init__(self, width: int, depths: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1))
        blocks, inputs = [], width
        for stage, depth in enumerate(depths):
            inner = width * 2**stage
            for number in range(depth):
                blocks.append(Bottleneck(inputs, inner, 2 if stage and not number else 1))
                inputs = 4 * inner
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(inputs, classes)

    def forward(self, image: Tensor) -> Tensor:
        """[batch, 3, side, side] to [batch, classes]."""
        answer: Tensor = self.head(self.blocks(self.stem(image)).mean((2, 3)))
        return answer


@dataclass(frozen=True)
class Network:
    """A model of the benchmark. size: tokens of a text, or pixels of an image's side; words: 0 for images."""

    name: str
    make: Callable[[], nn.Module]
    size: int
    words: int = 0

    def build(self) -> nn.Module:
        """The module in evaluation mode, on the CPU, float32; the same weights each time."""
        torch.manual_seed(0)
        return self.make().eval().requires_grad_(False)

    def make_inputs(self, batch: int, *, size: int = 0, seed: int = 0) -> dict[str, Tensor]:
        """Random inputs on the CPU: texts without padding, or images. size: other than the usual one."""
        generator, size = torch.Generator().manual_seed(seed), size or self.size
        if self.words:
            ids = torch.randint(self.words, (batch, size), generator=generator)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return {"image": torch.randn(batch, 3, size, size, generator=generator)}

    def count_flops(self) -> int:
        """FLOPs of the products and convolutions for one answer; a multiplication with its addition counts as two."""
        with torch.device("meta"):
            module = write_attention_out(self.make().eval())
        inputs = {name: tensor.to("meta") for name, tensor in self.make_inputs(1).items()}
        with torch.inference_mode(), FlopCounterMode(display=False) as counter:
            module(**inputs)
        return int(counter.get_total_flops())


def write_attention_out(module: nn.Module) -> nn.Module:
    """The module, with its attention changed in place to products and a softmax."""
    for part in module.modules():
        if isinstance(part, SelfAttention):
            part.explicit = True
    return module


NETWORKS = (
    Network("MiniLM", partial(TextEncoder, 30522, 384, 6, 12, 1536), 128, 30522),
    Network("BERT-base", partial(TextEncoder, 30522, 768, 12, 12, 3072), 128, 30522),
    Network("ViT-B/16", partial(ImageEncoder, 224, 16, 768, 12, 12, 3072, 1000), 224),
    Network("ResNet-50", partial(ResidualNetwork, 64, (3, 4, 6, 3), 1000), 224),
)
TINY_NETWORKS = (
    Network("tiny MiniLM", partial(TextEncoder, 200, 32, 2, 4, 64), 16, 200),
    Network("tiny BERT", partial(TextEncoder, 200, 48, 1, 4, 96), 16, 200),
    Network("tiny ViT", partial(ImageEncoder, 16, 8, 32, 2, 4, 64, 10), 16),
    Network("tiny ResNet", partial(ResidualNetwork, 8, (1, 1), 10), 32),
)
"""The same architectures for the dry run."""
