"""A language model whose weights stay on disk: its structure is in memory, and the weights of one part at a time."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from laconic.errors import SourceError
from laconic.hashing import hash_of
from laconic.models.folder_weights import weight_files
from laconic.models.huggingface import count_embeddings, open_folder, read_preprocessing
from laconic.models.language_model import LanguageModel
from laconic.models.meta_parameters import keep_parameters_on_meta
from laconic.models.pretrained import model_class, quiet
from laconic.models.weights import scan_weights
from laconic.tasks.text_generation import TextGeneration


@dataclass(frozen=True, eq=False)
class ShardedModel:
    """A causal language model in a folder of transformers.

    module: its parameters are on the meta device, but for those of parts that are loaded. places: by the name of a
    parameter in `module.model`, the name and the file that its tensor is stored under; a tied weight has the place of
    the one that it is tied to.
    """

    folder: Path
    module: LanguageModel
    task: TextGeneration
    files: tuple[Path, ...]
    places: Mapping[str, tuple[str, Path]]

    @property
    def model(self) -> Any:
        """The model of transformers."""
        return self.module.model

    def digest(self) -> str:
        """Digest the weights, however they are spread over files. Raises SourceError for any that is NaN or
        infinite."""
        scan = scan_weights(self.files)
        if not scan.finite:
            raise SourceError(
                f"the weights in {self.folder} have values that are no numbers (NaN or infinite): its training "
                f"diverged, or a file is damaged. Give a checkpoint from before"
            )
        return hash_of(scan.digest)

    def find_path(self, part: nn.Module) -> str:
        """Find the path of a module in `model`."""
        return next(str(path) for path, module in self.model.named_modules() if module is part)

    def read(self, names: list[str]) -> dict[str, Tensor]:
        """Read parameters by name, in the dtype in which they are stored."""
        tensors: dict[str, Tensor] = {}
        for file in sorted({self.places[name][1] for name in names}):
            with safe_open(file, "pt") as opened:
                own = [name for name in names if self.places[name][1] == file]
                tensors |= {name: opened.get_tensor(self.places[name][0]) for name in own}
        return tensors

    def load(self, part: nn.Module) -> None:
        """Load the weights of a part, in float32."""
        path = self.find_path(part)
        names = {f"{path}.{name}": name for name in part.state_dict()}
        state = {names[name]: tensor.float() for name, tensor in self.read(list(names)).items()}
        part.load_state_dict(state, assign=True)

    @contextmanager
    def loaded(self, part: nn.Module) -> Iterator[None]:
        """Hold the weights of a part in memory in the body, in float32."""
        self.load(part)
        try:
            yield
        finally:
            part.load_state_dict({name: value.to("meta") for name, value in part.state_dict().items()}, assign=True)


def open_sharded_model(folder: Path, *, trust: bool = False) -> ShardedModel:
    """Read the structure of a causal language model, its task without a cache, and where its weights are.

    Raises SourceError for a folder of another kind, with a shard that is missing or cut short, and for weights that are
    stored under other names than those of transformers; UntrustedSource for one that brings its own code.
    """
    opened = open_folder(folder, TextGeneration.name, trust=trust)
    files = weight_files(opened.path)
    if files[0].suffix != ".safetensors":
        raise SourceError(
            f"the weights in {folder} are pickles, of which no part can be read alone. Save them as safetensors, with "
            f"save_pretrained"
        )
    try:
        with quiet(), keep_parameters_on_meta():
            config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=trust)
            model = model_class(config, str(opened.task.auto_class)).from_config(config, trust_remote_code=trust)
    except (ValueError, KeyError, ImportError, AttributeError, TypeError) as error:
        raise SourceError(
            f"transformers does not build the model in {folder}: {error}. Copy the folder again"
        ) from None
    module = LanguageModel(model.eval())
    task = cast(TextGeneration, opened.task.from_preprocessing(read_preprocessing(opened, model, module)))
    if count := count_embeddings(model):
        task.limit_ids(count)
    return ShardedModel(folder, module, task, tuple(files), find_places(folder, model, files))


def find_places(folder: Path, model: Any, files: list[Path]) -> dict[str, tuple[str, Path]]:
    """Find the stored name and the file of each parameter. Raises SourceError where one has none, or another shape."""
    stored: dict[str, Path] = {}
    shapes: dict[str, list[int]] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 - not a mapping
                    stored[name], shapes[name] = file, opened.get_slice(name).get_shape()
        except (SafetensorError, OSError) as error:
            raise SourceError(
                f"{file} does not read as safetensors ({error}): it is cut short. Copy it again"
            ) from None
    state = model.state_dict(keep_vars=True)
    named = {id(value): name for name, value in state.items() if name in stored}
    places: dict[str, tuple[str, Path]] = {}
    for name, value in state.items():
        origin = name if name in stored else named.get(id(value))
        if origin is None:
            raise SourceError(
                f"the weights in {folder} have no {name}, so that its layers cannot be read one by one. Expected a "
                f"whole folder of a {type(model).__name__} whose weights have the names that transformers gives them"
            )
        if shapes[origin] != list(value.shape):
            raise SourceError(
                f"{origin} in {folder} has the shape {shapes[origin]}, and {list(value.shape)} by config.json. "
                f"Expected the two of one model; copy the folder again"
            )
        places[name] = (origin, stored[origin])
    return places
