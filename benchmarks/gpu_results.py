"""The results of the GPU benchmark, as Markdown and JSON."""

import dataclasses
import importlib.metadata
import json
import platform
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from gpu_device import PRECISIONS
from gpu_rows import GpuRow, LeftOut
from gpu_tests import TestRun

MIB = 2**20
PACKAGES = (
    "torch", "torchao", "triton", "transformers", "pydantic", "onnx", "onnxscript", "onnxruntime", "onnxruntime-gpu",
    "tensorrt", "tensorrt-cu13", "cuda-python", "nvidia-ml-py",
)  # fmt: skip
DRY = (
    "**A dry run on the CPU, with tiny models. It shows that the script works. Nothing here was measured on a GPU, and "
    "its times say nothing about one.**"
)
CAPTION = (
    "From inputs in host memory to outputs in host memory, copies included. Speed-ups are medians over interleaved "
    "rounds against FP32 eager; quartiles in brackets. Memory: what the way added on the device, weights, workspaces "
    "and caches. Energy: of the whole device, by its own counter. Share of the peak: FLOPs of products and "
    "convolutions by the median latency, against the dense figure of the data sheet. Error: the norm of the difference "
    "from FP32 eager's outputs, divided by their norm. The weights are random. FP32 is without TF32, save in ONNX "
    "Runtime, which uses it."
)


@dataclass
class Results:
    """Everything that a run found out. absent: columns that this device does not fill, with the reasons."""

    device: str
    software: dict[str, str]
    absent: dict[str, str]
    dry_run: bool
    rows: list[GpuRow] = field(default_factory=list)
    left: list[LeftOut] = field(default_factory=list)
    tests: TestRun | None = None
    training: list[dict[str, Any]] = field(default_factory=list)
    training_absent: str = ""

    def write(self, folder: Path) -> None:
        """Write results.md and results.json: after each part, so that a crash of an engine leaves those before it."""
        (folder / "results.md").write_text(self.render(), encoding="utf-8")
        content = json.dumps(dataclasses.asdict(self), indent=1) + "\n"
        (folder / "results.json").write_text(content, encoding="utf-8")

    def render(self) -> str:
        """The results in Markdown."""
        installed = ", ".join(f"{name} {version}" for name, version in self.software.items() if version)
        missing = ", ".join(name for name, version in self.software.items() if not version)
        parts = [
            f"# {'Dry run' if self.dry_run else self.device}",
            DRY if self.dry_run else "",
            f"{self.device}. {installed}. Not installed: {missing or 'nothing that is used'}.",
            "\n".join(f"- no {column}: {reason}" for column, reason in self.absent.items()),
        ]
        if self.tests:
            parts += ["## Tests", self.tests.describe()]
        if self.rows or self.left:
            parts += ["## Inference", CAPTION, render_rows(self.rows), "### Left out", render_left_out(self.left)]
        if self.training or self.training_absent:
            parts += ["## Training", self.training_absent or render_training(self.training)]
        return "\n\n".join(part for part in parts if part) + "\n"


def render_rows(rows: Iterable[GpuRow]) -> str:
    """The table of what was measured, by model, batch and precision."""
    head = (
        "model", "batch", "precision", "way", "latency, ms", "speed-up", "answers/s", "memory, MiB", "mJ an answer",
        "of the peak", "error", "cosine",
    )  # fmt: skip
    models = list(dict.fromkeys(row.model for row in rows))
    ordered = sorted(rows, key=lambda row: (models.index(row.model), row.batch, PRECISIONS.index(row.precision)))
    return render_table(head, [format_row(row) for row in ordered])


def format_row(row: GpuRow) -> tuple[str, ...]:
    """The cells of a row."""
    low, high = row.quartiles
    return (
        row.model,
        str(row.batch),
        row.precision,
        row.way,
        f"{1e3 * row.seconds:.3f} ({1e3 * low:.3f} to {1e3 * high:.3f})",
        f"{row.speedup:.2f} x",
        f"{row.per_second:,.0f}",
        format_cell(row.memory, 1 / MIB, ".0f"),
        format_cell(row.joules, 1e3, ".3g"),
        format_cell(row.share, 100, ".1f", " %"),
        "not finite" if row.error is None else f"{row.error:.2g}",
        format_cell(row.cosine, 1, ".5f"),
    )


def format_cell(value: float | None, factor: float, form: str, unit: str = "") -> str:
    """A figure times a factor; an en dash for None."""
    return "\u2013" if value is None else f"{value * factor:{form}}{unit}"


def render_left_out(left: Iterable[LeftOut]) -> str:
    """The table of what was not measured: one line for each reason."""
    found: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for each in left:
        batch = "" if each.batch is None else f" at batch {each.batch}"
        found[each.way, each.reason][f"{each.model} {each.precision}{batch}"] = None
    lines = [[way, ", ".join(cases), reason.replace("|", "/")] for (way, reason), cases in found.items()]
    return render_table(("way", "of", "reason"), lines) if lines else "Nothing."


def render_training(rows: Iterable[dict[str, Any]]) -> str:
    """The table of predicted and measured training."""
    head = ("model", "combination", "predicted, MiB", "measured, MiB", "error", "predicted, s", "measured, s", "note")
    lines = []
    for row in rows:
        measured = row["measured"]
        error = None if measured is None else row["predicted"] / measured - 1
        lines.append([
            row["model"], row["combination"], f"{row['predicted'] / MIB:,.2f}", format_cell(measured, 1 / MIB, ",.2f"),
            format_cell(error, 100, "+.2f", " %"), f"{row['predicted_seconds']:.3f}",
            format_cell(row["measured_seconds"], 1, ".3f"), row["note"].replace("|", "/"),
        ])  # fmt: skip
    return render_table(head, lines)


def render_table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *lines))


def describe_software() -> dict[str, str]:
    """Versions of Python, CUDA, the driver's and all packages that are used; empty for those that are missing."""
    found = {"Python": platform.python_version(), "CUDA": torch.version.cuda or ""}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = ""
    return found
