"""Folders and files whose weights another program has quantized, restored to a folder of float weights to be opened;
and one folder of float32 for all processes of a machine that open weights of 16 bits."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from gguf import GGUFReader
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from laconic import registry
from laconic.cache import Cache
from laconic.errors import FormatRefused, SourceError
from laconic.hashing import hash_of
from laconic.models.folder_weights import weight_files
from laconic.models.gguf_splitting import set_splitting
from laconic.models.model_folder import QUANTIZATION, find_gguf, read_quantization, read_source_json
from laconic.models.pretrained import quiet
from laconic.weight_formats.weight_format import WeightFormat

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"


HALF = ("BF16", "F16")
"""Precisions of weights that every process would convert for itself."""
_shared: ContextVar[Cache | None] = ContextVar("shared", default=None)


@contextmanager
def share_float_weights(cache: Cache) -> Iterator[None]:
    """Let processes that open a model in the body with the same cache map one copy of its weights in float32, which the
    first of them writes; each would else convert all weights in memory of its own. Pages stay mapped when the copy is
    removed, after all of them have opened it."""
    token = _shared.set(cache)
    try:
        yield
    finally:
        _shared.reset(token)


@contextmanager
def open_float_folder(source: Path) -> Iterator[Path]:
    """Return a folder of transformers with the float weights of a source, for the body: the source itself, unless it
    is a GGUF file, its weights are quantized, or they have 16 bits and processes share float32. Raises SourceError for
    weights in a format that is not read."""
    cache = _shared.get()
    restore, name = find_restoration(source, is_shared=cache is not None)
    if restore is None:
        yield source
    elif cache is not None:
        yield write_once(source, cache, lambda folder: restore(folder / name)) / name
    else:
        with TemporaryDirectory() as scratch:
            restore(Path(scratch) / name)
            yield Path(scratch) / name


def write_once(source: Path, cache: Cache, write: Callable[[Path], None]) -> Path:
    """Return the folder of a source in the cache, which the first process writes. Raises SourceError."""
    key = f"weights-{hash_of(str(source.resolve()))}"
    try:
        with cache.lock(key):
            return cache.directory(key, write)
    except (SafetensorError, OSError) as error:
        raise SourceError(
            f"the weights of {source} in FP32, which the ranks of a machine share while they load it, cannot be "
            f"written to {cache.folder}: {error}. Set LACONIC_CACHE to a folder on a disk with 4 bytes for each weight"
        ) from error


def find_restoration(source: Path, *, is_shared: bool) -> tuple[Callable[[Path], None] | None, str]:
    """Find what writes the folder with the float weights of a source, and the name of that folder; None where the
    source is one. is_shared: whether weights of 16 bits are converted, too. Raises SourceError."""
    if (file := find_gguf(source)) is not None:
        return partial(restore_gguf, file), file.stem
    form = find_format(source)
    if form is not None or (is_shared and (source / CONFIG).is_file() and has_half(weight_files(source))):
        return partial(restore_folder, source, form), source.name
    return None, source.name


def has_half(files: Sequence[Path]) -> bool:
    """Return whether safetensors files have weights of 16 bits. False for those that do not read."""
    try:
        for path in files:
            with safe_open(path, "pt") as file:
                if any(file.get_slice(name).get_dtype() in HALF for name in file.keys()):  # noqa: SIM118 - no mapping
                    return True
    except (SafetensorError, OSError):
        pass  # of another kind or damaged, which is said where they are read
    return False


def find_format(folder: Path) -> WeightFormat | None:
    """Find the format of the weights in a folder of transformers; None where they are float. Raises SourceError for
    settings that are not read."""
    config = read_source_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}
    settings = read_quantization(folder, config) if isinstance(config, dict) else {}
    if (method := settings.get("quant_method")) not in registry.WEIGHT_FORMATS:
        return None
    kind: type[WeightFormat] = registry.resolve("weight format", method)
    try:
        return kind.read(settings)
    except FormatRefused as error:
        raise SourceError(f"the weights in {folder} are quantized by {method}: {error}") from None


def restore_folder(folder: Path, form: WeightFormat | None, destination: Path) -> None:
    """Write the folder of a model with float weights, a file at a time. form: of quantized weights."""
    destination.mkdir()
    files = weight_files(folder)
    with ExitStack() as stack:
        try:
            opened = [stack.enter_context(safe_open(path, "pt")) for path in files]
        except (SafetensorError, OSError) as error:
            raise SourceError(f"the weights in {folder} do not read as safetensors: {error}. Copy it again") from error
        where = {name: file for file in opened for name in file.keys()}  # noqa: SIM118 - not a mapping
        places: dict[str, str] = {}
        for path, file in zip(files, opened, strict=True):
            weights = {name: to_float(weight) for name, weight in iterate_weights(file.keys(), where, form)}
            places |= dict.fromkeys(weights, path.name)
            save_file(weights, destination / path.name, metadata={"format": "pt"})
    if len(files) > 1:
        (destination / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}), encoding="utf-8")
    config = {key: value for key, value in read_source_json(folder / CONFIG).items() if key != QUANTIZATION}
    (destination / CONFIG).write_text(json.dumps(config), encoding="utf-8")
    skipped = {*(path.name for path in destination.iterdir()), "quantize_config.json"}
    for path in folder.iterdir():
        if path.name not in skipped:
            (destination / path.name).symlink_to(path.resolve())


def to_float(weight: Tensor) -> Tensor:
    """Return a weight of 16 bits in float32, and any other tensor as it is."""
    return weight.float() if weight.dtype in (torch.bfloat16, torch.float16) else weight


def iterate_weights(names: Any, where: Mapping[str, Any], form: WeightFormat | None) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of a file by name, quantized weights in float32. names: of its tensors. where: by name, the
    open file of each, since the parts of a weight may be in several; it comes with the file of its first part."""
    done = set()
    for name in names:
        module, _, part = name.rpartition(".")
        if form is None or part not in form.parts:
            yield name, where[name].get_tensor(name)
            continue
        parts = sorted(part for part in form.parts if f"{module}.{part}" in where)
        if module in done or where[f"{module}.{parts[0]}"] is not where[name]:
            continue
        done.add(module)
        tensors = {part: where[f"{module}.{part}"].get_tensor(f"{module}.{part}") for part in parts}
        try:
            yield f"{module}.weight", tensors["weight"] if parts == ["weight"] else form.restore(tensors)
        except (FormatRefused, KeyError, RuntimeError, IndexError, ValueError) as error:
            raise SourceError(
                f"{module} has the tensors {', '.join(parts)}, which do not make a weight ({error}). Copy the folder "
                f"again"
            ) from error


