"""GGUF, the format of llama.cpp: weights in blocks of 32, tokenizer, chat template and the shape of the model."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Types

from export.formats.gguf_tokenizer import add_tokenizer
from export.formats.quantized_model import QuantizedModel, QuantizedModule
from laconic.arrays import Array
from laconic.errors import FormatRefused
from laconic.quantization.plan import QuantizedWeight
from laconic.quantization.qparams import expand_scales
from laconic.weight_formats.weight_format import LinearWeight

EMBEDDING = "token_embd.weight"
BLOCK = 32
"""Inputs that share a scale."""


@dataclass(frozen=True)
class Family:
    """A family of models. architecture: its name in GGUF. is_permuted: whether llama.cpp rotates neighbouring numbers
    of queries and keys, where transformers rotates numbers half a head apart. has_factors: whether it reads factors of
    the rotations' periods."""

    architecture: gguf.MODEL_ARCH
    is_permuted: bool = False
    has_factors: bool = False


FAMILIES = {
    "llama": Family(gguf.MODEL_ARCH.LLAMA, is_permuted=True, has_factors=True),
    "mistral": Family(gguf.MODEL_ARCH.LLAMA, is_permuted=True),
    "qwen2": Family(gguf.MODEL_ARCH.QWEN2),
    "qwen3": Family(gguf.MODEL_ARCH.QWEN3),
}
"""By `model_type`, the families whose tensors and metadata are known here."""
FILE_TYPES = {
    Types.Q8_0: gguf.LlamaFileType.MOSTLY_Q8_0,
    Types.Q4_0: gguf.LlamaFileType.MOSTLY_Q4_0,
    Types.Q4_1: gguf.LlamaFileType.MOSTLY_Q4_1,
}


def write_gguf(source: QuantizedModel, destination: Path) -> list[str]:
    """Write a GGUF file; return what is stored in another way than in the artifact.

    Raises FormatRefused for a family, a tokenizer or a weight that the file cannot hold.
    """

    def describe(writer: gguf.GGUFWriter) -> None:
        writer.add_name(source.artifact.name)
        add_tokenizer(writer, source)

    tensors = write_tensors(source, destination, describe)
    notes = []
    if source.layers and tensors[EMBEDDING] == Types.F32:
        notes.append(f"{EMBEDDING} is in FP32: FP16 does not represent its scales")
    if any(has_rounded_minima(layer.weight) for layer in source.layers.values()):
        notes.append("zeros are stored as the least number of a group, in FP16, which rounds it by up to 0.05 %")
    return notes


def write_engine_file(source: QuantizedModule, destination: Path) -> None:
    """Write a GGUF file for an engine that is given tokens: without a tokenizer. Raises FormatRefused for a family or a
    weight that the file cannot hold."""
    write_tensors(source, destination, lambda writer: writer.add_tokenizer_model("no_vocab"))


