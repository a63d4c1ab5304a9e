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
from laconic.models.model_folder import read_source_json
from laconic.models.processors import TEMPLATE
from laconic.models.weights import read_safetensors
from laconic.tasks.assets import to_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"
PREFIX = "base_model."
"""What peft puts before a module's name. The modules around the models of transformers call the model `model`, too."""
SIMPLE = {"peft_type": "LORA", "bias": "none"}
REFUSED = ("use_dora", "alpha_pattern", "layer_replication", "megatron_config", "lora_bias", "exclude_modules")
"""Settings of peft's LoRA that change how adapters are merged, or what is imported: refused where they are set."""


@dataclass(frozen=True)
class Adapter:
    """config: as in adapter_config.json. weights: by the name of the module, as `model.layers.0.q_proj`, then
    `lora_A.weight` [rank, in], `lora_B.weight` [out, rank], or `weight` and `bias` of a layer that was trained in
    full."""

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

    @torch.no_grad()
    def merge_into(self, module: nn.Module) -> None:
        """Add the adapters to the weights of a module, in place: W + scale * B A. Raises SourceError for another
        model's."""
        modules = dict(module.named_modules())
        for name, value in sorted(self.weights.items()):
            path, _, leaf = name.removesuffix(".lora_A.weight").rpartition(".")
            if name.endswith(".lora_B.weight"):
                continue
            if name.endswith(".lora_A.weight"):
                path, leaf = name.removesuffix(".lora_A.weight"), "weight"
                value = self._product(path, modules.get(path))
            weight = getattr(modules.get(path), leaf, None)
            if not isinstance(weight, Tensor) or weight.shape != value.shape:
                raise SourceError(f"the adapter is for a layer {path} with {leaf} {list(value.shape)}, which the model "
                                  f"has not. Name the folder of its own model as {BASE} in {CONFIG}")  # fmt: skip
            weight.copy_(weight + value if name.endswith(".lora_A.weight") else value)

    def _product(self, path: str, layer: nn.Module | None) -> Tensor:
        """Return what an adapter adds to the weight of its layer."""
        down, up = self.weights[f"{path}.lora_A.weight"], self.weights.get(f"{path}.lora_B.weight")
        rank = down.shape[0]
        if up is None or up.shape[-1] != rank:
            raise SourceError(f"the adapter of {path} is incomplete. Copy its folder again")
        scale = float(self.config["lora_alpha"]) / (rank**0.5 if self.config.get("use_rslora") else rank)
        product = scale * (up.float() @ down.float())
        return product.T if isinstance(layer, Conv1D) else product


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter."""
    return (folder / CONFIG).is_file()


def read_adapter(folder: Path) -> Adapter:
    """Read an adapter that `Adapter.save` or peft wrote. Raises SourceError for one of another kind, or of no LoRA."""
    config = read_source_json(folder / CONFIG)
    if not isinstance(config, dict) or not isinstance(config.get("lora_alpha"), (int, float)):
        raise SourceError(f"{folder / CONFIG} is not the config of a LoRA adapter. Copy the folder again")
    for key, expected in SIMPLE.items():
        if config.get(key, expected) != expected:
            raise SourceError(
                f"{folder} holds an adapter with {key} {config[key]!r}; expected {expected!r}. Merge it with peft"
            )
    if refused := [key for key in REFUSED if config.get(key)]:
        raise SourceError(
            f"{folder} holds an adapter with {', '.join(refused)}, which is not supported. Merge it with peft"
        )
    if not (folder / WEIGHTS).is_file():
        raise SourceError(f"{folder} has no {WEIGHTS}. Save the adapter with save_pretrained, as safetensors")
    weights = read_safetensors(folder / WEIGHTS)
    if strange := [name for name in weights if not name.startswith(PREFIX) or "lora_embedding" in name]:
        raise SourceError(
            f"{folder / WEIGHTS} holds {min(strange)}, which is no part of a LoRA adapter of linear layers"
        )
    return Adapter(config, {name.removeprefix(PREFIX): value for name, value in weights.items()})
