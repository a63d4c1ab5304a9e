"""Commands that train: `finetune`, and `merge`, for adapters."""

import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.commands.options import (
    Builder,
    Columns,
    Json,
    Task,
    Trust,
    WeightsKey,
    parse_columns,
    print_json,
)
from laconic.errors import UsageError, did_you_mean

if TYPE_CHECKING:
    from train.finetune.finetune import FinetuneResult
    from train.launchers.accelerate_config import AccelerateConfig
    from train.settings import TrainingRecipe


OptionalSource = Annotated[
    str | None, typer.Argument(help="A checkpoint's folder, or a weights file.", metavar="SOURCE")
]
StepCount = Annotated[int | None, typer.Option(min=1, help="Optimizer steps of the whole run; overrides epochs.")]
TechniqueList = Annotated[
    list[str] | None, typer.Option(help="A technique, as lora or 'lora: {rank: 8}'; may be repeated.")
]
Assignments = Annotated[
    list[str] | None, typer.Option("--set", help="Any key of the recipe, as KEY=VALUE; may be repeated.")
]
MemoryLimit = Annotated[
    str | None, typer.Option(help="Memory of the device, as 8GiB; chooses the fastest techniques that fit.")
]
AccelerateFile = Annotated[
    Path | None, typer.Option(help="A file of `accelerate config`: mesh, precision and ranks.", rich_help_panel="Ranks")
]
LAUNCHERS = ("local", "torchrun", "slurm", "ray")
"""Where `--on` starts the ranks: in this process, on this machine and others, in a job of Slurm, or on a cluster of
Ray."""
LAUNCH = {"rich_help_panel": "Ranks"}
Place = Annotated[str, typer.Option(help="Where ranks are started: local (here), torchrun, slurm or ray.", **LAUNCH)]
NodeCount = Annotated[str, typer.Option(help="Machines: 2, or 1:2 for at least one of two.", **LAUNCH)]
RankCount = Annotated[int, typer.Option(min=1, help="Ranks on each machine.", **LAUNCH)]
MeetingPlace = Annotated[str | None, typer.Option(help="HOST:PORT of a machine, alike on all.", **LAUNCH)]
RestartCount = Annotated[int, typer.Option(min=0, help="How often failed ranks start again.", **LAUNCH)]