def write_tensors(
    source: QuantizedModule, destination: Path, describe: Callable[[gguf.GGUFWriter], None]
) -> dict[str, Types]:
    """Write a GGUF file; return the types of its tensors, by their names. describe: adds what is known beside the
    weights and the shape of the model. Raises FormatRefused."""
    config = source.model.config
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise FormatRefused(
            f"models of type {config.model_type!r} are not written as GGUF; those of {', '.join(FAMILIES)} are. Write "
            f"compressed-tensors"
        )
    tensors = list(iterate_tensors(source, family))
    types = [kind for _, _, kind in tensors if kind in FILE_TYPES]
    writer = gguf.GGUFWriter(destination, gguf.MODEL_ARCH_NAMES[family.architecture])
    add_shape(writer, config)
    main = max(set(types), key=types.count, default=None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32 if main is None else FILE_TYPES[main])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    describe(writer)
    for name, array, kind in tensors:
        writer.add_tensor(name, array, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return {name: kind for name, _, kind in tensors}


def has_rounded_minima(weight: QuantizedWeight) -> bool:
    """Return whether FP16 changes the least number of a group, of a weight with zeros, by more than FP32 rounds."""
    if weight.zeros is None:
        return False
    minima = find_minima(weight.scales, weight.zeros)
    return not np.allclose(minima.astype(np.float16), minima, rtol=1e-6, atol=0)


def find_minima(scales: Array, zeros: Array) -> Array:
    """Return the number that the lowest integer of a group in 4 bits stands for."""
    return np.asarray(-scales * (zeros + 8), np.float32)


def add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the metadata about the layers. Raises FormatRefused for a sliding window, and positions of a kind that the
    file does not describe."""
    if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
        raise FormatRefused(
            f"the attention has a sliding window of {config.sliding_window} tokens, which llama.cpp does not apply to "
            f"models of this family"
        )
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    width = find_head_width(config)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])


def find_head_width(config: Any) -> int:
    """Return the numbers of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def iterate_tensors(source: QuantizedModule, family: Family) -> Iterator[tuple[str, Array, Types]]:
    """Yield the tensors of the file: name, bytes or numbers, and type. Raises FormatRefused for a name that llama.cpp
    does not know, and a weight that its types cannot hold."""
    config = source.model.config
    names = gguf.get_tensor_name_map(family.architecture, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for path, layer in source.model.named_modules():
        for name, parameter in layer.named_parameters(path, recurse=False):
            if source.has_tied_head and path == "lm_head":
                continue
            known = names.get_name(name, try_suffixes=(".weight", ".bias"))
            if known is None:
                raise FormatRefused(
                    f"llama.cpp has no place for the weight {name} in models of type {config.model_type!r}"
                )
            count = heads.get(path.rpartition(".")[2]) if family.is_permuted else None
            quantized = source.layers.get(path) if name == f"{path}.weight" else None
            packed = None if quantized is None else pack(name, permute_weight(quantized, count))
            yield known, *(packed or shrink(permute(parameter.detach().numpy(), count)))
    if (factors := find_period_factors(source, family)) is not None:
        yield "rope_freqs.weight", factors, Types.F32


def find_period_factors(source: QuantizedModule, family: Family) -> Array | None:
    """Find by how much the periods of the rotations are longer than by their base alone; None where they are not.
    Raises FormatRefused for positions that a file of the family cannot describe."""
    rotary, config = source.model.base_model.rotary_emb, source.model.config
    width = find_head_width(config)
    plain = 1 / config.rope_parameters["rope_theta"] ** (np.arange(0, width, 2, dtype=np.float32) / width)
    kind = config.rope_parameters.get("rope_type", "default")
    factors = np.asarray(plain / rotary.inv_freq.numpy(), np.float32)
    if np.allclose(factors, 1, rtol=1e-5) and rotary.attention_scaling == 1:
        return None
    if not family.has_factors or rotary.attention_scaling != 1 or kind not in ("linear", "llama3"):
        raise FormatRefused(f"the model counts positions by {kind!r}, which is not written as GGUF for its family")
    return factors


def permute(array: Array, heads: int | None) -> Array:
    """Reorder the rows of each head from halves to neighbours. heads: None leaves the array as it is."""
    if heads is None:
        return array
    return array.reshape(heads, 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def permute_weight(layer: LinearWeight, heads: int | None) -> LinearWeight:
    """Reorder the outputs of a quantized weight."""
    weight = layer.weight
    zeros = None if weight.zeros is None else permute(weight.zeros.T, heads).T
    integers, scales = permute(weight.integers.T, heads).T, permute(weight.scales.T, heads).T
    return LinearWeight(QuantizedWeight(integers, scales, None, weight.group_size, zeros), layer.bits)


def pack(name: str, layer: LinearWeight) -> tuple[Array, Types] | None:
    """Pack a weight into the blocks of llama.cpp; None for an embedding whose scales FP16 does not represent. Raises
    FormatRefused for a linear layer with such scales, and for groups that are not whole blocks."""
    weight, rows = layer.weight, len(layer.weight.integers)
    step = rows if weight.group_size is None else min(weight.group_size, rows)
    if rows % BLOCK or (step % BLOCK and step != rows):
        raise FormatRefused(f"{name} has {rows} inputs in groups of {step}, which blocks of {BLOCK} do not divide")
    scales = expand_scales(weight.scales, rows, weight.group_size)[::BLOCK].T
    half = scales.clip(max=np.finfo(np.float16).max).astype(np.float16)
    if not np.array_equal(half.astype(np.float32)[scales > TINY], scales[scales > TINY]):
        if name.endswith("embed_tokens.weight"):
            return None
        raise FormatRefused(
            f"{name} has scales that FP16 does not represent, as GGUF stores them. Compress with group_size: {BLOCK}"
        )
    blocks = weight.integers.T.reshape(len(scales), -1, BLOCK)
    parts: list[Array] = [half[..., None].view(np.uint8)]
    if layer.bits == 8:
        return join([*parts, blocks.astype(np.int8).view(np.uint8)]), Types.Q8_0
    if weight.zeros is not None:
        zeros = expand_scales(weight.zeros, rows, weight.group_size)[::BLOCK].T
        parts.append(find_minima(scales, zeros).astype(np.float16)[..., None].view(np.uint8))
    shifted = (blocks.astype(np.int16) + 8).astype(np.uint8)
    parts.append(shifted[..., : BLOCK // 2] | shifted[..., BLOCK // 2 :] << 4)
    return join(parts), Types.Q4_0 if weight.zeros is None else Types.Q4_1


TINY = 2.0**-24
"""The least number of FP16 above 0: a group with a smaller scale has no weights but zeros."""


def join(parts: list[Array]) -> Array:
    """Join the bytes of each block, [rows, blocks, bytes], to rows of bytes."""
    joined = np.concatenate(parts, axis=-1)
    return np.ascontiguousarray(joined.reshape(len(joined), -1))


def shrink(array: Array) -> tuple[Array, Types]:
    """Return numbers in FP16 if that represents a matrix exactly, else in FP32, with their type."""
    half = array.astype(np.float16) if array.ndim > 1 else array
    if array.ndim > 1 and np.array_equal(half.astype(np.float32), array):
        return half, Types.F16
    return np.ascontiguousarray(array, np.float32), Types.F32
