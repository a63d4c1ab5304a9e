"""Commands that make an artifact or a compressed checkpoint: `compress`, `export`."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from laconic.commands.options import (
    ArtifactPath,
    Builder,
    Columns,
    Data,
    Json,
    Output,
    Source,
    Task,
    Trust,
    WeightsKey,
    check_unused,
    parse_columns,
    print_json,
)
from laconic.errors import GoalMissed, UsageError

if TYPE_CHECKING:
    from compress.checkpoint_report import WrittenCheckpoint
    from export.formats.write import WrittenFormat
    from export.pipeline import Result
    from laconic.recipes.recipe import Recipe

EXPORT_FIDELITY = 0.9999
"""The fidelity required of an export in full precision: two engines differ by less than 1e-5 in FP32, 3e-5 in BF16."""


OptionalSource = Annotated[
    str | None, typer.Argument(help="A checkpoint's folder, a weights file, or an ONNX file.", metavar="SOURCE")
]
RecipeFile = Annotated[
    Path | None, typer.Option(help="YAML file or name of a ready recipe; command-line options override the recipe.")
]
EngineOnly = Annotated[
    str | None, typer.Option(help="Build for this engine only, and choose nothing by its speed: reproducible.")
]
Portable = Annotated[
    bool | None,
    typer.Option("--portable", help="Place the model for every engine, to be fast on other processors."),
]
KeepGraph = Annotated[
    bool | None,
    typer.Option("--keep-graph", help="Keep the float graph in the artifact, so that `build` needs no source."),
]
Budget = Annotated[str | None, typer.Option(help="Search settings that meet the goal for this long, as 30m.")]


def compress(
    source: OptionalSource = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder of the artifact to write.")] = None,
    data: Data = None,
    train: Annotated[Path | None, typer.Option(help="Training samples for healing; default: a part of --data.")] = None,
    column: Columns = None,
    recipe: RecipeFile = None,
    task: Task = None,
    builder: Builder = None,
    weights_key: WeightsKey = None,
    target: Annotated[str | None, typer.Option(help="Hardware target: cpu, cuda or tensorrt.")] = None,
    engine_only: EngineOnly = None,
    portable: Portable = None,
    keep_graph: KeepGraph = None,
    to: Annotated[str | None, typer.Option(help="What to write: artifact or checkpoint.")] = None,
    fidelity: Annotated[float | None, typer.Option(min=0, max=1, help="Mean fidelity to reach, as 0.999.")] = None,
    max_drop: Annotated[str | None, typer.Option(help="Largest drop of the task's metric, as 1%.")] = None,
    max_latency: Annotated[str | None, typer.Option(help="Largest latency of one sample, as 3ms.")] = None,
    max_size: Annotated[str | None, typer.Option(help="Largest size of the artifact, as 25MB.")] = None,
    budget: Budget = None,
    executor: Annotated[str, typer.Option(help="Where the trials of a search run: local or ray.")] = "local",
    trust: Trust = False,
    show_recipe: Annotated[bool, typer.Option("--show-recipe", help="Print the complete recipe and exit.")] = False,
    as_json: Json = False,
) -> None:
    """Compress a checkpoint, and validate its outputs against the original's.

    Quantizes to INT8, keeps the most sensitive layers in higher precision until the goal is met, times the engines,
    compares outputs with the original's on held-out samples, and writes an artifact with a report. An unmet goal is
    reported, with exit code 3.
    """
    keys: dict[str, Any] = {"source": source, "task": task, "builder": builder, "target": target, "to": to}
    keys |= {"weights_key": weights_key, "engine_only": engine_only, "portable": portable, "keep_graph": keep_graph}
    goal = {"fidelity": fidelity, "max_drop": max_drop, "max_latency": max_latency, "max_size": max_size}
    samples: dict[str, Any] = {key: str(path) for key, path in (("calibrate", data), ("train", train)) if path}
    samples |= {"columns": parse_columns(column)} if column else {}
    chosen = read_recipe(recipe, keys | {"data": samples or None}, goal, trust=trust)
    seconds = parse_search(budget, executor)
    if show_recipe:
        typer.echo(chosen.to_yaml(), nl=False)
        return
    if output is None:
        raise UsageError("no output folder was given. Give --output FOLDER, as minilm.laconic")
    if seconds is not None:
        run_search(chosen, output, seconds, executor, trust=trust, as_json=as_json)
    else:
        run_recipe(chosen, output, trust=trust, as_json=as_json)


def parse_search(budget: str | None, executor: str) -> float | None:
    """Parse the budget of a search to seconds; None where none was requested. Raises UsageError."""
    from laconic.units import parse_budget

    if budget is None and executor != "local":
        raise UsageError("--executor is for a search, and none was requested. Give --budget, as 30m")
    return None if budget is None else parse_budget(budget)


def run_search(recipe: "Recipe", output: Path, seconds: float, executor: str, *, trust: bool, as_json: bool) -> None:
    """Search for the best artifact within a time budget. Raises UsageError for a recipe that writes a checkpoint."""
    if recipe.to == "checkpoint":
        raise UsageError("a search writes an artifact, not a checkpoint. Leave out --budget or --to")
    from compress.search.search import search

    finish(search(recipe, output, budget=seconds, executor=executor, trust=trust), as_json)


def run_recipe(recipe: "Recipe", output: Path, *, trust: bool, as_json: bool) -> None:
    """Run a recipe as it is, to an artifact or to a checkpoint."""
    from compress.out_of_core.quantized_checkpoint import quantize_checkpoint
    from compress.pipeline import compress, compress_checkpoint

    if recipe.quantizes_checkpoint:
        finish_checkpoint(quantize_checkpoint(recipe, output, trust=trust), as_json)
    elif recipe.to == "checkpoint":
        finish_checkpoint(compress_checkpoint(recipe, output, trust=trust), as_json)
    else:
        finish(compress(recipe, output, trust=trust), as_json)


def export(
    source: Source,
    output: Output,
    data: Data = None,
    task: Task = None,
    builder: Builder = None,
    weights_key: WeightsKey = None,
    to: Annotated[
        str | None, typer.Option(help="Write an ARTIFACT for other programs: compressed-tensors, gguf, gptq, openvino.")
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Write a model as an artifact in full precision: capture, build, validate, without compression.

    Without --data, outputs are compared on made-up inputs, and the artifact records that. With --to, write the language
    model in an artifact in a format of another program, with the integers and scales that the artifact holds.
    """
    if to is not None:
        if data or task or builder or weights_key:
            raise UsageError("--to writes an artifact as it is: --data, --task, --builder, --weights-key have no use")
        from export.formats.write import write_format

        finish_format(write_format(Path(source), to, output), as_json)
        return
    keys: dict[str, Any] = {
        "source": source,
        "task": task,
        "builder": builder,
        "weights_key": weights_key,
        "stages": [],
        "data": data and str(data),
    }
    from export.pipeline import export

    chosen = read_recipe(None, keys, {"fidelity": EXPORT_FIDELITY}, trust=trust)
    finish(export(chosen, output, trust=trust), as_json)


