"""Parsing of quantities with units: shares, durations and sizes, as 1%, 3 ms, 25 MB."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, PlainSerializer, TypeAdapter, ValidationError, WithJsonSchema

from laconic.errors import UsageError

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
BUDGETS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ%]*)\s*", re.IGNORECASE)
SIZE = TypeAdapter(ByteSize)


def split_unit(value: str) -> tuple[float, str]:
    """Split "3 ms" into its number and its unit. Raises ValueError."""
    match = NUMBER.fullmatch(value)
    if match is None:
        raise ValueError("not a number with a unit")
    return float(match[1]), match[2].lower()


def parse_share(value: Any) -> float:
    """Parse a share, "1%" or 0.01, to a number from 0 to 1."""
    try:
        number, unit = split_unit(value) if isinstance(value, str) else (float(value), "")
    except (TypeError, ValueError):
        number, unit = -1.0, ""
    share = number / 100 if unit == "%" else number
    if unit not in ("", "%") or isinstance(value, bool) or not 0 <= share <= 1:
        raise ValueError(f"expected a share as 1% or 0.01, got {value!r}")
    return share


def parse_seconds(value: Any) -> float:
    """Parse a duration, "3 ms", to seconds. A number without a unit is refused as ambiguous."""
    try:
        number, unit = split_unit(value) if isinstance(value, str) else (0.0, "")
    except ValueError:
        number, unit = 0.0, ""
    if unit not in UNITS or number <= 0:
        raise ValueError(f"expected a time with its unit, as 3 ms or 0.5 s, got {value!r}")
    return number * UNITS[unit]


def parse_budget(value: str) -> float:
    """Parse the option --budget, "30m", to seconds. Raises UsageError."""
    try:
        number, unit = split_unit(value)
    except ValueError:
        number, unit = 0.0, ""
    if unit not in BUDGETS or number <= 0:
        raise UsageError(f"--budget must be a time with its unit, as 90s, 30m or 2h, not {value!r}")
    return number * BUDGETS[unit]


def parse_bytes(value: Any) -> int:
    """Parse a size, "25 MB", "8 GiB" or a number of bytes, to bytes."""
    try:
        size = int(SIZE.validate_python(value))
    except ValidationError:
        size = 0
    if isinstance(value, bool) or size <= 0:
        raise ValueError(f"expected a size as 25 MB, 8 GiB or a number of bytes, got {value!r}")
    return size


def choose_unit(size: int) -> tuple[str, int]:
    """Choose the binary unit to print a size in. Returns its name and its bytes."""
    return next((pair for pair in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if size >= 0.5 * pair[1]), ("B", 1))


Share = Annotated[float, BeforeValidator(parse_share), WithJsonSchema({"type": ["string", "number"]})]
"""A number from 0 to 1, written as 1% or 0.01."""

Seconds = Annotated[
    float,
    BeforeValidator(parse_seconds),
    PlainSerializer(lambda seconds: f"{seconds!r} s", return_type=str),
    WithJsonSchema({"type": "string", "examples": ["3 ms"]}),
]
"""A duration in seconds; serialized with its unit, so that it parses back to the same number."""

Bytes = Annotated[int, BeforeValidator(parse_bytes), WithJsonSchema({"type": ["string", "integer"]})]
"""A size in bytes."""
