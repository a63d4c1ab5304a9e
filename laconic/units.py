"""Quantities with units: parsing what people write (1%, 3 ms, 25 MB), and formatting numbers for people."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, PlainSerializer, TypeAdapter, ValidationError, WithJsonSchema

from laconic.errors import UsageError

UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0}
BUDGETS = {"s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
NUMBER = re.compile(r"\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-zµ%]*)\s*", re.IGNORECASE)
SIZE = TypeAdapter(ByteSize)
BINARY_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def split_unit(value: Any) -> tuple[float, str]:
    """Split "3 ms" into its number and its unit; a number has none. Returns -1 for what is neither."""
    try:
        match = NUMBER.fullmatch(value) if isinstance(value, str) else None
        return (float(match[1]), match[2].lower()) if match else (-1.0 if isinstance(value, str) else float(value), "")
    except (TypeError, ValueError):
        return -1.0, ""


def parse_share(value: Any) -> float:
    """Parse a share, "1%" or 0.01, to a number from 0 to 1."""
    number, unit = split_unit(value)
    share = number / 100 if unit == "%" else number
    if unit not in ("", "%") or isinstance(value, bool) or not 0 <= share <= 1:
        raise ValueError(f"expected a share as 1% or 0.01, got {value!r}")
    return share


def parse_seconds(value: Any) -> float:
    """Parse a duration, "3 ms", to seconds. A number without a unit is refused as ambiguous."""
    number, unit = split_unit(value)
    if unit not in UNITS or number <= 0:
        raise ValueError(f"expected a time with its unit, as 3 ms or 0.5 s, got {value!r}")
    return number * UNITS[unit]


def parse_budget(value: str) -> float:
    """Parse the option --budget, "30m", to seconds. Raises UsageError."""
    number, unit = split_unit(value)
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


def format_bytes(size: float) -> str:
    """Format bytes in decimal units, as of files: 25.3 MB."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= 0.95 * scale:
            return f"{size / scale:.1f} {unit}"
    return f"{size:.0f} B"


def format_binary_bytes(size: float) -> str:
    """Format bytes in binary units, as of memory: 1.50 GiB, 0.53 GiB, 64 MiB."""
    if size >= 0.5 * 2**30:
        return f"{size / 2**30:.2f} GiB"
    for unit, scale in BINARY_UNITS:
        if size >= scale:
            return f"{size / scale:.0f} {unit}"
    return f"{size:.0f} B"


def choose_unit(size: int) -> tuple[str, int]:
    """Choose the binary unit for a table or an axis whose largest value is `size` bytes, and its bytes."""
    return next((pair for pair in BINARY_UNITS if size >= 0.5 * pair[1]), ("B", 1))


def format_count(number: float, *, billion: str = "G") -> str:
    """Format a number of parameters or operations: 22.7 M. billion: the unit of 1e9."""
    for unit, scale in ((billion, 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= 0.95 * scale:
            return f"{number / scale:.1f} {unit}"
    return f"{number:.0f}"


def format_rate(value: float) -> str:
    """Format a rate in about three digits: 8.25, 412, 12.3k, 1.20M."""
    for scale, unit in ((1e6, "M"), (1e3, "k")):
        if value >= 0.9995 * scale:
            return f"{format_digits(value / scale)}{unit}"
    return format_digits(value)


def format_digits(value: float) -> str:
    """Format a number in three digits or more, without an exponent."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"


def format_percent(share: float) -> str:
    """Format a share in percent: 0 %, 0.5 %, 42 %."""
    return f"{100 * share:.0f} %" if share >= 0.0995 or share == 0 else f"{100 * share:.1f} %"


def format_seconds(seconds: float) -> str:
    """Format a latency: 3.20 ms, 45 us."""
    return f"{1e3 * seconds:.2f} ms" if seconds >= 1e-3 else f"{1e6 * seconds:.0f} us"


def format_duration(seconds: float) -> str:
    """Format how long a step took: 14.5 s, 3 min 20 s."""
    return f"{seconds:.1f} s" if seconds < 120 else f"{seconds // 60:.0f} min {seconds % 60:.0f} s"


def format_clock(seconds: float) -> str:
    """Format a remaining time: 0:42, 1:05:00."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def format_fidelity(fidelity: float) -> str:
    """Format a fidelity in five decimals; in six where it would look like 1 and is not."""
    return f"{fidelity:.5f}" if fidelity < 0.999995 or fidelity == 1 else f"{fidelity:.6f}"


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
