"""Sentence embedding models: an encoder with pooling, projections and normalization as part of the module."""

from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, ValidationError
from torch import Tensor, nn

from laconic.errors import SourceError
from laconic.models.model_folder import read_source_json
from laconic.models.weights import read_weights

Pooling = Literal["mean", "cls", "max"]

POOLING: dict[str, Pooling] = {
    "mean": "mean",
    "cls": "cls",
    "max": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
}
ACTIVATIONS: dict[str, type[nn.Module]] = {
    kind.__name__: kind for kind in (nn.Identity, nn.Tanh, nn.ReLU, nn.GELU, nn.Sigmoid)
}
MODULES = "modules.json"


class Projection(BaseModel):
    """A linear layer after the pooling, and its activation by the name of torch's class."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    in_features: int
    out_features: int
    bias: bool = True
    activation: str = "Identity"


class EmbedderConfig(BaseModel):
    """The layers after the encoder: pooling, then projections, then normalization to length 1."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    pooling: Pooling = "mean"
    normalize: bool = False
    projections: tuple[Projection, ...] = ()


class TextEmbedder(nn.Module):
    """input_ids and attention_mask, [batch, seq] int64, to [batch, features] float32."""

    def __init__(self, encoder: nn.Module, config: EmbedderConfig) -> None:
        super().__init__()
        self.encoder = encoder
        self.config = config
        self.projections = nn.ModuleList(
            nn.Sequential(
                nn.Linear(layer.in_features, layer.out_features, bias=layer.bias), ACTIVATIONS[layer.activation]()
            )
            for layer in config.projections
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        vector = self._pool(hidden, attention_mask)
        for projection in self.projections:
            vector = projection(vector)
        return nn.functional.normalize(vector, dim=-1) if self.config.normalize else vector

    def _pool(self, hidden: Tensor, attention_mask: Tensor) -> Tensor:
        if self.config.pooling == "cls":
            return hidden[:, 0]
        kept = attention_mask.unsqueeze(-1).to(hidden.dtype)
        if self.config.pooling == "max":
            return hidden.masked_fill(kept == 0, torch.finfo(hidden.dtype).min).amax(dim=1)
        # The clamp is sentence-transformers' own: a row without any token gives zeros instead of NaN.
        return (hidden * kept).sum(dim=1) / kept.sum(dim=1).clamp(min=1e-9)


class SentenceTransformer(BaseModel):
    """The content of a modules.json. encoder: its folder. config: the layers after it. weights: the projections' files.

    max_tokens: the longest text, None where it is not given. lower: whether texts are lowercased.
    """

    model_config = ConfigDict(frozen=True)

    encoder: Path
    config: EmbedderConfig
    weights: tuple[Path, ...] = ()
    max_tokens: int | None = None
    lower: bool = False


def read_modules(folder: Path) -> SentenceTransformer:
    """Read the modules.json of a folder of sentence-transformers.

    Raises SourceError for a module of an unknown kind: without it the embeddings would differ.
    """
    encoder, pooling, normalize = folder, None, False
    projections: list[Projection] = []
    weights: list[Path] = []
    for entry in read_source_json(folder / MODULES):
        kind, path = str(entry["type"]).rpartition(".")[2], folder / entry["path"]
        if kind == "Transformer":
            encoder = path
        elif kind == "Pooling":
            pooling = read_pooling(path / "config.json")
        elif kind == "Dense":
            projections.append(read_projection(path / "config.json"))
            weights.append(
                next(
                    (path / name for name in ("model.safetensors", "pytorch_model.bin") if (path / name).is_file()),
                    path / "model.safetensors",
                )
            )
        elif kind == "Normalize":
            normalize = True
        elif kind != "Dropout":
            raise SourceError(
                f"{folder / MODULES} names a module of kind {kind!r}; expected Transformer, Pooling, Dense or "
                f"Normalize. Build the model in a function of your own, and give it with --builder"
            )
        if normalize and kind != "Normalize":
            raise SourceError(f"{folder / MODULES} has a {kind} after Normalize; expected Normalize to be the last")
    if pooling is None:
        raise SourceError(f"{folder / MODULES} has no Pooling; expected Transformer and Pooling")
    check_prompt(folder)
    # The name depends on the encoder, and only one is there: sentence_bert_config.json, sentence_roberta_config.json.
    configs = sorted(encoder.glob("sentence_*_config.json"))
    settings: dict[str, Any] = read_source_json(configs[0]) if configs else {}
    return SentenceTransformer(
        encoder=encoder,
        config=EmbedderConfig(pooling=pooling, normalize=normalize, projections=tuple(projections)),
        weights=tuple(weights),
        max_tokens=settings.get("max_seq_length"),
        lower=bool(settings.get("do_lower_case")),
    )


def check_prompt(folder: Path) -> None:
    """Raise SourceError for a model with a default prompt before every text: it is not part of the module."""
    path = folder / "config_sentence_transformers.json"
    prompt = read_source_json(path).get("default_prompt_name") if path.is_file() else None
    if prompt:
        raise SourceError(
            f"{path} puts the prompt {prompt!r} before every text, which the tokenizer here does not. Put it into the "
            f"texts yourself, and set default_prompt_name to null"
        )


def read_pooling(path: Path) -> Pooling:
    """Read the one pooling mode that a pooling config names. Raises SourceError for one that is not known here."""
    content = read_source_json(path)
    modes = content.get("pooling_mode") or [
        key for key, on in content.items() if key.startswith("pooling_mode_") and on
    ]
    modes = [modes] if isinstance(modes, str) else list(modes)
    if len(modes) != 1 or modes[0] not in POOLING:
        raise SourceError(f"{path} pools by {' and '.join(modes) or 'nothing'}; expected one of mean, cls, max")
    return POOLING[modes[0]]


def read_projection(path: Path) -> Projection:
    """Read a Dense module's config. Raises SourceError for an activation that is not known here."""
    content = read_source_json(path)
    activation = str(content.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if activation not in ACTIVATIONS:
        raise SourceError(f"{path} has the activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}")
    try:
        return Projection.model_validate({**content, "activation": activation})
    except ValidationError as error:
        raise SourceError(f"{path} is not the config of a Dense module: {error}") from error


def fill_projections(embedder: TextEmbedder, weights: tuple[Path, ...]) -> None:
    """Load the projections' weights. Raises SourceError where they do not fit."""
    for projection, path in zip(embedder.projections, weights, strict=True):
        tensors = read_weights(path)
        try:
            projection.load_state_dict({name.replace("linear.", "0."): value for name, value in tensors.items()})
        except RuntimeError as error:
            raise SourceError(f"{path} does not fit its config: {error}") from error