def restore_gguf(file: Path, destination: Path) -> None:
    """Write the folder of transformers that a GGUF file stands for. Raises SourceError."""
    read: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False, "gguf_file": file.name}
    try:
        with quiet():
            packed: Any = transformers.AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.float32, **read)
            delattr(packed.config, QUANTIZATION)  # a model that was packed is not saved; one with its weights is
            model = type(packed)(packed.config)
            model.load_state_dict(packed.state_dict())
            model.save_pretrained(destination)
            transformers.AutoTokenizer.from_pretrained(file.parent, **read).save_pretrained(destination)
        restore_splitting(file, destination / "tokenizer.json")
    except Exception as error:  # of whichever library finds a damaged or an unknown part
        reason = " ".join(str(error).split())[:300]
        raise SourceError(
            f"{file} does not load ({type(error).__name__}: {reason}). Expected a GGUF file of a language model that "
            f"transformers {transformers.__version__} reads, whole"
        ) from error


def restore_splitting(file: Path, path: Path) -> None:
    """Let the tokenizer.json that transformers wrote of a GGUF file split texts as the file says: transformers splits
    all as GPT-2 (5.23), so that SmolLM2 would get other tokens for numbers."""
    field = GGUFReader(file).fields.get("tokenizer.ggml.pre")
    tokenizer = read_source_json(path)
    if field is not None and tokenizer["model"]["type"] == "BPE":
        set_splitting(tokenizer, str(field.contents()))
        path.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
