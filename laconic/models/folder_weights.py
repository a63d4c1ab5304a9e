"""The weights of a folder of transformers, in the model that its config describes."""

import logging
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import safe_open

from laconic.errors import SourceError
from laconic.models.model_folder import read_source_json
from laconic.models.pretrained import class_config, is_head_weight, model_class, model_options, quiet, reset_head
from laconic.models.state_dicts import WRAPPERS
from laconic.models.weights import read_weights

log = logging.getLogger("laconic.models")


def from_pretrained(
    folder: Path,
    auto_class: str,
    *,
    trust: bool,
    labels: Sequence[str] = (),
    problem_type: str | None = None,
    pooler: bool = False,
    seed: int = 0,
) -> tuple[Any, list[Path]]:
    """Load the model in float32, and return it with its weight files.

    auto_class: the class of transformers that builds it. labels, problem_type: of a new head, initialized from the
    seed; without labels the folder must hold all weights, including the head's. pooler: of a bare encoder, whether it
    is built. Raises SourceError.
    """
    files = weight_files(folder)
    safe = files[0].suffix == ".safetensors"
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = transformers.AutoConfig.from_pretrained(
                folder,
                local_files_only=True,
                trust_remote_code=trust,
                **(class_config(labels, problem_type) if labels else {}),
            )
            read = partial(
                model_class(config, auto_class).from_pretrained,
                folder,
                config=config,
                local_files_only=True,
                trust_remote_code=trust,
                use_safetensors=safe,
                weights_only=not trust,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # `check_weights` reports them
                **model_options(config, auto_class, pooler=pooler),
            )
            model, report = read()
            if missing_weights(model, report, has_new_head=bool(labels)):
                model, report = read_prefixed(read, folder, has_new_head=bool(labels)) or (model, report)
            if labels:
                reset_head(model, len(labels))
    except Exception as error:
        raise SourceError(describe_failure(folder, auto_class, error)) from error
    check_weights(folder, model, report, has_new_head=bool(labels))
    return model, files


def missing_weights(model: Any, report: Mapping[str, Any], *, has_new_head: bool) -> list[str]:
    """Return the weights that a folder lacks, save those of a new head. report: what transformers says of loading."""
    missing = sorted(report["missing_keys"])
    return [name for name in missing if not (has_new_head and is_head_weight(model, name))]


def read_prefixed(
    read: Callable[..., tuple[Any, Mapping[str, Any]]], folder: Path, *, has_new_head: bool
) -> tuple[Any, Mapping[str, Any]] | None:
    """Read a folder whose weights were saved from a compiled or wrapped model, and say which prefix was removed from
    their names; None where no prefix makes them fit. read: reads the model with a `key_mapping` of names."""
    names = stored_names(weight_files(folder))
    levels = zip(*(name.split(".")[:-1] for name in names), strict=False)
    start = [parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, levels)]
    prefixes = [".".join(start[: count + 1]) for count in range(len(start))]
    mappings = {f"{prefix}.": {f"^{re.escape(prefix)}\\.": ""} for prefix in prefixes}
    within = sorted(WRAPPERS & {part for name in names for part in name.split(".")})
    if within:
        mappings[" and ".join(f"{each}." for each in within)] = {rf"(^|\.)({'|'.join(within)})\.": r"\1"}
    for prefix, mapping in mappings.items():
        model, report = read(key_mapping=mapping)
        if not missing_weights(model, report, has_new_head=has_new_head):
            log.warning("%s: removed %r from the names of the weights", folder, prefix)
            return model, report
    return None


def stored_names(files: Sequence[Path]) -> list[str]:
    """Return the names of the weights in files."""
    names: list[str] = []
    for path in files:
        if path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                names += file.keys()
        else:
            names += [name for name, value in read_weights(path).items() if isinstance(value, torch.Tensor)]
    return names


def check_weights(folder: Path, model: Any, report: Mapping[str, Any], *, has_new_head: bool) -> None:
    """Raise SourceError for weights that the folder lacks or that have another shape, save those of a new head.

    report: what transformers says of loading, `missing_keys` and `mismatched_keys`.
    """
    missing = missing_weights(model, report, has_new_head=has_new_head)
    mismatched = sorted(report["mismatched_keys"])
    if has_new_head:
        mismatched = [each for each in mismatched if not is_head_weight(model, each[0])]
    if mismatched:
        raise SourceError(describe_mismatch(folder, model, *mismatched[0]))
    if missing:
        raise SourceError(
            f"{folder} has no weights for {len(missing)} tensors of {type(model).__name__} ({', '.join(missing[:3])}): "
            f"they would be random. Name the --task that the model was trained for"
        )


def describe_failure(folder: Path, auto_class: str, error: Exception) -> str:
    """Say why transformers does not load a folder, and what to do: it may lack a package, the model may be for another
    task, or the folder may be damaged."""
    reason = " ".join(str(error).split())
    if isinstance(error, ImportError):
        return f"transformers needs a package to load {folder}, which is not installed: {reason[:300]}"
    if "Unrecognized configuration class" in reason:
        kind = read_source_json(folder / "config.json").get("model_type")
        return f"transformers has no {auto_class} for models of type {kind}, as {folder} holds one. Name another --task"
    if "does not recognize this architecture" in reason or "Unrecognized model in" in reason:
        kind = read_source_json(folder / "config.json").get("model_type")
        unknown = f"does not know models of type {kind}" if kind else "finds no model_type in its config.json"
        return (
            f"transformers {transformers.__version__} {unknown}, so that {folder} cannot be loaded. Install the "
            f"version that the model was saved with, or give the weights with a --builder"
        )
    return (
        f"{folder} does not load ({type(error).__name__}: {reason[:300]}). Expected the complete folder that "
        f"save_pretrained writes; copy it again"
    )


def describe_mismatch(folder: Path, model: Any, name: str, actual: Sequence[int], expected: Sequence[int]) -> str:
    """Say that a tensor has another shape in the weights than by config.json, and what to do."""
    shapes = f"{name} is {list(actual)} in the weights of {folder}, and {list(expected)} by its config.json"
    if is_head_weight(model, name):
        return (
            f"{shapes}: the head has another number of labels. Give config.json an id2label with {actual[0]} names, or "
            f"train a new head with laconic finetune, on samples whose labels are not those of config.json"
        )
    return f"{shapes}. Expected the two files of one model, as save_pretrained writes them; copy the folder again"


def has_pooler(folder: Path) -> bool:
    """Return whether the pooler of a bare encoder has no weights, or the folder has them."""
    with quiet(), torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        model = transformers.AutoModel.from_config(config)
    learned = {name for name, _ in model.named_parameters() if name.startswith("pooler.")}
    files = weight_files(folder)
    if not learned or files[0].suffix != ".safetensors":
        return True
    stored = stored_names(files)
    return all(any(name.endswith(end) for name in stored) for end in learned)


def weight_files(folder: Path) -> list[Path]:
    """Return the files with the model's weights, safetensors where there are any. Raises SourceError where one is
    missing."""
    for name in (
        "model.safetensors",
        "model.safetensors.index.json",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ):
        if not (folder / name).is_file():
            continue
        if not name.endswith(".index.json"):
            return [folder / name]
        shards = sorted(set(read_source_json(folder / name)["weight_map"].values()))
        absent = [shard for shard in shards if not (folder / shard).is_file()]
        if absent:
            raise SourceError(f"{folder} lacks {', '.join(absent[:3])}, which {name} names. Copy the folder again")
        return [folder / shard for shard in shards]
    raise SourceError(f"{folder} has no model.safetensors. Copy the folder again, with its weights")
