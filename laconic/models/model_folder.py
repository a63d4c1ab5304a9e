"""The folder of a model: its JSON files; and folders of other libraries, or without weights, named for what they
are."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from laconic import registry
from laconic.errors import SourceError
from laconic.files import read_json


def read_source_json(path: Path) -> Any:
    """Read the JSON in a file of the source. Raises SourceError."""
    try:
        return read_json(path)
    except FileNotFoundError:
        raise SourceError(f"{path} is missing. Copy the model's folder again, with all of its files") from None
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} does not read as JSON: {error}. Copy the model's folder again") from error


POINTER = b"version https://git-lfs.github.com/spec"
"""The beginning of a file that stands for one of Git LFS."""
OTHERS = {
    "*.gguf": "in several GGUF files. Give one of them as the source",
    "flax_model*.msgpack": "of Flax, which transformers reads no more. Save them for PyTorch, with transformers 4",
    "tf_model*.h5": "of TensorFlow, which transformers reads no more. Save them for PyTorch, with transformers 4",
    "consolidated*": "in the layout of their authors. Convert them with the script of transformers for the family",
    "openvino_model.xml": "for OpenVINO alone. Give the folder that they were made from, or an ONNX file",
    "*.onnx": "as ONNX alone. Give the .onnx file itself as the source",
    "*.nemo": "of NeMo. Export them to ONNX, or give the folder of transformers",
}
"""By a pattern of files, what weights they hold, and what to do."""


def find_gguf(source: Path) -> Path | None:
    """Find the GGUF file that a source is, or the only one in a folder without other weights; None without one."""
    if source.is_file():
        return source if source.suffix.lower() == ".gguf" else None
    files = list(source.glob("*.gguf"))
    others = any(source.glob("*.safetensors")) or any(source.glob("pytorch_model*.bin"))
    return files[0] if len(files) == 1 and not others else None


def refuse_foreign(folder: Path) -> None:
    """Raise SourceError for a folder that is not of transformers, or lacks its weights, with what it is."""
    if (folder / "model_index.json").is_file():
        raise SourceError(
            f"{folder} is a pipeline of diffusers, of several models in folders of their own. Give the weights of one "
            f"with a --builder, as unet/diffusion_pytorch_model.safetensors"
        )
    config = read_source_json(folder / "config.json") if (folder / "config.json").is_file() else {}
    if not isinstance(config, dict):
        raise SourceError(f"{folder / 'config.json'} holds no settings by name. Copy the model's folder again")
    refuse_quantized(folder, config)
    if any(folder.glob("*.safetensors")) or any(folder.glob("pytorch_model*.bin")):
        refuse_pointers(folder)
        return
    for pattern, said in OTHERS.items():
        if files := sorted(folder.glob(pattern)):
            raise SourceError(f"{folder} holds weights {said} ({files[0].name})")


QUANTIZATION = "quantization_config"
"""The key of config.json that says how another library has quantized the weights."""


def read_quantization(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Read how another library has quantized the weights in a folder; nothing where it has not. Raises SourceError for
    settings of another form."""
    if isinstance(config.get("quantization"), dict):
        return {"quant_method": "MLX"}
    settings = config.get(QUANTIZATION) or {}
    if not settings and (folder / "quantize_config.json").is_file():  # as AutoGPTQ writes beside config.json
        settings = read_source_json(folder / "quantize_config.json")
        settings = {"quant_method": "gptq"} | settings if isinstance(settings, dict) else settings
    if not isinstance(settings, dict) or not isinstance(settings.get("quant_method"), str | None):
        raise SourceError(
            f"the settings of quantization in {folder} are not of their form. Expected a mapping whose quant_method is "
            f"a name; copy the folder again"
        )
    return settings


def refuse_quantized(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise SourceError for a model whose weights another library has quantized, in a format that is not read."""
    method = read_quantization(folder, config).get("quant_method")
    if method and method not in registry.WEIGHT_FORMATS:
        raise SourceError(
            f"the weights in {folder} are quantized already, by {method}, and those by "
            f"{', '.join(registry.WEIGHT_FORMATS)} are read. Give the folder with the float weights that they come from"
        )


def refuse_pointers(folder: Path) -> None:
    """Raise SourceError for files that Git LFS has not fetched."""
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.bin")):
        with path.open("rb") as file:
            if file.read(len(POINTER)) == POINTER:
                raise SourceError(
                    f"{path} is a pointer of Git LFS and not the file itself. Fetch it with git lfs pull, in its folder"
                )
