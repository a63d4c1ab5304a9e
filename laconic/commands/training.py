"""Training, and the memory that it takes."""

import os
from pathlib import Path
from typing import Annotated

import typer

from laconic.commands.options import Builder, Json, Source, Task, Trust
from laconic.commands.output import print_json
from laconic.errors import GoalMissed, UsageError


def finetune(
    source: Annotated[
        str | None, typer.Argument(help="A checkpoint's folder, or a weights file.", metavar="SOURCE")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the checkpoint to write.")] = None,
    data: Annotated[Path | None, typer.Option(help="Samples with labels, or pairs, or texts to continue.")] = None,
    evaluate: Annotated[Path | None, typer.Option(help="Samples to judge by; else a tenth of --data.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file; what is given here stands above it.")] = None,
    task: Task = None,
    builder: Builder = None,
    epochs: Annotated[float | None, typer.Option(min=0, help="Times through the data.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step, over all devices.")] = None,
    memory: Annotated[
        str | None, typer.Option(help="What the device may hold, as 8GiB; the fastest that fits.")
    ] = None,
    auto: Annotated[bool, typer.Option("--auto", help="After running out of memory, turn on what fits.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Profile a few steps.")] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Mark phases for Nsight.")] = False,
    memory_snapshot: Annotated[bool, typer.Option("--memory-snapshot", help="Keep every CUDA allocation.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write event files.")] = False,
    trust: Trust = False,
    show_recipe: Annotated[bool, typer.Option("--show-recipe", help="Print what would run, and stop.")] = False,
    as_json: Json = False,
) -> None:
    """Train a checkpoint on your data, in as little memory as it takes.

    The result is a checkpoint that `laconic compress` takes as it is. An interrupted run goes on from its last
    snapshot; under torchrun the same recipe runs on several devices.
    """
    files = {key: str(value) for key, value in {"train": data, "evaluate": evaluate}.items() if value}
    given = {
        "source": source,
        "task": task,
        "builder": builder,
        "epochs": epochs,
        "batch_size": batch,
        "memory": memory,
        "data": files or None,
    }
    given = {key: value for key, value in given.items() if value is not None}
    if recipe is None and not {"source", "data"} <= given.keys():
        raise UsageError("nothing to train. Give a SOURCE and --data, or a --recipe that names them")
    from laconic.commands.finetune_summary import show, summary
    from laconic.finetune.finetune import finetune
    from laconic.training.observers import ObserverSettings
    from laconic.training.settings import TrainingRecipe

    chosen = TrainingRecipe.load(recipe, **given)
    if show_recipe:
        typer.echo(chosen.to_yaml(), nl=False)
        return
    if output is None:
        raise UsageError("nowhere to write to. Give --output FOLDER, as tuned")
    observers = ObserverSettings(trace=trace, nvtx=nvtx, memory=memory_snapshot, tensorboard=tensorboard)
    tuned = finetune(chosen, output, trust=trust, auto=auto, observers=observers)
    if os.environ.get("RANK", "0") != "0":
        return  # the first says it for all
    print_json(summary(tuned)) if as_json else show(tuned)


def plan(
    source: Source,
    memory: Annotated[str, typer.Option(help="What the device holds, as 8GiB.")],
    batch: Annotated[int | None, typer.Option(min=1, help="Rows of a step; by default the recipe's.")] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Tokens of a row; by default the model's limit.")] = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file with the settings of training.")] = None,
    task: Task = None,
    builder: Builder = None,
    device: Annotated[str | None, typer.Option(help="Plan for cpu or cuda; by default for what is here.")] = None,
    devices: Annotated[int, typer.Option(min=1, help="Devices that share the model; memory is of each.")] = 1,
    picture: Annotated[Path | None, typer.Option(help="Draw the table, as .svg or .png.")] = None,
    timeline: Annotated[Path | None, typer.Option(help="Draw the chosen one's memory over a step.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="Show every combination that was simulated.")] = False,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Predict the memory that training takes, technique by technique, and choose the fastest that fits.

    Nothing is allocated, and no weight is read: a folder with a config.json is enough. Exit code 3 where nothing fits.
    """
    from laconic.commands.plan_table import print_plan
    from laconic.planner.plan_plots import check_path, plot_bars, plot_chosen
    from laconic.planner.plan_source import plan_source
    from laconic.planner.plan_summary import summarize_plan

    for drawing in filter(None, (picture, timeline)):
        check_path(drawing)
    found = plan_source(
        Path(source),
        memory=memory,
        batch=batch,
        length=seq,
        recipe=recipe,
        task=task,
        builder=builder,
        device=device,
        devices=devices,
        trust=trust,
    )
    for path, draw in ((picture, plot_bars), (timeline, plot_chosen)):
        if path is not None:
            draw(found, path)
    print_json(summarize_plan(found)) if as_json else print_plan(found, everything=everything)
    if found.chosen is None:
        raise GoalMissed("no combination of techniques fits. Take a smaller --batch or --seq, or more --memory")