def build(
    artifact: ArtifactPath,
    output: Output,
    target: Annotated[str | None, typer.Option(help="Hardware target: cpu, cuda or tensorrt.")] = None,
    original: Annotated[Path | None, typer.Option(help="The source model, if the artifact has no float graph.")] = None,
    data: Data = None,
    engine_only: Annotated[str | None, typer.Option(help="Build for this engine only.")] = None,
    portable: Annotated[
        bool, typer.Option("--portable", help="Place the model for every engine of the target.")
    ] = False,
    fidelity: Annotated[float | None, typer.Option(min=0, max=1, help="Mean fidelity to reach, as 0.999.")] = None,
    builder: Builder = None,
    draft: Annotated[
        Path | None, typer.Option(help="Artifact of a smaller model: let it draft tokens, if that is faster here.")
    ] = None,
    trust: Trust = False,
    as_json: Json = False,
) -> None:
    """Build the model of an artifact for another target or engine, without calibrating again.

    Precision, ranges and rounded weights are those of the artifact; the graph is placed by the rules of the other
    engine. Outputs are compared with the float graph's, on --data or on made-up inputs. With --draft, write the
    artifact as it is with a draft model, if lone answers come faster with it on this machine.
    """
    if draft is not None:
        others: dict[str, object] = {"--target": target, "--original": original, "--engine-only": engine_only}
        others |= {"--portable": portable or None, "--fidelity": fidelity, "--builder": builder}
        check_unused(others | {"--trust": trust or None}, "for another target or engine, and not for --draft")
        build_with_draft(artifact, draft, output, data, as_json=as_json)
        return
    from export.rebuild import build
    from laconic.artifacts.manifest import read_manifest
    from laconic.recipes.recipe import Origin

    source = None
    if original is not None:
        made = read_manifest(artifact)
        # A module of one's own is built with the arguments and for the inputs that it was compressed with.
        kept = {key: made.source[key] for key in ("arguments", "weights_key") if key in made.source}
        arguments = kept | {"inputs": made.inputs} if builder else {}
        source = Origin.model_validate({"source": str(original), "task": made.task, "builder": builder} | arguments)
    goal = None if fidelity is None else {"fidelity": fidelity}
    changes: dict[str, Any] = {"target": target, "engine_only": engine_only, "portable": portable, "goal": goal}
    changes |= {"data": data and str(data), "keep_graph": original is None}
    finish(build(artifact, output, changes=changes, original=source, trust=trust), as_json)


