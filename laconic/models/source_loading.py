"""Opening a trained model in any supported format, as a checkpoint."""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from laconic.arrays import Arrays
from laconic.artifacts.manifest import MANIFEST
from laconic.artifacts.record import Record
from laconic.errors import SourceError
from laconic.hashing import hash_of
from laconic.models import builder as builders
from laconic.models import huggingface, timm_folder
from laconic.models.adapter import TASKS, Adapter, read_adapter
from laconic.models.checkpoint import CARD, Checkpoint, prepare
from laconic.models.embedder import MODULES
from laconic.models.folder_weights import stored_names, weight_files
from laconic.models.model_folder import find_gguf, read_source_json, refuse_foreign
from laconic.models.pretrained import Loaded, is_head_weight
from laconic.models.processors import plain_task, read_chat_template
from laconic.models.quantized_weights import open_float_folder
from laconic.models.sample_signature import infer_inputs, take_few
from laconic.models.signature import order_inputs, probe_module
from laconic.models.task_inference import infer_task, match_architecture
from laconic.models.weights import check_finite, fingerprint, is_program, scan_weights
from laconic.runtimes.adapter_config import is_adapter
from laconic.tensor import TensorSpec

CONFIG = "config.json"
ONE_LENGTH = (
    "A model that takes inputs of one length alone, as Nystromformer, can be given with a --builder, and samples of "
    "that length in an .npz file"
)

TOKENIZER_FILES = frozenset(
    {"tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"}
    | {"vocab.json", "vocab.txt", "merges.txt", "sentencepiece.bpe.model", "spiece.model"}
)
"""Files of a tokenizer, which an adapter may bring."""
PADDING_ADVICE = (
    'Give its config.json a "pad_token_id": the number of the token that pads texts, or, where there is none, that of '
    "eos_token_id"
)


def has_pad_token(module: nn.Module) -> bool:
    """Return whether the config of a model of transformers names a padding token, or has no place for one."""
    config: Any = getattr(getattr(module, "model", None), "config", None)
    return not hasattr(config, "get_text_config") or getattr(config.get_text_config(), "pad_token_id", 0) is not None


def is_onnx(source: Path) -> bool:
    """Return whether a source is an ONNX file: a graph already, and no checkpoint."""
    return source.suffix == ".onnx"


def load_source(
    source: Path,
    *,
    task: str | None = None,
    builder: str | None = None,
    arguments: dict[str, Any] | None = None,
    weights_key: str | None = None,
    inputs: tuple[TensorSpec, ...] | None = None,
    samples: Arrays | None = None,
    trust: bool = False,
) -> Checkpoint:
    """Open a trained model in any supported format.

    source: a folder of transformers or sentence-transformers; a file of weights, with the `builder`
    ("package.module:factory") and the `arguments` that make the module, and the `inputs` that it takes; or a
    checkpoint saved before. weights_key: where such a file has the weights, keys joined by dots or a prefix of names.
    samples: arrays by input, from which the inputs are found where nothing states them.
    trust: lets a source execute code that it carries.
    Raises SourceError, UntrustedSource.
    """
    if not source.exists():
        raise SourceError(f"{source} does not exist; expected a model's folder, or a file of weights")
    if is_onnx(source):
        raise SourceError(f"{source} is an ONNX file: a graph, not a checkpoint. Stages that train need the checkpoint")
    if weights_key is not None and (source.is_dir() or is_program(source)):
        raise SourceError(f"{source} has its weights in one place, so that --weights-key has no use. Leave it out")
    if source.is_dir() or find_gguf(source) is not None:
        return _load_folder(source, task, builder, trust)
    if is_program(source):
        module, origin, traced = builders.load_program(source, trust=trust)
    else:
        module, origin = builders.load(source, builder, arguments or {}, weights_key=weights_key, trust=trust)
        traced = tuple(getattr(module, "inputs", ()))
    stated, rows = inputs or traced, None
    if not stated and samples is not None:
        stated, rows = infer_inputs(prepare(module), samples), take_few(samples)
    return _with_signature(module, origin, stated, task, source, rows)


