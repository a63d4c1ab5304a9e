"""A plan of meshes as JSON, and a mesh as a line of a recipe."""

from typing import Any

import yaml

from train.parallel.mesh import AxisSizes
from train.planner.mesh_plan import MeshPlan, MeshRow, describe_mesh


def format_mesh(row: MeshRow) -> str:
    """Format the YAML of a mesh in a recipe."""
    content = row.mesh.model_dump(mode="json", exclude_defaults=True)
    sizes = {axis: size for axis, size in row.prediction.sizes._asdict().items() if size > 1}
    settings = {key: value for key, value in content.items() if key not in AxisSizes._fields}
    return yaml.safe_dump({"mesh": sizes | settings}, sort_keys=False, default_flow_style=None)


def summarize_meshes(plan: MeshPlan) -> dict[str, Any]:
    """Summarize the plan as JSON-ready values; bytes and seconds."""
    return {
        "model": plan.model.name,
        "task": plan.model.task.name,
        "parameters": plan.model.parameters,
        "batch": plan.training.batch_size,
        "length": plan.length,
        "memory": plan.memory,
        "devices": plan.devices,
        "device": plan.rates.name,
        "link": plan.link.name,
        "link_rate": plan.link.rate,
        "chosen": plan.chosen and describe_mesh(plan.chosen),
        "rows": [summarize_mesh(row, plan) for row in plan.rows],
    }


def summarize_mesh(row: MeshRow, plan: MeshPlan) -> dict[str, Any]:
    """Summarize a row of the plan as JSON-ready values."""
    prediction = row.prediction
    return {
        "name": describe_mesh(row),
        **prediction.sizes._asdict(),
        "schedule": prediction.schedule,
        "micro_batches": prediction.micro_batches,
        "rows": prediction.rows,
        "need": row.need,
        "host": prediction.host,
        "fits": row.fits(plan.memory),
        "layers": list(prediction.layers),
        "ranks": [dict(rank) for rank in prediction.ranks],
        "bubble": prediction.bubble,
        "compute_seconds": prediction.compute,
        "traffic": dict(prediction.traffic),
        "traffic_seconds": {axis: amount / plan.link.rate for axis, amount in prediction.traffic.items()},
        "seconds": row.seconds,
    }
