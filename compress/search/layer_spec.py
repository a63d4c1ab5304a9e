"""Layer specs: the shapes of a model's layers, on which their latency depends."""

from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

Role = Literal["qkv", "attention-output", "up", "down", "channels", "other"]
"""The role of a layer in its model: query, key or value projection; output projection of attention; up- or
down-projection of the feed-forward network; a convolution, or a layer that reads one; any other."""


@dataclass(frozen=True)
class LayerSpec:
    """The shapes of a layer, or of the attention of a block, which has no weight.

    shape: of the input for one sample, [1, ...]. weight: its shape, [out, in / groups, kernel...]. groups: of a
    convolution; the heads of attention. role: in the model. block: index of the transformer block that it is in. count:
    how many such layers there are; a fraction in a prediction.
    """

    kind: Literal["linear", "conv", "attention"]
    shape: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    role: Role = "other"
    block: int | None = None
    count: float = 1.0

    @property
    def signature(self) -> dict[str, Any]:
        """The fields that its latency depends on, JSON-ready."""
        return {key: value for key, value in asdict(self).items() if key not in ("role", "block", "count")}

    @property
    def parameters(self) -> float:
        """Numbers in the weights of all `count` layers."""
        found = self.count if self.weight else 0.0
        for size in self.weight:
            found *= size
        return found

    def resize(self, inputs: int, outputs: int) -> "LayerSpec":
        """The layer with other numbers of input and output channels; a depthwise convolution stays depthwise."""
        depthwise = self.groups > 1
        groups = outputs if depthwise else 1
        shape = list(self.shape)
        shape[1 if self.kind == "conv" else -1] = outputs if depthwise else inputs
        weight = (outputs, 1 if depthwise else inputs, *self.weight[2:])
        return replace(self, shape=tuple(shape), weight=weight, groups=groups)

    def keep_heads(self, keep: float) -> "LayerSpec":
        """Attention with a share of its heads."""
        heads = max(round(self.groups * keep), 1)
        return replace(self, shape=(*self.shape[:-1], self.shape[-1] // self.groups * heads), groups=heads)

    @property
    def width(self) -> tuple[int, int]:
        """Input and output channels."""
        if self.kind == "attention":
            return self.shape[-1], self.shape[-1]
        return self.shape[1 if self.kind == "conv" else -1], self.weight[0]
