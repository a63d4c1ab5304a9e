"""What calibration found for a plan, as arrays by name: ranges, SmoothQuant factors, bias corrections, flags. And the
digest of a plan."""

import numpy as np

from laconic.arrays import Array, Arrays
from laconic.hashing import digest_arrays, hash_of
from laconic.quantization.plan import Plan, Range, Smoothing

FLAGS = {"attention": True, "int8_kv_cache": False, "int4_value_cache": False}
"""The flags of a plan, [] bool, which are there where they are not as here."""


def pack_plan(plan: Plan) -> Arrays:
    """Return the ranges, the smoothing and the bias corrections of a plan, and its flags, as arrays by name. Its
    weights are left out: the graph that it was placed in holds them."""
    arrays: Arrays = {f"range:{name}": np.array([each.low, each.high]) for name, each in plan.ranges.items()}
    for name, each in plan.smoothing.items():
        arrays[f"factors:{name}"] = each.factors
        arrays[f"limits:{name}"] = np.array([each.limits.low, each.limits.high])
    for (node, precision), weight in plan.weights.items():
        if weight.bias_correction is not None and plan.precision.get(node) == precision:
            arrays[f"bias:{node}"] = weight.bias_correction
    flags = {name: getattr(plan, name) for name in FLAGS}
    return arrays | {name: np.array(flag) for name, flag in flags.items() if flag != FLAGS[name]}


def unpack_flags(arrays: Arrays) -> dict[str, bool]:
    """Return the flags of a plan, by packed arrays."""
    return {name: bool(arrays.get(name, default)) for name, default in FLAGS.items()}


def unpack_ranges(arrays: Arrays) -> dict[str, Range]:
    """Return the ranges among packed arrays, by tensor."""
    return {name: to_range(array) for name, array in select(arrays, "range")}


def unpack_smoothing(arrays: Arrays) -> dict[str, Smoothing]:
    """Return the smoothing among packed arrays, by tensor."""
    return {name: Smoothing(array, to_range(arrays[f"limits:{name}"])) for name, array in select(arrays, "factors")}


def unpack_bias_corrections(arrays: Arrays) -> dict[str, Array]:
    """Return the bias corrections among packed arrays, by layer (node)."""
    return dict(select(arrays, "bias"))


def select(arrays: Arrays, kind: str) -> list[tuple[str, Array]]:
    """Return the arrays of one kind, each with the name of what it belongs to."""
    return [(key.partition(":")[2], array) for key, array in arrays.items() if key.startswith(f"{kind}:")]


def to_range(array: Array) -> Range:
    """Return the range that [low, high] is."""
    return Range(float(array[0]), float(array[1]))


def digest_plan(plan: Plan) -> str:
    """Return the digest of everything that is planned: plans with the same digest give the same graph."""
    return hash_of(
        sorted(plan.precision.items()),
        sorted((name, limits.low, limits.high) for name, limits in plan.ranges.items()),
        sorted(
            (name, smoothing.limits.low, smoothing.limits.high, digest_arrays({"factors": smoothing.factors}))
            for name, smoothing in plan.smoothing.items()
        ),
        sorted((*layer, weight.group_size, digest_arrays(weight.arrays)) for layer, weight in plan.weights.items()),
        plan.attention,
        plan.int8_kv_cache,
        plan.int4_value_cache,
    )
