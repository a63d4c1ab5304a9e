"""Folders of transformers with weights as compressed-tensors and GPTQ store them, and what is beside the weights."""

import json
from pathlib import Path
from typing import Any

import transformers
from safetensors.torch import save_file
from torch import Tensor, nn

from export.formats.quantized_model import QuantizedModel
from laconic.errors import FormatRefused
from laconic.weight_formats.compressed_tensors_format import CompressedTensorsFormat
from laconic.weight_formats.gptq_format import GptqFormat
from laconic.weight_formats.weight_format import LinearWeight, WritableFormat


def write_compressed_tensors(source: QuantizedModel, destination: Path) -> list[str]:
    """Write a folder that transformers and vLLM read with compressed-tensors; return what is stored in another way."""
    return write_folder(source, CompressedTensorsFormat, destination)


def write_gptq(source: QuantizedModel, destination: Path) -> list[str]:
    """Write a folder in the layout of AutoGPTQ, which GPTQModel and vLLM read; return what is stored in another way."""
    return write_folder(source, GptqFormat, destination)


def write_folder(source: QuantizedModel, form: type[WritableFormat], destination: Path) -> list[str]:
    """Write config.json, weights, tokenizer and settings of generation. Raises FormatRefused for a layer that the
    format cannot hold."""
    linear, others = find_linear(source, form)
    settings = form.describe(linear, others)
    weights: dict[str, Tensor] = {}
    for path, layer in source.model.named_modules():
        for name, parameter in layer.named_parameters(path, recurse=False):
            if name != f"{path}.weight" or path not in linear:
                weights[name] = parameter.data
    if source.has_tied_head:
        weights.pop("lm_head.weight", None)
    for path, quantized in linear.items():
        weights |= {f"{path}.{part}": tensor for part, tensor in form.store(quantized).items()}
    destination.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, destination / "model.safetensors",
              metadata={"format": "pt"})  # fmt: skip
    write_config(source, destination)
    path = destination / "config.json"
    config = json.loads(path.read_text(encoding="utf-8")) | {"quantization_config": settings}
    path.write_text(json.dumps(config, indent=2), encoding="utf-8")
    return [f"{name} is in FP32, in which its integers are exact" for name in sorted({*source.layers} - {*linear})]


def find_linear(source: QuantizedModel, form: type[WritableFormat]) -> tuple[dict[str, LinearWeight], list[str]]:
    """Find the quantized linear layers by the path of their module, and the paths of those in float: among them a head
    with the weight of the embeddings, and one that the format does not hold. Raises FormatRefused where none is
    quantized, or one is of another class than Linear."""
    linear: dict[str, LinearWeight] = {}
    others: list[str] = []
    head = source.model.get_output_embeddings()
    for path, module in source.model.named_modules():
        is_kept = module is head and (source.has_tied_head or not form.holds_head)
        if path in source.layers and not isinstance(module, nn.Embedding) and not is_kept:
            if not isinstance(module, nn.Linear):
                raise FormatRefused(
                    f"{path} is a {type(module).__name__}, and these formats hold layers of class Linear"
                )
            linear[path] = source.layers[path]
        elif isinstance(module, nn.Linear):
            others.append(path)
    if not linear:
        raise FormatRefused(f"{source.artifact.path} has no weights in 8 or 4 bits. Compress it with quantize.weights")
    return linear, others


def write_config(source: QuantizedModel, folder: Path) -> None:
    """Write what transformers reads beside the weights: config.json, generation_config.json, tokenizer and chat
    template."""
    config = source.model.config
    config.use_cache = True
    config.save_pretrained(folder)
    settings, task = source.task.settings, source.task
    ends = list(settings.eos_token_id)
    generation = transformers.GenerationConfig(
        bos_token_id=config.bos_token_id, pad_token_id=settings.pad_token_id,
        eos_token_id=ends if len(ends) > 1 else next(iter(ends), None), max_new_tokens=settings.max_new_tokens,
    )  # fmt: skip
    generation.save_pretrained(folder)
    tokenizer = read_tokenizer(source)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    words: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": task.max_tokens}
    words |= {"clean_up_tokenization_spaces": False} | find_special_tokens(source)
    (folder / "tokenizer_config.json").write_text(json.dumps(words, indent=2, ensure_ascii=False), encoding="utf-8")
    if task.chat is not None:
        (folder / "chat_template.jinja").write_text(task.chat.text, encoding="utf-8")
        if task.chat.tool_text:
            more = folder / "additional_chat_templates"
            more.mkdir()
            (more / "tool_use.jinja").write_text(task.chat.tool_text, encoding="utf-8")


def read_tokenizer(source: QuantizedModel) -> dict[str, Any]:
    """Read the tokenizer of an artifact as JSON, without the length that it cuts texts to."""
    content = json.loads((source.artifact.path / "tokenizer.json").read_text(encoding="utf-8"))
    return dict(content | {"truncation": None, "padding": None})


def find_special_tokens(source: QuantizedModel) -> dict[str, str]:
    """Find the special tokens by what they are for, as `eos_token`."""
    task = source.task
    ids = {"bos_token": source.model.config.bos_token_id, "eos_token": task.end_id, "pad_token": task.pad_id}
    named = {name: task.tokenizer.id_to_token(index) for name, index in ids.items() if isinstance(index, int)}
    tokens = named | (dict(task.chat.tokens) if task.chat is not None else {})
    return {name: token for name, token in tokens.items() if token is not None}