def _load_folder(folder: Path, task: str | None, builder: str | None, trust: bool) -> Checkpoint:
    if (folder / CARD).is_file():
        return Checkpoint.load(folder, trust=trust)
    if is_adapter(folder):
        return _load_adapter(folder, task, trust)
    if builder:
        raise SourceError(f"{folder} is a folder; with a --builder, expected the file of weights (.safetensors, .pt)")
    is_transformers = (folder / CONFIG).is_file() or (folder / MODULES).is_file()
    if not is_transformers and find_gguf(folder) is None:
        refuse_foreign(folder)
        if (folder / MANIFEST).is_file():
            raise SourceError(f"{folder} is an artifact, for engines alone. Give the checkpoint that it was made from")
        raise SourceError(
            f"{folder} has neither {CARD} nor config.json; expected a saved checkpoint or a folder of transformers "
            f"or timm. For a model of your own, give the file of weights and a --builder"
        )
    return make_checkpoint(load_model(folder, task=task, trust=trust), folder)


def find_task(source: Path) -> str | None:
    """Infer the task of a folder of transformers or timm, of a GGUF file, of a saved checkpoint, or of the model of an
    adapter; None for anything else."""
    if find_gguf(source) is not None:
        return match_architecture("ForCausalLM")
    if (source / CARD).is_file():
        return str(read_source_json(source / CARD).get("task"))
    if is_adapter(source):
        return find_task(read_adapter(source).base)
    if timm_folder.is_timm(source):
        return timm_folder.infer_task(source)
    if (source / CONFIG).is_file() and not (source / MODULES).is_file():
        return infer_task(source, read_source_json(source / CONFIG))
    return None


def make_checkpoint(loaded: Loaded, folder: Path, *, head: tuple[Any, ...] = ()) -> Checkpoint:
    """Make the checkpoint of a loaded folder. head: what a new head was made from beside the folder, JSON-ready.

    Raises SourceError for weights that are NaN or infinite, and for a model that does not run.
    """
    scan = scan_weights(loaded.files) if all(path.suffix == ".safetensors" for path in loaded.files) else None
    if scan is None or not scan.finite:
        check_finite(loaded.module, folder)
    made = loaded.task
    advice = ONE_LENGTH if has_pad_token(loaded.module) else PADDING_ADVICE
    outputs = probe_module(prepare(loaded.module), made.inputs, (loaded.output,), made.sample_inputs, advice=advice)
    return Checkpoint.of(
        loaded.module,
        made,
        outputs=outputs,
        source=loaded.source,
        size=loaded.size,
        licence=read_licence(folder),
        weights=scan and hash_of(scan.digest, *head),
    )


def load_model(folder: Path, *, task: str | None, trust: bool, labels: Sequence[str] = (), seed: int = 0) -> Loaded:
    """Load a folder of transformers, sentence-transformers or timm, or a GGUF file.

    Weights that another program has quantized are restored to float first. labels: the classes of a new head, drawn
    from the seed, in the place of the folder's own if it has one.
    Raises SourceError for a model of another kind or a damaged one, UntrustedSource for one that brings its own code,
    MissingPackage where the library is not installed.
    """
    if timm_folder.is_timm(folder):
        return timm_folder.load(folder, task=task, labels=labels, seed=seed)
    packed = find_gguf(folder)
    with open_float_folder(folder) as opened:
        try:
            loaded = huggingface.load(opened, task=task, trust=trust, labels=labels, seed=seed)
        except SourceError as error:
            raise type(error)(str(error).replace(str(opened), str(folder))) from error
        if opened == folder:
            return loaded
        files = [packed] if packed else [folder / path.relative_to(opened) for path in loaded.files]
        restored, stored = (sum(path.stat().st_size for path in paths) for paths in (loaded.files, files))
    return replace(loaded, files=tuple(files), size=round(loaded.size * stored / restored))


def _load_adapter(folder: Path, task: str | None, trust: bool) -> Checkpoint:
    """Return the model that an adapter belongs to, with the adapter merged into its weights."""
    adapter = read_adapter(folder)
    if not adapter.base.is_dir() or adapter.base.resolve() == folder.resolve():
        raise SourceError(
            f"{folder} is an adapter of {str(adapter.base)!r}, and there is no such folder. Name the folder of its "
            f"model as base_model_name_or_path in adapter_config.json"
        )
    merged = merge_adapter(_load_base(adapter, folder, task, trust), adapter, folder.name)
    template = read_chat_template(folder)
    return merged if template is None else merged.with_task(merged.task.with_chat_template(template.text))


