"""The command `plan`, which predicts the memory and the time of training."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from laconic.commands.options import Builder, Json, Source, Task, Trust, print_json
from laconic.errors import GoalMissed, UsageError
from laconic.hardware import cores

if TYPE_CHECKING:
    from train.planner.mesh_plan import Link
    from train.planner.plan_source import PlannedSource

SequenceLength = Annotated[
    int | None, typer.Option(min=1, help="Sequence length in tokens; default: the model's limit.")
]
MeasureAgain = Annotated[
    bool, typer.Option("--measure", help="Measure the device's speed again, rather than take what is kept.")
]


def plan(
    source: Source,
    memory: Annotated[str, typer.Option(help="Memory of the device, as 8GiB.")],
    batch: Annotated[int | None, typer.Option(min=1, help="Batch size in rows; default: the recipe's.")] = None,
    seq: SequenceLength = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file with training settings.")] = None,
    task: Task = None,
    builder: Builder = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: what this machine has.")] = None,
    devices: Annotated[int, typer.Option(min=1, help="Devices that share the model; --memory is per device.")] = 1,
    link: Annotated[str | None, typer.Option(help="Plan the mesh: nvlink, infiniband, ethernet, or as 12GB/s.")] = None,
    picture: Annotated[Path | None, typer.Option(help="Plot the table, as .svg or .png.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Plot the memory of the chosen plan over one step.")] = None,
    measure: MeasureAgain = False,
    everything: Annotated[bool, typer.Option("--all", help="Show all that was predicted.")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Predict the training memory of combinations of techniques, and choose the fastest that fits.

    Allocates nothing and reads no weights: a folder with a config.json is enough. With --link, predict memory, bubble
    and traffic of every mesh of --devices ranks in their place. The exit code is 3 if nothing fits.
    """
    if link is not None and (devices == 1 or timeline is not None):
        raise UsageError("--link connects several devices, of which no timeline is drawn. Give --devices alone with it")
    preload_planner(Path(source))
    from train.planner.mesh_plan import parse_link
    from train.planner.plan_source import open_planned_source
    from train.planner.plot_style import check_path

    for drawing in filter(None, (picture, timeline)):
        check_path(drawing)
    connection = None if link is None else parse_link(link)
    planned = open_planned_source(
        Path(source),
        memory=memory,
        batch=batch,
        length=seq,
        recipe=recipe,
        task=task,
        builder=builder,
        device=device,
        devices=devices,
        measure=measure,
        trust=trust,
    )
    if connection is not None:
        show_mesh_plan(planned, connection, picture, everything=everything, trust=trust, as_json=as_json)
    else:
        show_memory_plan(planned, picture, timeline, everything=everything, trust=trust, as_json=as_json)


def preload_planner(source: Path) -> None:
    """Have worker processes import the planner while this process does."""
    from train.data.fork_server import preload_workers

    if source.exists():
        preload_workers("train.planner.plan_source", cores())


def show_memory_plan(
    planned: "PlannedSource",
    picture: Path | None,
    timeline: Path | None,
    *,
    everything: bool,
    trust: bool,
    as_json: bool,
) -> None:
    """Plan the techniques, print and plot them. Raises GoalMissed where none fit."""
    from laconic.commands.plan_table import print_plan
    from train.planner.plan_plots import plot_bars, plot_chosen
    from train.planner.plan_source import plan_source
    from train.planner.plan_summary import summarize_plan

    memory_plan = plan_source(planned, trust=trust)
    for path, draw in ((picture, plot_bars), (timeline, plot_chosen)):
        if path is not None:
            draw(memory_plan, path)
    print_json(summarize_plan(memory_plan)) if as_json else print_plan(memory_plan, everything=everything)
    if memory_plan.chosen is None:
        raise GoalMissed("no combination of techniques fits. Try a smaller --batch or --seq, or more --memory")


def show_mesh_plan(
    planned: "PlannedSource", link: "Link", picture: Path | None, *, everything: bool, trust: bool, as_json: bool
) -> None:
    """Plan the mesh, print and plot all of them. Raises GoalMissed where none fits."""
    from laconic.commands.mesh_table import print_meshes
    from train.planner.mesh_plots import plot_meshes
    from train.planner.mesh_summary import summarize_meshes
    from train.planner.plan_source import plan_source_mesh

    mesh_plan = plan_source_mesh(planned, link, trust=trust)
    if picture is not None:
        plot_meshes(mesh_plan, picture)
    print_json(summarize_meshes(mesh_plan)) if as_json else print_meshes(mesh_plan, everything=everything)
    if mesh_plan.chosen is None:
        raise GoalMissed("no mesh fits. Try techniques in a --recipe, a smaller --batch or --seq, or more --devices")
