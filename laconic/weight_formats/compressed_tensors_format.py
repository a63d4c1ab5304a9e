"""compressed-tensors, the format of llm-compressor and vLLM: integers, packed or not, and scales."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from laconic.errors import FormatRefused
from laconic.weight_formats.packed_integers import WORD, pack, unpack
from laconic.weight_formats.weight_format import LinearWeight, WritableFormat, dequantize, group_inputs

PACKED, WHOLE = "pack-quantized", "int-quantized"
READ = (PACKED, WHOLE, "naive-quantized", "float-quantized")
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
"""The activations of a layer that multiplies in INT8: a range of each token, found when it is read."""


@dataclass(frozen=True)
class CompressedTensorsFormat(WritableFormat):
    """group_sizes: of the weights of its groups of layers, 0 for all inputs. bits: of their integers."""

    group_sizes: tuple[int, ...]
    bits: tuple[int, ...]

    parts: ClassVar[frozenset[str]] = frozenset(
        {"weight", "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"}
    )

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Self:
        groups = [group for group in settings.get("config_groups", {}).values() if group.get("weights")]
        formats = {group.get("format") or settings.get("format") for group in groups} - {"dense"}
        if not groups or not formats <= set(READ) or settings.get("sparsity_config"):
            raise FormatRefused(f"the format {', '.join(map(str, formats))} is not read, of {', '.join(READ)} each is")
        weights = [group["weights"] for group in groups]
        sizes = {int(each.get("group_size") or 0) for each in weights}
        return cls(tuple(sorted(sizes)), tuple(sorted({int(each["num_bits"]) for each in weights})))

    def restore(self, parts: Mapping[str, Tensor]) -> Tensor:
        scales = parts["weight_scale"].reshape(-1, parts["weight_scale"].shape[-1] if parts["weight_scale"].ndim else 1)
        if "weight_packed" not in parts:
            return self._dequantize(parts["weight"], parts.get("weight_zero_point", 0), scales, parts)
        rows, inputs = map(int, parts["weight_shape"])
        bits = self._find_bits(inputs, parts["weight_packed"].shape[-1])
        integers = unpack(parts["weight_packed"], bits)[:, :inputs]
        zeros: Tensor | int = 1 << (bits - 1)
        if (packed := parts.get("weight_zero_point")) is not None:
            is_packed = packed.dtype == torch.int32
            zeros = unpack(packed.T.contiguous(), bits)[:, :rows].T if is_packed else packed + zeros
        return self._dequantize(integers, zeros, scales, parts)

    def _dequantize(self, integers: Tensor, zeros: Tensor | int, scales: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
        rows, inputs = integers.shape
        groups = parts.get("weight_g_idx")
        if groups is None:
            fitting = [
                size for size in self.group_sizes if -(-inputs // (size if size > 0 else inputs)) == scales.shape[1]
            ]
            groups = group_inputs(inputs, scales.shape[1], fitting[0] if fitting else -(-inputs // scales.shape[1]))
        if isinstance(zeros, Tensor):
            zeros = zeros.reshape(-1, scales.shape[1]).expand(rows, -1)
        return dequantize(integers, zeros, scales.expand(rows, -1), groups.long())

    def _find_bits(self, inputs: int, words: int) -> int:
        for bits in self.bits:
            if WORD % bits == 0 and -(-inputs * bits // WORD) == words:
                return bits
        raise FormatRefused(f"{inputs} inputs do not fit {words} words with integers of {self.bits} bits")

    @classmethod
    def describe(cls, layers: Mapping[str, LinearWeight], others: list[str]) -> dict[str, Any]:
        schemes: dict[tuple[int, int | None, bool], list[str]] = {}
        for name, layer in layers.items():
            if layer.weight.zeros is not None:
                raise FormatRefused(
                    f"{name} has zeros beside its scales, which transformers does not read back here. "
                    f"Compress with symmetric: true, or write GGUF"
                )
            if layer.group_size and layer.weight.integers.shape[0] % layer.group_size:
                raise FormatRefused(
                    f"{name} has {layer.weight.integers.shape[0]} inputs, which groups of {layer.group_size} do not "
                    f"divide, as compressed-tensors asks. Compress with another group_size"
                )
            schemes.setdefault((layer.bits, layer.group_size, layer.has_integer_inputs), []).append(name)
        groups: dict[str, Any] = {}
        for index, ((bits, size, is_integer), names) in enumerate(schemes.items()):
            weights = {"num_bits": bits, "type": "int", "symmetric": True, "dynamic": False}
            weights |= {"strategy": "group", "group_size": size} if size else {"strategy": "channel"}
            groups[f"group_{index}"] = {
                "targets": ["Linear"] if len(schemes) == 1 else names,
                "weights": weights,
                "input_activations": PER_TOKEN if is_integer else None,
                "output_activations": None,
                "format": WHOLE if is_integer else PACKED,
            }
        formats = {group["format"] for group in groups.values()}
        return {
            "quant_method": "compressed-tensors",
            "format": formats.pop() if len(formats) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": groups,
            "ignore": others,
            "kv_cache_scheme": None,
        }

    @classmethod
    def store(cls, layer: LinearWeight) -> dict[str, Tensor]:
        scales = torch.tensor(layer.weight.scales).T.contiguous()
        if layer.has_integer_inputs:
            return {"weight": torch.tensor(layer.weight.integers).T.contiguous(), "weight_scale": scales}
        integers = layer.integers
        shape = torch.tensor(integers.shape)
        return {"weight_packed": pack(integers, layer.bits), "weight_scale": scales, "weight_shape": shape}
