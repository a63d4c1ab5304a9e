"""What the server and its models say about themselves, over HTTP and gRPC alike: the V2 protocol and its extensions."""

from collections.abc import Callable
from typing import Any

from laconic import __version__
from laconic.errors import NotReady
from laconic.tensor import TensorSpec
from serve.model_repository.model import Model
from serve.model_repository.repository import Repository
from serve.protocol.infer_request import describe_tensor

EXTENSIONS = ["binary_tensor_data", "model_configuration", "statistics"]


def check_server(repository: Repository) -> None:
    """Raise NotReady once the server is told to stop, while it serves no model or lacks a required one, and while a
    model has no engine."""
    if not repository.ready:
        raise NotReady("the server is stopping")
    models = list(repository)
    served = {model.name for model in models}
    if missing := [name for name in repository.required if name not in served]:
        raise NotReady("; ".join(explain_missing(repository, name) for name in missing))
    if not models:
        absent = dict.fromkeys(name for name, _ in repository.absent.copy())
        reasons = [explain_missing(repository, name) for name in absent]
        raise NotReady("; ".join(reasons) or "no model is served: the folder of models holds none")
    for model in models:
        model.check_ready()


def explain_missing(repository: Repository, name: str) -> str:
    """Say why no version of a model is served."""
    absent = repository.absent.copy().items()
    reasons = [unavailable.reason or "it is being loaded" for (model, _), unavailable in absent if model == name]
    return f"model {name!r} is not ready: {'; '.join(reasons) or 'the folder of models does not hold it'}"


def check_model(repository: Repository, model: Model) -> None:
    """Raise NotReady once the server is told to stop, and while the model has no engine."""
    if not repository.ready:
        raise NotReady(f"the server of model {model.name!r} is stopping")
    model.check_ready()


def is_ready(check: Callable[..., None], *arguments: Any) -> bool:
    """Return whether a check of readiness passes."""
    try:
        check(*arguments)
    except NotReady:
        return False
    return True


def server_metadata() -> dict[str, Any]:
    """Return the server's name, version and protocol extensions."""
    return {"name": "laconic", "version": __version__, "extensions": EXTENSIONS}


def repository_index(repository: Repository) -> list[dict[str, str]]:
    """List the versions that are served, and those that are not, with the reason."""
    states: dict[tuple[str, str], tuple[str, str]] = {}
    for model in repository:
        reason = model.backend.reason
        states[model.name, model.version] = ("UNAVAILABLE" if reason else "READY", reason)
    for key, unavailable in repository.absent.copy().items():
        if key not in states:
            states[key] = (unavailable.state, unavailable.reason)
        elif unavailable.reason:  # the artifact was replaced by one that cannot be served
            states[key] = ("READY", f"served as before the last change: {unavailable.reason}")
    return [
        {"name": name, "version": version, "state": state, "reason": reason}
        for (name, version), (state, reason) in sorted(states.items())
    ]


def model_metadata(model: Model) -> dict[str, Any]:
    """Return the model's signature."""
    return {
        "name": model.name,
        "versions": [model.version],
        "platform": f"onnx_{model.runtime}",
        "inputs": [describe_tensor(spec) for spec in model.inputs],
        "outputs": [describe_tensor(spec) for spec in model.outputs],
    }


def model_configuration(model: Model) -> dict[str, Any]:
    """Describe how the model is run, in Triton's terms. Without batching every axis is in `dims`."""
    batcher, runtime, batched = model.batcher, model.runtime, model.batcher.layout.batched
    parameters = {
        # The cap is the knee, or one row where outputs depend on the other rows of a batch.
        "knee": str(model.artifact.measured.knee),
        # Of shorter inputs a batch holds more rows: rows times the product of the free axes.
        "max_batch_cells": str(batcher.cap.cells),
        "inline": str(batcher.inline is not None).lower(),
    }

    def configure(spec: TensorSpec) -> dict[str, Any]:
        tensor = describe_tensor(spec)
        dims = tensor["shape"][1:] if batched else tensor["shape"]
        return {"name": tensor["name"], "data_type": f"TYPE_{tensor['datatype']}", "dims": dims}

    return {
        "name": model.name,
        "platform": f"onnx_{runtime}",
        "backend": runtime,
        "version_policy": {"latest": {"num_versions": 1}},
        "max_batch_size": batcher.cap.rows if batched else 0,
        "input": [configure(spec) for spec in model.inputs],
        "output": [configure(spec) for spec in model.outputs],
        "instance_group": [{"name": model.name, "count": len(batcher.executors) or 1}],
        "parameters": {key: {"string_value": value} for key, value in parameters.items()},
        **({"dynamic_batching": {"max_queue_delay_microseconds": 0}} if batched else {}),
    }


def model_statistics(model: Model) -> dict[str, Any]:
    """Return the model's counters."""
    return {"model_stats": [describe_statistics(model)]}


def all_statistics(repository: Repository) -> dict[str, Any]:
    """Return the counters of every model."""
    return {"model_stats": [describe_statistics(model) for model in repository]}


def describe_statistics(model: Model) -> dict[str, Any]:
    """Describe the counters of a model as the statistics extension of the V2 protocol defines them.

    Inputs are encoded and outputs are written for each request and not for each batch, so that of the batches of one
    size only the engine's time is known.
    """
    counted = model.statistics
    durations = {
        "queue": counted.queue,
        "compute_input": counted.encode,
        "compute_infer": counted.engine,
        "compute_output": counted.write,
    }
    return {
        "name": model.name,
        "version": model.version,
        "last_inference": counted.last_ms,
        "inference_count": counted.rows,
        "execution_count": counted.batches,
        "inference_stats": {
            "success": {"count": counted.succeeded, "ns": counted.succeeded_ns},
            "fail": {"count": counted.failed, "ns": counted.failed_ns},
            **{name: {"count": buckets.count, "ns": buckets.sum} for name, buckets in durations.items()},
        },
        "batch_stats": [
            {
                "batch_size": rows,
                "compute_input": {"count": 0, "ns": 0},
                "compute_infer": {"count": count, "ns": ns},
                "compute_output": {"count": 0, "ns": 0},
            }
            for rows, (count, ns) in sorted(counted.sizes.copy().items())
        ],
    }
