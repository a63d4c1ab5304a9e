"""LoRA adapters (Hu et al., 2021) in peft's format, read for an engine that computes with them beside one base."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from laconic.arrays import Array
from laconic.errors import SourceError
from laconic.hashing import digest_arrays
from laconic.runtimes.adapter_config import PREFIX, WEIGHTS, A, B, find_scale, read_adapter_config
from laconic.runtimes.adapter_graph import LinearProduct

WHOLE = ("lora_bias", "modules_to_save", "trainable_token_indices", "use_dora")
"""Settings with which an adapter is more than products of two matrices beside those of its base."""
COMPRESS = "serve it merged, as an artifact of its own: laconic compress"
DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
"""The numpy dtype of the bytes of each dtype of safetensors. BF16 is the upper half of FP32."""


@dataclass(frozen=True)
class LowRankAdapter:
    """An adapter. rank: the largest of its layers. factors: by module, A [inputs, rank] and B [rank, outputs] in FP32;
    B has the scale in it. digest: of all of this."""

    rank: int
    factors: Mapping[str, tuple[Array, Array]]
    digest: bytes


def read_low_rank_adapter(folder: Path, products: Sequence[LinearProduct]) -> LowRankAdapter:
    """Read the adapter in a folder. products: of its base, which it may be for. Raises SourceError for one that is more
    than LoRA, one of another base, and one that has values that are no numbers."""
    config = read_adapter_config(folder)
    if refused := [key for key in WHOLE if config.get(key)]:
        raise SourceError(
            f"{folder} holds an adapter with {', '.join(refused)}, which is not computed beside its base. Instead, "
            f"{COMPRESS} {folder}"
        )
    tensors = read_tensors(folder / WEIGHTS)
    modules = sorted({name.removesuffix(A).removesuffix(B) for name in tensors})
    known = {product.module: product for product in products}
    factors = {}
    for module in modules:
        down, up = tensors.get(f"{module}{A}"), tensors.get(f"{module}{B}")
        own = module.removeprefix(PREFIX)
        if own not in known or not module.startswith(PREFIX):
            raise SourceError(
                f"{folder} holds an adapter for a layer {own}, and the served model has none of that name that takes "
                f"one. Serve it beside the model that it was trained on. If it is this one: {COMPRESS} {folder}"
            )
        if down is None or up is None:
            raise SourceError(f"the adapter of {own} in {folder} is incomplete. Copy the folder again")
        factors[own] = read_factors(config, known[own], down, up, folder)
    if not factors:
        raise SourceError(f"{folder / WEIGHTS} holds no tensors. Copy the folder again")
    rank = max(len(up) for _, up in factors.values())
    arrays = {f"{module}.{index}": pair[index] for module, pair in factors.items() for index in (0, 1)}
    return LowRankAdapter(rank, factors, digest_arrays(arrays).encode())


def read_factors(
    config: Mapping[str, Any], product: LinearProduct, down: Array, up: Array, folder: Path
) -> tuple[Array, Array]:
    """Read the matrices of a layer, as they are multiplied. down, up: as stored, [rank, inputs] and [outputs, rank].
    Raises SourceError where they do not fit."""
    rank = len(down)
    if down.shape != (rank, product.inputs) or up.shape != (product.outputs, rank) or not rank:
        raise SourceError(
            f"{folder} holds an adapter for a layer {product.module} with matrices {list(down.shape)} and "
            f"{list(up.shape)}, and that of the served model has {product.inputs} inputs and {product.outputs} "
            f"outputs. Serve it beside the model that it was trained on"
        )
    factors = (
        np.ascontiguousarray(down.T),
        np.ascontiguousarray(up.T) * np.float32(find_scale(config, product.module, rank)),
    )
    if not all(np.isfinite(factor).all() for factor in factors):
        raise SourceError(f"the adapter of {product.module} in {folder} has values that are no numbers. Train it again")
    return factors


def read_tensors(path: Path) -> dict[str, Array]:
    """Read the tensors of a safetensors file, in FP32. Raises SourceError."""
    try:
        tensors = deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except (OSError, SafetensorError) as error:
        raise SourceError(f"{path} does not read as safetensors: {error}. Copy the folder again") from error
    arrays = {}
    for name, tensor in tensors:
        if tensor["dtype"] not in DTYPES:
            raise SourceError(f"{path} holds {name} as {tensor['dtype']}. Save it as one of {', '.join(DTYPES)}")
        stored = np.frombuffer(tensor["data"], DTYPES[tensor["dtype"]]).reshape(tensor["shape"])
        is_half = tensor["dtype"] == "BF16"
        arrays[name] = (stored.astype(np.uint32) << 16).view(np.float32) if is_half else stored.astype(np.float32)
    return arrays


class AdapterStack:
    """The adapters that a batch computes with, side by side: inputs of its graph.

    products: of the graph. tensors: the inputs, which are other arrays after each change.
    """

    def __init__(self, products: Sequence[LinearProduct]) -> None:
        self._products = products
        self._stacked: list[LowRankAdapter] = []
        self.tensors: dict[str, Array] = self._join()

    def choose(self, rows: Sequence[LowRankAdapter | None]) -> Array:
        """Choose the adapter of each row of a batch, None for the base alone; return the mask, [rows, 1, columns]. The
        tensors change where a row's adapter is not among them, or none is needed."""
        needed = list({id(row): row for row in rows if row is not None}.values())
        if {id(each) for each in needed} - {id(each) for each in self._stacked} or (self._stacked and not needed):
            self._stacked = needed
            self.tensors = self._join()
        mask = np.zeros((len(rows), 1, sum(each.rank for each in self._stacked)), np.float32)
        start = 0
        for adapter in self._stacked:
            mask[[row is adapter for row in rows], :, start : start + adapter.rank] = 1
            start += adapter.rank
        return mask

    def _join(self) -> dict[str, Array]:
        """Join the matrices of the adapters, with zeros where an adapter leaves a layer alone, or has fewer columns
        there than elsewhere."""
        columns = sum(adapter.rank for adapter in self._stacked)
        joined = {}
        for product in self._products:
            first, second = product.names
            joined[first] = np.zeros((product.inputs, columns), np.float32)
            joined[second] = np.zeros((columns, product.outputs), np.float32)
            start = 0
            for adapter in self._stacked:
                if product.module in adapter.factors:
                    down, up = adapter.factors[product.module]
                    joined[first][:, start : start + len(up)] = down
                    joined[second][start : start + len(up)] = up
                start += adapter.rank
        return joined
