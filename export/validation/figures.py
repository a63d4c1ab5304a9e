"""The figures of comparisons, rounded: later decimals are noise, and differ between processors."""

from laconic.tasks.tolerance import Tolerance

DECIMALS = 6


def round_figure(value: float) -> float:
    """Round to six decimals."""
    return round(float(value), DECIMALS)


def round_interval(interval: tuple[float, float]) -> tuple[float, float]:
    """Round both ends to six decimals."""
    low, high = interval
    return round_figure(low), round_figure(high)


def describe_tolerance(tolerance: Tolerance) -> dict[str, float]:
    """The figures that a tolerance requires, by name; 0 requires nothing."""
    required = {"fidelity": tolerance.mean, "fidelity_worst": tolerance.worst}
    return {name: value for name, value in required.items() if value}