def merge_adapter(base: Checkpoint, adapter: Adapter, name: str) -> Checkpoint:
    """Merge an adapter into the weights of its model, in place; return the checkpoint that this makes. name: of the
    adapter, for the history. Raises SourceError for another model's."""
    if adapter.merge_into(base.module) and "config" in base.source:
        base.source["config"]["tie_word_embeddings"] = False
    key = hash_of(base.key, "adapter", fingerprint(base.module))
    return base.after(Record(stage="finetune", config={"adapter": name}, key=key, figures={}), base.module)


def _load_base(adapter: Adapter, folder: Path, task: str | None, trust: bool) -> Checkpoint:
    """Return the model that an adapter in a folder belongs to, with the tokenizer and the head that the adapter
    brings."""
    tokenizer = [path for path in folder.iterdir() if path.name in TOKENIZER_FILES]
    if (adapter.base / CARD).is_file() or not (tokenizer or adapter.classes):
        return _load_folder(adapter.base, task, None, trust)
    with tempfile.TemporaryDirectory() as scratch:
        overlaid = Path(scratch) / adapter.base.name
        shutil.copytree(adapter.base, overlaid, copy_function=lambda at, to: Path(to).symlink_to(Path(at).resolve()))
        for path in tokenizer:
            (overlaid / path.name).unlink(missing_ok=True)
            shutil.copyfile(path, overlaid / path.name)
        if adapter.classes is None:
            return _load_folder(overlaid, task, None, trust)
        config = read_source_json(overlaid / CONFIG)
        names = huggingface.name_classes(config)
        if len(names) != adapter.classes:
            names = huggingface.name_classes({"num_labels": adapter.classes})
        loaded = load_model(overlaid, task=task or TASKS[adapter.config["task_type"]], trust=trust, labels=names)
        check_head_complete(loaded.module, adapter, overlaid)
        return make_checkpoint(loaded, overlaid, head=("adapter", names))


def check_head_complete(module: nn.Module, adapter: Adapter, base: Path) -> None:
    """Raise SourceError for a head of which neither an adapter nor its model has all weights."""
    model: Any = module.model
    stored = [*adapter.head, *stored_names(weight_files(base))]
    for name, _ in model.named_parameters():
        bare = name.removeprefix(f"{model.base_model_prefix}.")  # as the encoder alone is saved
        if is_head_weight(model, name) and not any(other == bare or other.endswith(f".{bare}") for other in stored):
            raise SourceError(
                f"neither the adapter nor its model {adapter.base} has the weight {name} of the head. Save the adapter "
                f"with that layer among modules_to_save"
            )


def _with_signature(
    module: nn.Module,
    origin: dict[str, Any],
    inputs: tuple[TensorSpec, ...],
    task: str | None,
    path: Path,
    rows: Arrays | None,
) -> Checkpoint:
    """Return a checkpoint of a plain module. task: by default the one for plain arrays. rows: samples to try it on."""
    if not inputs:
        raise SourceError(
            f"nothing says which tensors the module in {path} takes. Give samples in an .npz file (--data), whose "
            f"arrays are named as the parameters of forward; or `inputs` in the recipe"
        )
    module = prepare(module)
    check_finite(module, path)
    inputs = order_inputs(module, inputs)
    purpose = plain_task(task, inputs, path, rows=rows)
    outputs = probe_module(module, inputs, sample=purpose.sample_inputs)
    return Checkpoint.of(module, purpose, outputs=outputs, source=origin, size=path.stat().st_size)


def read_licence(folder: Path) -> str | None:
    """Read the licence that the model's README.md states in its front matter."""
    readme = folder / "README.md"
    parts = readme.read_text(encoding="utf-8", errors="replace").split("---\n", 2) if readme.is_file() else []
    if len(parts) < 3 or parts[0].strip():
        return None
    try:
        front = yaml.safe_load(parts[1])
    except (yaml.YAMLError, ValueError, RecursionError):  # ValueError: a date or a number that there is not
        return None
    licence = front.get("license") if isinstance(front, dict) else None
    return str(licence) if licence else None
