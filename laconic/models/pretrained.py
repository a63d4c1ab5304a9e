"""The weights of a folder of transformers, in the model that its config describes."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers.utils import logging as transformers_logging

from laconic.errors import SourceError
from laconic.models.embedder import read_json

AUTO = {
    "text-embedding": "AutoModel",
    "text-classification": "AutoModelForSequenceClassification",
    "image-classification": "AutoModelForImageClassification",
    "causal-lm": "AutoModelForCausalLM",
}
"""The class of transformers that builds the model, by task."""


def from_pretrained(
    folder: Path, task: str, *, trust: bool, labels: Sequence[str] = (), seed: int = 0
) -> tuple[Any, int]:
    """The model in float32, and the bytes of its files of weights.

    labels: of a new head, drawn from the seed; without them the folder must hold all weights, its head's too.
    Raises SourceError.
    """
    files = weight_files(folder)
    safe = files[0].suffix == ".safetensors"
    try:
        with quiet(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            config = transformers.AutoConfig.from_pretrained(
                folder, local_files_only=True, trust_remote_code=trust, **(classes(labels) if labels else {})
            )
            model, found = getattr(transformers, AUTO[task]).from_pretrained(
                folder,
                config=config,
                local_files_only=True,
                trust_remote_code=trust,
                use_safetensors=safe,
                weights_only=not trust,
                dtype=torch.float32,
                output_loading_info=True,
                ignore_mismatched_sizes=bool(labels),
                **options(config, task),
            )
            if labels:
                renew(model, len(labels))
    except Exception as error:
        raise SourceError(
            f"{folder} does not load ({type(error).__name__}: {' '.join(str(error).split())[:300]}). Expected the "
            f"complete folder that save_pretrained writes; copy it again"
        ) from error
    missing = sorted(
        {*found["missing_keys"], *(key if isinstance(key, str) else key[0] for key in found["mismatched_keys"])}
    )
    if labels:
        missing = [name for name in missing if not of_head(model, name)]
    if missing:
        raise SourceError(
            f"{folder} has no weights for {len(missing)} tensors of {type(model).__name__} ({', '.join(missing[:3])}): "
            f"they would be random. Name the --task that the model was trained for"
        )
    return model, sum(path.stat().st_size for path in files)


def classes(labels: Sequence[str]) -> dict[str, Any]:
    """What a config says of the classes, as JSON holds it."""
    return {
        "id2label": {str(index): label for index, label in enumerate(labels)},
        "label2id": {label: index for index, label in enumerate(labels)},
        "problem_type": "single_label_classification",
    }


def of_head(model: Any, name: str) -> bool:
    """Whether a weight is the head's own, or the pooler's that leads to it: whatever is not the encoder."""
    inside = f"{model.base_model_prefix}."
    return not name.startswith(inside) or name.startswith(f"{inside}pooler.")


def renew(model: Any, count: int) -> None:
    """Draw the layer that answers with the classes anew, even where the old one is of the same size."""
    deviation = getattr(model.config, "initializer_range", None) or 0.02
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer.out_features == count and of_head(model, f"{name}."):
            nn.init.normal_(layer.weight, std=deviation)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def options(config: Any, task: str) -> dict[str, Any]:
    """No pooler where the vectors are pooled here: its weights would be dead, and random where the source has none."""
    if task != "text-embedding":
        return {}
    kind = transformers.AutoModel._model_mapping.get(type(config), None)
    known = kind is not None and "add_pooling_layer" in inspect.signature(kind.__init__).parameters
    return {"add_pooling_layer": False} if known else {}


def weight_files(folder: Path) -> list[Path]:
    """The files with the model's weights, safetensors where there are any. Raises SourceError where one is missing."""
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
        shards = sorted(set(read_json(folder / name)["weight_map"].values()))
        absent = [shard for shard in shards if not (folder / shard).is_file()]
        if absent:
            raise SourceError(f"{folder} lacks {', '.join(absent[:3])}, which {name} names. Copy the folder again")
        return [folder / shard for shard in shards]
    raise SourceError(f"{folder} has no model.safetensors. Copy the folder again, with its weights")


@contextmanager
def quiet() -> Iterator[None]:
    """Without transformers' progress bars and reports: what matters in them is raised as an error here."""
    level, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()
