"""Low-rank adapters (LoRA): small trained matrices beside frozen weights, merged into them at the end."""

import importlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake
from transformers.pytorch_utils import Conv1D

from laconic import registry
from laconic.errors import RecipeError, did_you_mean
from laconic.models.adapter import Adapter
from laconic.models.repeated_layers import find_layers
from laconic.progress import hide_library_messages
from train.step.step_parts import StepParts
from train.step.technique import Proposal, Technique

LINEAR = (nn.Linear, Conv1D)
"""Classes of layers that take an adapter. Subclasses are left out, since their forward pass is not known."""

ADAPTER = "default"
"""The name that peft gives to the only adapter."""

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Lora(Technique):
    """Freezes the weights W [out, in] of linear layers and trains A [rank, in] and B [out, rank] beside them, in FP32:
    y = W x + alpha / rank * B A x (Hu et al. 2021, arXiv 2106.09685; implemented by peft). B starts as zeros.

    Frozen weights have neither gradients nor optimizer state. During training the parameters of an adapted layer have
    peft's names: `base_layer.weight`, `lora_A.default.weight`, `lora_B.default.weight`. A is drawn from torch's global
    generator, which the caller has seeded.
    Afterwards the module is back where it was, in FP32, with its original classes and names, and with
    W + alpha / rank * B A as weights. Its outputs are those of the trained module; with base_dtype bfloat16 up to
    rounding, since training has rounded the output of each layer and the merged module does not.
    """

    slot = "weights"
    exact = False
    places_weights = True
    trains_adapters = True
    takes_parts_of_layers = True
    loses_zeros = "adds to the weights what it has learned"
    excludes: ClassVar[Mapping[str, str]] = {
        "host-weights": "frozen weights have no gradients and no optimizer state for the host to hold",
        "pure-bf16": "adapters are trained in float32; base_dtype: bfloat16 is for the frozen weights",
    }
    renamed: ClassVar[Mapping[str, str]] = {"base": "base_dtype"}

    rank: int = Field(default=16, ge=1)
    alpha: int = Field(default=32, ge=1)
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """The dropout probability of the inputs of A."""
    targets: tuple[str, ...] | None = None
    """Linear layers by name or by the end of their names, such as "q_proj"; None takes all in the repeated blocks."""
    train_head: bool = True
    """Whether the linear layers after the blocks are trained in full; an output layer over a vocabulary never is."""
    merge: bool = True
    """Whether the result of fine-tuning is a checkpoint with the adapters merged, or the adapters in peft's format."""
    base_dtype: Literal["float32", "bfloat16"] = "float32"
    """The dtype of the frozen weights; with bfloat16 the forward pass runs under autocast."""

    @classmethod
    def proposals(cls, batch: int, device: torch.device) -> Sequence[Proposal]:
        return (
            Proposal("lean", {"base_dtype": "bfloat16"}, after=("bf16",)),
            Proposal(
                "lean", {"base_dtype": "bfloat16"}, after=("bf16", "gradient-checkpointing", "gradient-accumulation")
            ),
        )

    @property
    def multiplies_in_bf16(self) -> bool:
        return self.base_dtype == "bfloat16"

    @property
    def keeps_adapter(self) -> bool:
        return not self.merge

    def apply(self, parts: StepParts) -> None:
        module = parts.module
        names = select_targets(module, self.targets)
        heads = find_head_layers(module, names) if self.train_head else []
        before = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        home = next(module.parameters()).device
        layers = self._inject(parts, names)
        for layer in heads:
            layer.requires_grad_(True)
        self._encode_frozen(parts, layers)
        move_to_device(parts, DTYPES[self.base_dtype])
        if self.base_dtype != "float32":
            parts.add_forward_context(partial(torch.autocast, parts.device.type, dtype=DTYPES[self.base_dtype]))

        def undo() -> None:
            module.to(home)
            if not self.merge:
                parts.modules.adapter = self._collect(module, layers, heads)
            for name, layer in layers.items():
                self._decode_frozen(layer)
                layer.float().merge()
                module.set_submodule(name, layer.get_base_layer())
            module.float()
            del module.peft_config
            for name, parameter in module.named_parameters():
                parameter.requires_grad_(before[name])

        def merge(weights: dict[str, Tensor]) -> None:
            for name, layer in layers.items():
                weights[f"{name}.weight"] = self._read_frozen(layer).float() + layer.get_delta_weight(ADAPTER)
                if (bias := getattr(layer.get_base_layer(), "bias", None)) is not None:
                    weights[f"{name}.bias"] = bias.float()

        parts.on_restore(undo)
        parts.modules.on_merge(merge)

    def _inject(self, parts: StepParts, names: Sequence[str]) -> dict[str, Any]:
        """Replace layers by peft's, and freeze everything but the adapters. Returns peft's layers by name."""
        peft, module = import_peft(), parts.module
        config = peft.LoraConfig(
            r=self.rank,
            lora_alpha=self.alpha,
            lora_dropout=self.dropout,
            target_modules="|".join(re.escape(name) for name in names),
            fan_in_fan_out=isinstance(module.get_submodule(names[0]), Conv1D),
        )
        with hide_library_messages(), torch.device("meta"):
            peft.inject_adapter_in_model(config, module)
        layers: dict[str, Any] = {name: module.get_submodule(name) for name in names}
        for layer in layers.values():
            for matrix in (layer.lora_A[ADAPTER], layer.lora_B[ADAPTER]):
                matrix.weight = nn.Parameter(torch.empty(matrix.weight.shape, dtype=torch.float32, device=parts.device))
            layer.reset_lora_parameters(ADAPTER, True)
            layer.cast_input_dtype_enabled = False  # autocast does so, without a copy in float32 on the way
        return layers

    def _collect(self, module: nn.Module, layers: Mapping[str, Any], heads: Sequence[nn.Module]) -> Adapter:
        """Copy what was trained to the CPU, with the config that peft needs."""
        names = {part: name for name, part in module.named_modules()}
        matrices = {f"{name}.{kind}.weight": getattr(layer, kind)[ADAPTER].weight
                    for name, layer in layers.items() for kind in ("lora_A", "lora_B")}  # fmt: skip
        whole = {f"{names[head]}.{leaf}": value for head in heads for leaf, value in head.named_parameters()}
        config = {
            "peft_type": "LORA",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "lora_dropout": self.dropout,
            "bias": "none",
            "fan_in_fan_out": isinstance(next(iter(layers.values())).get_base_layer(), Conv1D),
            "target_modules": sorted(name.partition(".")[2] for name in layers),
            "modules_to_save": sorted(names[head].partition(".")[2] for head in heads) or None,
        }
        return Adapter(config, {name: value.detach().cpu().clone() for name, value in (matrices | whole).items()})

    def _encode_frozen(self, parts: StepParts, layers: Mapping[str, Any]) -> None:
        """Replace the frozen weights by an encoded form, where a subclass has one."""

    def _read_frozen(self, layer: Any) -> Tensor:
        """Return the frozen weight of a layer in its original layout."""
        weight: Tensor = layer.get_base_layer().weight
        return weight

    def _decode_frozen(self, layer: Any) -> None:
        """Put the weights of the original form back into a layer."""