def finetune(
    source: OptionalSource = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the checkpoint to write.")] = None,
    data: Annotated[Path | None, typer.Option(help="Training samples: with labels, pairs, or plain texts.")] = None,
    evaluate: Annotated[Path | None, typer.Option(help="Validation samples; default: a tenth of --data.")] = None,
    column: Columns = None,
    recipe: Annotated[Path | None, typer.Option(help="YAML file; command-line options override the recipe.")] = None,
    task: Task = None,
    builder: Builder = None,
    weights_key: WeightsKey = None,
    epochs: Annotated[float | None, typer.Option(min=0, help="Passes over the data.")] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Global batch size, in rows over all devices.")] = None,
    steps: StepCount = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate of the optimizer.")] = None,
    technique: TechniqueList = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of all random numbers.")] = None,
    assignment: Assignments = None,
    memory: MemoryLimit = None,
    auto: Annotated[bool, typer.Option("--auto", help="If memory runs out, choose techniques that fit.")] = False,
    trace: Annotated[bool, typer.Option("--trace", help="Profile a few steps.")] = False,
    nvtx: Annotated[bool, typer.Option("--nvtx", help="Add NVTX ranges for Nsight.")] = False,
    memory_snapshot: Annotated[bool, typer.Option("--memory-snapshot", help="Record all CUDA allocations.")] = False,
    tensorboard: Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard event files.")] = False,
    accelerate: AccelerateFile = None,
    on: Place = "local",
    nnodes: NodeCount = "1",
    nproc_per_node: RankCount = 1,
    rdzv_endpoint: MeetingPlace = None,
    max_restarts: RestartCount = 10,
    trust: Trust = False,
    show_recipe: Annotated[bool, typer.Option("--show-recipe", help="Print the complete recipe and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Fine-tune a checkpoint on your data, with memory-saving techniques.

    The result is a checkpoint that `laconic compress` accepts as a source. An interrupted run resumes from its last
    snapshot; with --on torchrun, or under torchrun, the same recipe trains on several devices.
    """
    samples: dict[str, Any] = {"train": data and str(data), "evaluate": evaluate and str(evaluate)}
    samples["columns"] = parse_columns(column) if column else None
    samples = {key: value for key, value in samples.items() if value}
    keys = {"source": source, "task": task, "builder": builder, "weights_key": weights_key, "data": samples or None}
    options = {"epochs": epochs, "batch_size": batch, "steps": steps, "seed": seed, "memory": memory}
    more = {"techniques": technique or None, "learning_rate": lr, "assignments": assignment or None}
    chosen = read_training_recipe(recipe, keys | options | more, trust=trust)
    config = read_accelerate_config(accelerate)
    chosen = config.apply(chosen) if config else chosen
    if show_recipe:
        typer.echo(chosen.to_yaml(), nl=False)
        return
    if output is None:
        raise UsageError("nowhere to write to. Give --output FOLDER, as tuned")
    from train.launchers.parent_process import end_with_parent

    end_with_parent()
    on = "torchrun" if on == "local" and config and config.world > 1 else on
    if on != "local" and "RANK" not in os.environ:  # it is in the ranks that this starts, by the same command
        raise typer.Exit(launch(on, output, config, nnodes, nproc_per_node, rdzv_endpoint, max_restarts))
    from train.finetune.finetune import finetune
    from train.observers import ObserverSettings

    observers = ObserverSettings(trace=trace, nvtx=nvtx, memory=memory_snapshot, tensorboard=tensorboard)
    tuned = finetune(chosen, output, trust=trust, auto=auto, observers=observers)
    if os.environ.get("RANK", "0") != "0":
        return  # only the first rank prints the result
    print_json(summarize_tuned(tuned)) if as_json else print_tuned(tuned)


def read_accelerate_config(path: Path | None) -> "AccelerateConfig | None":
    """Read a file of Accelerate, where one is given, and say what of it is elsewhere; in ranks it was said before."""
    if path is None:
        return None
    from train.launchers.accelerate_config import read_accelerate

    config = read_accelerate(path)
    for note in config.describe() if "RANK" not in os.environ else ():
        typer.echo(note, err=True)
    return config


def launch(place: str, output: Path, config: "AccelerateConfig | None", *options: Any) -> int:
    """Start the ranks of this command, or submit a job that does, and return the exit code. options: as of
    `LaunchSettings`."""
    if place not in LAUNCHERS:
        raise UsageError(f"there is nowhere called {place!r} to train on. {did_you_mean(place, LAUNCHERS)}")
    from train.launchers.ray_agents import launch_on_ray
    from train.launchers.slurm import submit_job
    from train.launchers.torchrun import LaunchSettings, launch_ranks

    settings = LaunchSettings(*options)
    settings = config.settle_launch(settings) if config else settings
    if place == "torchrun":
        return launch_ranks(sys.argv[1:], settings, run=output.name)
    if place == "ray":
        return launch_on_ray(sys.argv[1:], settings)
    typer.echo(submit_job(sys.argv[1:], settings, output))
    return 0


def read_training_recipe(path: Path | None, keys: dict[str, Any], *, trust: bool) -> "TrainingRecipe":
    """Read a training recipe; the command-line options that were given override it. Raises UsageError for nothing."""
    from train.assignments import parse_value
    from train.settings import TrainingRecipe

    keys = {key: value for key, value in keys.items() if value is not None}
    if "techniques" in keys:
        keys["techniques"] = [parse_value(text, "--technique") for text in keys["techniques"]]
    if path is None and not {"source", "data"} <= keys.keys():
        raise UsageError("nothing to train. Give a SOURCE and --data, or a --recipe that names them")
    return TrainingRecipe.load(path, trust=trust, **keys)


def print_tuned(result: "FinetuneResult") -> None:
    """Print the figures before and after, and the next command."""
    from laconic.commands.console import OUT, make_table

    table = make_table(
        f"{result.folder.name}: {result.checkpoint.task.name}", "on the validation set", "before", "after", right=(1, 2)
    )
    for name, value in result.after.items():
        table.add_row(name, f"{result.before[name]:.4f}" if name in result.before else "", f"{value:.4f}")
    OUT.print(table)
    for line in (result.changed, result.training.waiting, result.training.energy):
        if line:
            OUT.print(f"\n{line}", soft_wrap=True)
    trust = " --trust" if result.checkpoint.source["kind"] == "builder" else ""  # it names code that is not Laconic's
    OUT.print(f"\nNext: laconic compress {result.folder} --data FILE{trust} -o {result.folder}.laconic", soft_wrap=True)


def summarize_tuned(result: "FinetuneResult") -> dict[str, Any]:
    """Return the result of fine-tuning, JSON-ready."""
    return {
        "checkpoint": str(result.folder),
        "task": result.checkpoint.task.name,
        "before": dict(result.before),
        "after": dict(result.after),
        "losses": [None if math.isnan(loss) else loss for loss in result.training.losses],
        "skipped": result.training.skipped,
        "turned_on": result.changed,
        "waiting": result.training.waiting,
        "energy": result.training.energy,
    }


def merge(
    adapter: Annotated[Path, typer.Argument(help="Folder of a LoRA adapter.", metavar="ADAPTER")],
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of the checkpoint to write.")],
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Merge a LoRA adapter into the weights of its model, and write a checkpoint.

    The adapter is in peft's format, and names the folder of its model. `compress` and `finetune` take the adapter
    itself as a source, too.
    """
    from laconic.models.checkpoint import check_free
    from laconic.models.source_loading import load_source
    from laconic.runtimes.adapter_config import is_adapter

    if not is_adapter(adapter):
        raise UsageError(f"{adapter} is no adapter: it has no adapter_config.json. Give the folder of one")
    check_free(output.resolve())
    checkpoint = load_source(adapter, trust=trust)
    checkpoint.save(output.resolve())
    summary = {"checkpoint": str(output), "task": checkpoint.task.name}
    print_json(summary) if as_json else typer.echo(f"{output}: {checkpoint.task.name}, with {adapter} merged")
