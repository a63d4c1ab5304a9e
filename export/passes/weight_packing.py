"""Weights in 4 and 8 bits as engines store them: blocks of inputs, two numbers of 4 bits to a byte."""

from collections.abc import Sequence

import numpy as np
from onnx import TensorProto, helper

from laconic.arrays import Array
from laconic.quantization.plan import Bits, QuantizedWeight


def narrow(scales: Array) -> Array:
    """Return scales in FP16 where that represents all of them, else as they are."""
    half = scales.clip(max=np.finfo(np.float16).max).astype(np.float16)
    return half if np.array_equal(half.astype(np.float32), scales) else scales


def make_int4(name: str, array: Array) -> TensorProto:
    """Make an INT4 tensor. array: int8, from -8 to 7."""
    flat = np.append(array.reshape(-1), np.zeros(array.size % 2, np.int8)).view(np.uint8) & 15
    nibbles = (flat[0::2] | flat[1::2] << 4).astype(np.uint8)
    return helper.make_tensor(name, TensorProto.INT4, array.shape, nibbles.tobytes(), raw=True)


def offset(bits: Bits) -> int:
    """Return what is added to signed integers to store them without a sign."""
    return 1 << (bits - 1)


def pack_blocks(integers: Array, step: int, bits: Bits) -> Array:
    """Pack integers [in, out] as blocks of inputs, [out, blocks, bytes] uint8."""
    padded = pad_inputs(integers, step)
    return pack_levels(padded.T.reshape(padded.shape[1], -1, step), bits)


def pack_levels(levels: Array, bits: Bits) -> Array:
    """Pack whole numbers [..., count] without a sign, those of 4 bits two to a byte: [..., bytes] uint8."""
    unsigned = (levels.astype(np.int16) + offset(bits)).astype(np.uint8)
    if bits == 8:
        return unsigned
    unsigned = np.pad(unsigned, [(0, 0)] * (unsigned.ndim - 1) + [(0, unsigned.shape[-1] % 2)])
    return np.asarray(unsigned[..., 0::2] | unsigned[..., 1::2] << 4, np.uint8)


def unpack_blocks(packed: Array, rows: int, bits: Bits) -> Array:
    """Undo `pack_blocks`: integers [in, out] int8. rows: the number of inputs."""
    return np.ascontiguousarray(unpack_levels(packed, bits).reshape(len(packed), -1).T[:rows])


def unpack_levels(packed: Array, bits: Bits) -> Array:
    """Undo `pack_levels`, but for a number that filled the last byte: int8."""
    if bits == 4:
        packed = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    return (packed.astype(np.int16) - offset(bits)).astype(np.int8)


def pad_inputs(integers: Array, step: int) -> Array:
    """Pad integers [in, out] with zeros to a multiple of `step` inputs."""
    return np.pad(integers, ((0, -len(integers) % step), (0, 0)))


def unpack_weight(packed: Array, parameters: Sequence[Array], step: int, rows: int, bits: Bits) -> QuantizedWeight:
    """Undo the packing of a weight in blocks. parameters: its scales, and its zeros if it has some. step: inputs of a
    block. rows: the number of inputs."""
    scales = parameters[0].reshape(len(packed), -1).T.astype(np.float32)
    zeros = None
    if len(parameters) > 1:
        stored = parameters[1].reshape(len(packed), -1)
        zeros = unpack_levels(stored, bits) if stored.dtype == np.uint8 else stored - offset(bits)
        zeros = zeros[:, : len(scales)].T.astype(np.float32)
    return QuantizedWeight(unpack_blocks(packed, rows, bits), scales, group_size=step, zeros=zeros)
