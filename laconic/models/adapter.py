"""Low-rank adapters in peft's format: a folder with adapter_config.json and adapter_model.safetensors."""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from laconic.cache import open_scratch_folder
from laconic.errors import SourceError
from laconic.files import replace_folder
from laconic.models.processors import TEMPLATE
from laconic.models.weights import read_safetensors
from laconic.runtimes.adapter_config import (
    BASE,
    CONFIG,
    MERGE,
    PREFIX,
    WEIGHTS,
    A,
    B,
    find_scale,
    read_adapter_config,
)
from laconic.tasks.assets import to_json

BIAS, MAGNITUDE = ".lora_B.bias", ".lora_magnitude_vector"
LORA = (A, B, BIAS, MAGNITUDE)
TOKENS, BASE_LAYER = "token_adapter.trainable_tokens_delta", ".base_layer"
HEADS = ("score", "classifier", "out_proj")
"""Names of the last layer of a head for classes."""
TASKS = {"SEQ_CLS": "text-classification", "TOKEN_CLS": "token-classification"}
"""By peft's type of task, the task of a model whose head for classes the adapter brings."""


@dataclass(frozen=True)
class Adapter:
    """config: as in adapter_config.json. weights: by the name of the module, as `model.layers.0.q_proj`, then
    `lora_A.weight` [rank, in], `lora_B.weight` [out, rank], `lora_B.bias` [out], `lora_magnitude_vector` [out] of DoRA,
    or `weight` and `bias` of a layer that was trained in full."""

    config: Mapping[str, Any]
    weights: Mapping[str, Tensor]

    @property
    def base(self) -> Path:
        """The folder of the model that the adapter belongs to."""
        return Path(str(self.config.get(BASE) or ""))

    def save(self, folder: Path, base: Path, chat_template: Path | None = None) -> None:
        """Write the folder, whole or not at all, in place of an earlier one. base: the folder of the model that the
        adapter belongs to. chat_template: a file to put beside it."""
        with open_scratch_folder(folder) as scratch:
            made = scratch / folder.name
            made.mkdir()
            (made / CONFIG).write_bytes(to_json({**self.config, BASE: str(base.resolve())}))
            save_file({f"{PREFIX}{name}": value.contiguous() for name, value in self.weights.items()}, made / WEIGHTS)
            if chat_template is not None:
                shutil.copyfile(chat_template, made / TEMPLATE)
            replace_folder(made, folder)

    @property
    def head(self) -> dict[str, Tensor]:
        """The weights of a head for classes that were trained in full, by the names of the model itself."""
        if self.config.get("task_type") not in TASKS:
            return {}
        saved = tuple(self.config.get("modules_to_save") or ())
        names = {name: name.removeprefix("model.") for name in self.weights if not name.endswith(LORA)}
        return {own: self.weights[name] for name, own in names.items() if set(saved) & set(own.split("."))}

    @property
    def classes(self) -> int | None:
        """How many classes its head has; None without a head."""
        ends = tuple(f"{layer}.weight" for layer in HEADS)
        sizes = [len(value) for name, value in self.head.items() if name.endswith(ends)]
        return sizes[-1] if sizes else None

    @torch.no_grad()
    def merge_into(self, module: nn.Module) -> bool:
        """Add the adapters to the weights of a module, in place: W + scale * B A, whose rows DoRA scales to
        magnitudes. Returns whether a head that shared the weight of the embedding got one of its own. Raises
        SourceError for another model's."""
        modules, is_untied = dict(module.named_modules(remove_duplicate=False)), False
        for name, value in sorted(self.weights.items()):
            if name.endswith((B, MAGNITUDE)):
                continue
            path, _, leaf = name.rpartition(".")
            if name.endswith(TOKENS):
                path, leaf = name.removesuffix(f".{TOKENS}"), "weight"
            elif name.endswith(A):
                path, leaf = name.removesuffix(A), "weight"
                value = self._product(path, modules.get(path))
            elif name.endswith(BIAS):
                path = name.removesuffix(BIAS)
                value = value * find_scale(self.config, path, len(self.weights[f"{path}{A}"]))
            path, is_base = path.removesuffix(BASE_LAYER), path.endswith(BASE_LAYER)
            layer = modules.get(path)
            weight = getattr(layer, leaf, None)
            is_rows = name.endswith(TOKENS)
            if layer is None or not isinstance(weight, Tensor) or not fits(value, weight, is_rows=is_rows):
                raise SourceError(f"the adapter is for a layer {path} with {leaf} {list(value.shape)}, which the model "
                                  f"has not. Name the folder of its own model as {BASE} in {CONFIG}")  # fmt: skip
            if is_rows:
                weight[torch.tensor(self._rows(path, len(value)))] = value.to(weight)
                continue
            changed = weight + value if name.endswith((A, BIAS)) else value.to(weight)
            if torch.equal(changed, weight):
                continue
            if not is_base and is_shared(module, weight):
                setattr(layer, leaf, nn.Parameter(changed, requires_grad=False))
                is_untied = True
            else:
                weight.copy_(changed)
        return is_untied

    def _rows(self, path: str, count: int) -> list[int]:
        """Return the numbers of the tokens whose rows were trained."""
        rows = self.config.get("trainable_token_indices")
        if isinstance(rows, dict):
            rows = next((rows[name] for name in rows if path == name or path.endswith(f".{name}")), None)
        if not isinstance(rows, list) or len(rows) != count:
            raise SourceError(f"the adapter of {path} has {count} rows of tokens, and {CONFIG} names others. {MERGE}")
        return rows

    def _product(self, path: str, layer: nn.Module | None) -> Tensor:
        """Return what an adapter adds to the weight of its layer."""
        down, up = self.weights[f"{path}{A}"], self.weights.get(f"{path}{B}")
        if down.ndim != 2:
            raise SourceError(f"the adapter of {path} is one of a convolution, which is not supported. {MERGE}")
        if up is None or up.shape[-1] != len(down):
            raise SourceError(f"the adapter of {path} is incomplete. Copy its folder again")
        product = find_scale(self.config, path, len(down)) * (up.float() @ down.float())
        product = product.T if isinstance(layer, Conv1D) else product
        magnitude, weight = self.weights.get(f"{path}{MAGNITUDE}"), getattr(layer, "weight", None)
        if self.config.get("use_dora") and magnitude is None:
            raise SourceError(f"the adapter of {path} is incomplete. Copy its folder again")
        if magnitude is not None and isinstance(weight, Tensor) and weight.shape == product.shape:
            axis = 0 if isinstance(layer, Conv1D) else 1
            whole = weight.float() + product
            factor = magnitude.float() / torch.linalg.norm(whole, dim=axis)
            product = factor.unsqueeze(axis) * whole - weight.float()
        return product


