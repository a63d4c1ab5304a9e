"""Low-rank adapters in peft's format: a folder with adapter_config.json and adapter_model.safetensors."""

import re
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
from laconic.models.model_folder import read_source_json
from laconic.models.processors import TEMPLATE
from laconic.models.weights import read_safetensors
from laconic.tasks.assets import to_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"
PREFIX = "base_model."
"""What peft puts before a module's name. The modules around the models of transformers call the model `model`, too."""
HARMLESS = frozenset({
    "auto_mapping", BASE, "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha", "lora_bias", "lora_dropout",
    "lora_ga_config", "megatron_core", "modules_to_save", "alpha_pattern", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type",
    "trainable_token_indices", "use_dora", "use_rslora",
})  # fmt: skip
"""Settings of peft's LoRA with which a merged layer is W + scale * B A, and those that are followed. Any other that is
set changes what the adapter computes, and is refused."""
INITIALIZATIONS = (True, False, "gaussian", "eva", "mica", "orthogonal")
"""Initializations that leave the model's own weights alone. PiSSA, OLoRA, CorDA, LoftQ and LoRA-GA change them."""
A, B, BIAS, MAGNITUDE = ".lora_A.weight", ".lora_B.weight", ".lora_B.bias", ".lora_magnitude_vector"
LORA = (A, B, BIAS, MAGNITUDE)
SIMPLE = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": INITIALIZATIONS}
UNMERGEABLE = frozenset({"alora_invocation_tokens", "arrow_config", "use_qalora"})
"""Settings with which an adapter is more than a change of weights, so that peft cannot merge it either."""
MERGE = "Merge it with peft (merge_and_unload, then save_pretrained to a folder), and give that folder"
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
                value = value * self._scale(path)
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
        product = self._scale(path) * (up.float() @ down.float())
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

    def _scale(self, path: str) -> float:
        """Return the factor of the adapter of a layer."""
        patterns = self.config.get("alpha_pattern") or {}
        own = path.removeprefix("model.")
        alpha = next((patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", own)), None)
        alpha = float(self.config["lora_alpha"] if alpha is None else alpha)
        rank = self.weights[f"{path}{A}"].shape[0]
        return float(alpha / (rank**0.5 if self.config.get("use_rslora") else rank))


def fits(value: Tensor, weight: Tensor, *, is_rows: bool) -> bool:
    """Return whether a tensor of an adapter has the shape of a weight, or of rows of it."""
    return value.shape[1:] == weight.shape[1:] if is_rows else value.shape == weight.shape


def is_shared(module: nn.Module, weight: Tensor) -> bool:
    """Return whether several layers of a module have the same weight, as a head that is tied to the embedding."""
    holders = [layer for layer in module.modules() if any(own is weight for own in layer.parameters(recurse=False))]
    return len(holders) > 1


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter."""
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter that `Adapter.save` or peft wrote. Raises SourceError for one of another kind, or of no LoRA."""
    config = read_source_json(folder / CONFIG)
    if not isinstance(config, dict) or not isinstance(config.get("lora_alpha"), (int, float)):
        raise SourceError(f"{folder / CONFIG} is not the config of a LoRA adapter. Copy the folder again")
    for key, expected in SIMPLE.items():
        if config.get(key, expected[0]) not in expected:
            raise SourceError(f"{folder} holds an adapter with {key} {config[key]!r}, which is not supported. {MERGE}")
    unknown = set(config) - HARMLESS - SIMPLE.keys()
    if bound := sorted(key for key in UNMERGEABLE if config.get(key)):
        raise SourceError(
            f"{folder} holds an adapter with {', '.join(bound)}, which cannot be merged into the weights of its model. "
            f"Train a plain LoRA adapter"
        )
    if refused := sorted(key for key in unknown if config[key] not in (None, False, {}, [], "")):
        raise SourceError(f"{folder} holds an adapter with {', '.join(refused)}, which is not supported. {MERGE}")
    if not (folder / WEIGHTS).is_file():
        raise SourceError(f"{folder} has no {WEIGHTS}. Save the adapter with save_pretrained, as safetensors")
    weights = read_safetensors(folder / WEIGHTS)
    if strange := [name for name in weights if not is_plain(name)]:
        raise SourceError(
            f"{folder / WEIGHTS} holds {min(strange)}, which is no part of a LoRA adapter of linear layers. {MERGE}"
        )
    return Adapter(config, {name.removeprefix(PREFIX): value for name, value in weights.items()})


def is_plain(name: str) -> bool:
    """Return whether a tensor is a factor of a linear layer, rows of tokens, or a weight that was trained in full."""
    return name.startswith(PREFIX) and ("lora_" not in name or name.endswith(LORA))