def read_recipe(path: Path | None, keys: dict[str, Any], goal: dict[str, Any], *, trust: bool) -> "Recipe":
    """Read a recipe from a file, or the ready or the default recipe; command-line options override it.

    keys, goal: keys of the recipe and of its goal; those that are None are left to the recipe.
    """
    keys = {key: value for key, value in keys.items() if value is not None}
    required = {key: value for key, value in goal.items() if value is not None}
    keys |= {"goal": required} if required else {}
    if path is None and "source" not in keys:
        raise UsageError("no source was given. Give a SOURCE, or a --recipe that names one")
    recipe = load_recipe(path, keys, trust)
    if recipe.task is None and "stages" not in keys and (task := find_default_task(recipe)):
        return load_recipe(path, keys | {"task": task}, trust)
    return recipe


def load_recipe(path: Path | None, keys: dict[str, Any], trust: bool) -> "Recipe":
    """Load a recipe of a file, or of keys of the command line alone."""
    from laconic.recipes.ready import find_recipe
    from laconic.recipes.recipe import Recipe

    if path is None:
        return Recipe.parse(keys, where="command line")
    return Recipe.load(find_recipe(path), trust=trust, **keys)


def find_default_task(recipe: "Recipe") -> str | None:
    """Find the task of a recipe's source where it changes which stages are the default; None otherwise."""
    source = Path(recipe.source)
    if recipe.builder is not None or not source.exists() or source.suffix == ".onnx":
        return None
    from laconic.models.processors import resolve_task
    from laconic.models.source_loading import find_task

    task = find_task(source)
    return task if task and resolve_task(task).default_recipe else None


def build_with_draft(path: Path, draft: Path, output: Path, data: Path | None, *, as_json: bool) -> None:
    """Try a draft model, and print the trial; raise GoalMissed for one that is not faster, and was left out."""
    from export.draft_trial import add_draft
    from laconic.artifacts.inspection import summarize
    from laconic.commands.console import OUT

    artifact, trial = add_draft(path, draft, output, data=data)
    if as_json:
        print_json(summarize(artifact))
    else:
        OUT.print(f"{output}: {trial.describe()}", soft_wrap=True)
    if not trial.is_faster:
        raise GoalMissed(f"{draft} is no faster: {output} was written without it. Try a draft with other layers")


def finish(result: "Result", as_json: bool) -> None:
    """Print an artifact that was written; raise GoalMissed for the parts of the goal that it does not meet."""
    from laconic.artifacts.inspection import summarize
    from laconic.commands.tables import print_compressed

    if as_json:
        print_json(summarize(result.artifact) | {"missed": list(result.missed)})
    else:
        print_compressed(result.artifact)
    if result.missed:
        raise GoalMissed(
            f"the goal was not met: {list_missed(result.missed)} The best result is in {result.artifact.path}. "
            f"Try a gentler recipe, a lower --fidelity, or more --data"
        )


def finish_checkpoint(result: "WrittenCheckpoint", as_json: bool) -> None:
    """Print a checkpoint that was written; raise GoalMissed for the parts of the goal that it does not meet."""
    from laconic.commands.tables import print_checkpoint

    if as_json:
        print_json(result.report | {"path": str(result.path), "missed": list(result.missed)})
    else:
        print_checkpoint(result.path, result.report)
    if result.missed:
        raise GoalMissed(f"the goal was not met: {list_missed(result.missed)} The checkpoint is in {result.path}")


def finish_format(written: "WrittenFormat", as_json: bool) -> None:
    """Print what was written in a format of another program."""
    from laconic.commands.console import OUT
    from laconic.units import format_bytes

    if as_json:
        print_json(asdict(written))
        return
    OUT.print(f"{written.path}: {written.format}, {format_bytes(written.size)}", soft_wrap=True)
    for note in written.notes:
        OUT.print(f"  {note}", soft_wrap=True)


def list_missed(missed: Sequence[str]) -> str:
    """Write one missed part of a goal as the end of a sentence, several as lines of a list."""
    return f"{missed[0]}." if len(missed) == 1 else "".join(f"\n  - {each}" for each in missed) + "\n"
