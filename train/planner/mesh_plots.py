"""The plot of a plan of meshes: the memory and the time of each."""

from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from laconic.units import format_binary_bytes
from train.planner.mesh_plan import MeshPlan, MeshRow, describe_mesh
from train.planner.plot_style import GIB, INK, LINE, MUTED, OVER, SETTINGS, check_path, save_figure

TENSOR_COLOURS = ("#2f5d8a", "#7aa6c2", "#e0a458", "#c8553d", "#7d4f9b", "#a9a29c")
"""By the number of ranks along the tensor axis, from few to many; the last for all others."""
SHAPES = ("o", "s", "^", "D", "v", "P", "X")
"""By the number of ranks along the pipeline, from few to many."""


def plot_meshes(plan: MeshPlan, path: Path) -> None:
    """Plot each mesh by the seconds of a step and the memory of its largest rank, and the available memory.

    path: .svg or .png. Raises UsageError for another suffix.
    """
    check_path(path)
    with matplotlib.rc_context(SETTINGS):
        figure = Figure(figsize=(9, 6))
        axes = figure.add_axes((0.09, 0.1, 0.66, 0.78))
        axes.set_xscale("log")
        axes.set_yscale("log")
        tensors = sorted({row.prediction.sizes.tensor for row in plan.rows})
        pipelines = sorted({row.prediction.sizes.pipeline for row in plan.rows})
        for tensor in tensors:
            for pipeline in pipelines:
                rows = select_sizes(plan, tensor, pipeline)
                axes.scatter(
                    [row.seconds for row in rows],
                    [row.need / GIB for row in rows],
                    s=26,
                    color=pick(TENSOR_COLOURS, tensors.index(tensor)),
                    marker=pick(SHAPES, pipelines.index(pipeline)),
                    alpha=0.85,
                    linewidths=0,
                )
        for number, tensor in enumerate(tensors):
            axes.scatter([], [], color=pick(TENSOR_COLOURS, number), marker="o", label=f"tensor {tensor}")
        for number, pipeline in enumerate(pipelines):
            axes.scatter([], [], color=MUTED, marker=pick(SHAPES, number), label=f"pipeline {pipeline}")
        front = plan.find_pareto_front()
        axes.plot([row.seconds for row in front], [row.need / GIB for row in front], color=LINE, zorder=0)
        axes.axhline(plan.memory / GIB, color=OVER, linewidth=1.2)
        limit = f" {format_binary_bytes(plan.memory)}"
        axes.text(
            1, plan.memory / GIB, limit, color=OVER, va="bottom", ha="right", transform=axes.get_yaxis_transform()
        )
        if plan.chosen is not None:
            place = plan.chosen.seconds, plan.chosen.need / GIB
            axes.scatter(*place, s=110, facecolors="none", edgecolors=INK, linewidths=1.4)
            axes.annotate(describe_mesh(plan.chosen), place, xytext=(8, -12), textcoords="offset points")
        axes.set_xlabel(f"seconds of a step, {plan.link.name}")
        axes.set_ylabel("GiB of the rank that needs the most")
        axes.grid(color=LINE)
        axes.legend(loc="upper left", bbox_to_anchor=(1.02, 1), frameon=False, fontsize=8)
        title = f"{plan.model.name}, {plan.devices} ranks, batch {plan.training.batch_size}, length {plan.length}"
        figure.text(0.02, 0.94, title, fontsize=12, fontweight="bold")
        save_figure(figure, path)


def select_sizes(plan: MeshPlan, tensor: int, pipeline: int) -> list[MeshRow]:
    """Select the rows with so many ranks along two axes."""
    return [row for row in plan.rows if row.prediction.sizes[::3] == (pipeline, tensor)]


def pick(values: tuple[str, ...], index: int) -> str:
    """Return the value of an index; the last where there are fewer."""
    return values[min(index, len(values) - 1)]
