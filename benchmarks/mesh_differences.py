"""The largest differences of losses and gradient norms of meshes from those of one process, and their digests."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from results import Results

Difference = tuple[float, float]
"""The largest difference of the loss, and of the gradient norm."""
Row = Sequence[Difference | None]
"""Differences of one model on one mesh with each variant of training; None where it is refused."""


def find_difference(figures: Mapping[str, Any], expected: Mapping[str, Any]) -> Difference:
    """Return the largest differences of two runs."""
    losses, norms = (
        max(abs(value - other) for value, other in zip(figures[kind], expected[kind], strict=True))
        for kind in ("losses", "norms")
    )
    return losses, norms


def find_largest(differences: Iterable[Difference | None]) -> Difference | None:
    """Return the largest of differences, of the loss and of the gradient norm; None where all are refused."""
    pairs = [pair for pair in differences if pair is not None]
    return (max(loss for loss, _ in pairs), max(norm for _, norm in pairs)) if pairs else None


def format_difference(difference: Difference | None) -> str:
    """Format the difference of the loss and of the gradient norm."""
    return "refused" if difference is None else " / ".join(f"{value:.1e}" for value in difference)


def print_digests(results: Results, variants: Sequence[str], differences: Mapping[tuple[str, str], Row]) -> None:
    """Print the largest differences of each kind of mesh, with the models that it refuses, and of each model.
    differences: of the variants, by model and mesh."""
    kinds: dict[str, dict[tuple[str, str], Row]] = {}
    models: dict[str, list[Row]] = {}
    for (model, mesh), row in differences.items():
        kinds.setdefault(re.sub(r" \d\b", "", mesh), {})[model, mesh] = row
        models.setdefault(model, []).append(row)
    print()
    results.begin("kinds", ["mesh", *variants, "refused"])
    for kind, cases in kinds.items():
        refused = dict.fromkeys(model for (model, _), row in cases.items() if None in row)
        results.add("kinds", [kind, *digest(cases.values()), "; ".join(refused) or "none"])
    print()
    results.table("models", ["model", *variants], [[model, *digest(rows)] for model, rows in models.items()])


def digest(rows: Iterable[Row]) -> list[str]:
    """Return the largest differences of each variant, as cells."""
    return [format_difference(find_largest(column)) for column in zip(*rows, strict=True)]