def select_targets(module: nn.Module, targets: Sequence[str] | None) -> list[str]:
    """Select the names of the layers that take an adapter. Raises RecipeError where there are none."""
    inside = {part for block in find_layers(module) for part in block.modules()}
    linear = {name: part for name, part in module.named_modules() if type(part) in LINEAR}
    if targets is None:
        names = [name for name, part in linear.items() if part in inside]
        if not names:
            raise RecipeError(
                f"adapters are added to the linear layers of repeated blocks, and {type(module).__name__} has none. "
                f"Name linear layers in targets ({', '.join(sorted(linear)[:5]) or 'there are none'}), or "
                f"train without adapters"
            )
    else:
        ends = {target: [name for name in linear if f".{name}".endswith(f".{target}")] for target in targets}
        for target, matches in ends.items():
            if not matches:
                hint = did_you_mean(target, {name.rpartition(".")[2] for name in linear})
                raise RecipeError(f"targets: there is no linear layer {target!r} in {type(module).__name__}. {hint}")
        names = [name for name in linear if any(name in matches for matches in ends.values())]
    uses = Counter(id(parameter) for _, parameter in module.named_parameters(remove_duplicate=False))
    shared = [name for name in names if uses[id(linear[name].weight)] > 1]
    if shared:
        raise RecipeError(
            f"the weights of {shared[0]} are those of another layer too, so an adapter cannot be merged into them. "
            f"Leave it out of targets"
        )
    return names


def find_head_layers(module: nn.Module, names: Sequence[str]) -> list[nn.Module]:
    """Find the linear layers after the adapted ones and after the blocks, except an output layer over a vocabulary."""
    parts = dict(module.named_modules())
    order = list(parts)
    inside = {part for block in find_layers(module) for part in block.modules()}
    tables = {id(part.weight) for part in parts.values() if isinstance(part, nn.Embedding)}
    vocabulary = [part.get_output_embeddings() for part in parts.values() if hasattr(part, "get_output_embeddings")]
    after = [parts[name] for name in order[order.index(names[-1]) + 1 :]]
    return [
        part
        for part in after
        if type(part) in LINEAR
        and part not in inside
        and id(part.weight) not in tables
        and not any(part is layer for layer in vocabulary)
    ]


def move_to_device(parts: StepParts, frozen_dtype: torch.dtype) -> None:
    """Move the module of a training step to its device, in place. Frozen floating-point weights get `frozen_dtype`."""
    for tensor in chain(parts.module.parameters(), parts.module.buffers()):
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad and tensor.is_floating_point()
        dtype = frozen_dtype if frozen else tensor.dtype
        if (tensor.device, tensor.dtype) == (parts.device, dtype) and not is_fake(tensor):
            # Weights that the file still holds are read when they are used. A fake tensor stands for one on the host.
            continue
        tensor.data = parts.host.copy_to_device(tensor.data, dtype=dtype, category="parameters")
        parts.host.wait()


def import_peft() -> Any:
    """Import peft. Raises MissingPackage if it is not installed."""
    try:
        with hide_library_messages():
            return importlib.import_module("peft")
    except ModuleNotFoundError as error:
        raise registry.missing_package(error.name or "peft") from error
