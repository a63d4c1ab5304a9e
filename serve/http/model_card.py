"""What the page shows of a model, JSON-ready: a card that stays, and figures that change while it serves."""

from typing import Any

from laconic.artifacts.manifest import REPORT
from laconic.artifacts.verdict import Comparison, Verdict
from laconic.units import format_bytes, format_fidelity
from serve.asgi.wire import to_json
from serve.model_repository.model import Model
from serve.protocol.infer_request import describe_tensor

LONGEST_SAMPLE = 20_000
"""Characters. A larger example, as an image in numbers, is left out of the form."""


def describe_model(model: Model) -> dict[str, Any]:
    """Describe a model: its signature, engine, verdict, the form to try it with (None for an adapter, which only
    writes), and whether it writes, chats, and reads an image in a chat. The report of an adapter's base is not its."""
    writer, computes = model.text_writer, not model.only_writes
    return {
        "name": model.name,
        "task": model.task.name,
        "inputs": [describe_tensor(spec) for spec in model.inputs],
        "outputs": [describe_tensor(spec) for spec in model.outputs],
        "engine": model.runtime,
        "cap": model.batcher.cap.rows,
        "size": format_bytes(model.artifact.size),
        "verdict": describe_verdict(model.verdict, str(model.task.metric)),
        "form": describe_form(model) if computes else None,
        "writes": writer is not None,
        "chat": writer is not None and writer.chat is not None,
        "images": writer is not None and writer.reads_images,
        "report": computes and (model.artifact.path / REPORT).is_file(),
    }


def describe_form(model: Model) -> dict[str, Any]:
    """Describe the form: the field of a sample, the files it takes or None, and an example sample or None."""
    task = model.task
    if task.upload is not None:
        return {"field": task.field, "accept": task.upload.content_type, "example": None}
    example = task.example_request()[task.field]
    return {
        "field": task.field,
        "accept": None,
        "example": example if len(to_json(example)) <= LONGEST_SAMPLE else None,
    }


def describe_verdict(verdict: Verdict | None, metric: str) -> dict[str, Any]:
    """Describe the verdict: its state, `none` where there is none, at most two figures with labels, what they were
    measured on, and sentences on what is not as it should be. metric: the name of the task's metric."""
    if verdict is None:
        return {"state": "none", "figures": [], "basis": "", "notes": ["its answers were never compared"]}
    whole = verdict.drift[0] if verdict.drift else None
    return {
        "state": verdict.state,
        "figures": list_figures(whole, metric) if whole else [],
        "basis": f"{whole.subject} against {whole.against}, {whole.samples} samples" if whole else "",
        "notes": [*verdict.failures, *verdict.doubts, *verdict.out_of_domain],
    }


def list_figures(comparison: Comparison, metric: str) -> list[dict[str, str]]:
    """List the two figures that say most: the mean fidelity, and the metric before and after or else the worst
    sample."""
    values = comparison.figures
    figures = []
    if "fidelity" in values:
        figures.append((format_fidelity(values["fidelity"]), "mean fidelity to the original; 1 is identical"))
    if "perplexity" in values and "perplexity_original" in values:
        change = f"{values['perplexity_original']:.3f} → {values['perplexity']:.3f}"
        figures.append((change, "perplexity, before and after"))
    elif "metric" in values and "metric_original" in values:
        figures.append(
            (
                f"{values['metric_original']:.4f} → {values['metric']:.4f}",
                f"{metric} against labels, before and after",
            )
        )
    elif "fidelity_worst" in values:
        figures.append((format_fidelity(values["fidelity_worst"]), "fidelity of the worst sample"))
    figures = figures or [(f"{value:.4f}", name) for name, value in values.items()][:2]
    return [{"value": value, "label": label} for value, label in figures]


def describe_activity(model: Model) -> dict[str, int]:
    """Count what a model has done since it was opened, and what waits: the page shows the differences.

    Durations in nanoseconds, summed over requests.
    """
    counted = model.statistics
    return {
        "succeeded": counted.succeeded,
        "failed": counted.failed,
        "answered_ns": counted.succeeded_ns + counted.failed_ns,
        "rows": counted.rows,
        "batches": counted.batches,
        "waiting": model.batcher.pending,
    }
