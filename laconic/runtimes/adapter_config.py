"""The config of a LoRA adapter in peft's format (adapter_config.json): which are read, and how they are scaled."""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laconic.errors import SourceError
from laconic.files import read_json

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
BASE = "base_model_name_or_path"
PREFIX = "base_model."
"""What peft puts before a module's name. The modules around the models of transformers call the model `model`, too."""
A, B = ".lora_A.weight", ".lora_B.weight"
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
SIMPLE = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": INITIALIZATIONS}
UNMERGEABLE = frozenset({"alora_invocation_tokens", "arrow_config", "use_qalora"})
"""Settings with which an adapter is more than a change of weights, so that peft cannot merge it either."""
REPEATS = 3
"""The most repeats in an expression for the names of layers: the time that some expressions take grows with a power of
this number, and with groups that are repeated it doubles with each letter."""
MERGE = "Merge it with peft (merge_and_unload, then save_pretrained to a folder), and give that folder"


def is_adapter(folder: Path) -> bool:
    """Return whether a folder holds an adapter."""
    return (folder / CONFIG).is_file()


def read_adapter_config(folder: Path) -> Mapping[str, Any]:
    """Read the config of the adapter in a folder. Raises SourceError for one of another kind, or of no LoRA, and where
    its weights are not beside it as safetensors."""
    try:
        config = read_json(folder / CONFIG)
    except FileNotFoundError:
        raise SourceError(f"{folder / CONFIG} is missing. Copy the folder again, with all of its files") from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{folder / CONFIG} does not read as JSON: {error}. Copy the folder again") from error
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
    check_patterns(config.get("alpha_pattern") or {}, folder)
    if not (folder / WEIGHTS).is_file():
        raise SourceError(f"{folder} has no {WEIGHTS}. Save the adapter with save_pretrained, as safetensors")
    return config


def check_patterns(patterns: object, folder: Path) -> None:
    """Raise SourceError for a factor by layer that does not read, and for a name whose expression could take very long
    to match."""
    for name, alpha in patterns.items() if isinstance(patterns, dict) else [("", patterns)]:
        try:
            re.compile(name)
            readable = isinstance(alpha, (int, float))
        except re.error:
            readable = False
        if not readable or len(re.findall(r"[*+{]", name)) > REPEATS or re.search(r"\)[*+{]", name):
            raise SourceError(
                f"{folder / CONFIG} has {name!r}: {alpha!r} in alpha_pattern; expected a number by the name of a "
                f"layer, or by an expression with at most {REPEATS} repeats, none of a group. Name the layers"
            )


def find_scale(config: Mapping[str, Any], path: str, rank: int) -> float:
    """Find the factor of the product of a module's matrices: alpha / rank, or alpha / sqrt(rank) of rsLoRA
    (Kalajdzievski, 2023). path: of the module, as in the adapter's file without `PREFIX`."""
    patterns = config.get("alpha_pattern") or {}
    own = path.removeprefix("model.")
    alpha = next((patterns[key] for key in patterns if re.match(rf"(.*\.)?({key})$", own)), None)
    alpha = float(config["lora_alpha"] if alpha is None else alpha)
    return float(alpha / (rank**0.5 if config.get("use_rslora") else rank))