def fits(value: Tensor, weight: Tensor, *, is_rows: bool) -> bool:
    """Return whether a tensor of an adapter has the shape of a weight, or of rows of it."""
    return value.shape[1:] == weight.shape[1:] if is_rows else value.shape == weight.shape


def is_shared(module: nn.Module, weight: Tensor) -> bool:
    """Return whether several layers of a module have the same weight, as a head that is tied to the embedding."""
    holders = [layer for layer in module.modules() if any(own is weight for own in layer.parameters(recurse=False))]
    return len(holders) > 1


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter that `Adapter.save` or peft wrote. Raises SourceError for one of another kind, or of no LoRA."""
    config = read_adapter_config(folder)
    weights = read_safetensors(folder / WEIGHTS)
    if strange := [name for name in weights if not is_plain(name)]:
        raise SourceError(
            f"{folder / WEIGHTS} holds {min(strange)}, which is no part of a LoRA adapter of linear layers. {MERGE}"
        )
    return Adapter(config, {name.removeprefix(PREFIX): value for name, value in weights.items()})


def is_plain(name: str) -> bool:
    """Return whether a tensor is a factor of a linear layer, rows of tokens, or a weight that was trained in full."""
    return name.startswith(PREFIX) and ("lora_" not in name or name.endswith(LORA))
