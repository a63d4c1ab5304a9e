"""Quantized checkpoints of language models that do not fit in memory: `laconic compress --to checkpoint`."""

import json
import shutil
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save_file
from torch import nn

from compress.checkpoint_report import WrittenCheckpoint, compare_with_original, find_missed_by_checkpoint, write_report
from compress.out_of_core.layer_loop import LayerLoop
from compress.out_of_core.layer_rounding import find_linear
from compress.out_of_core.layerwise_run import LayerwiseRun
from compress.out_of_core.stage_settings import read_settings
from compress.quantize.calibration import draw_calibration_samples
from laconic.artifacts.ledger import make_ledger
from laconic.artifacts.record import Record
from laconic.artifacts.verdict import Comparison
from laconic.cache import Cache, open_scratch_folder
from laconic.data.dataset import Dataset, Samples
from laconic.errors import FormatRefused, RecipeError
from laconic.files import replace_folder
from laconic.hardware import this_machine
from laconic.hashing import environment_digest, hash_of
from laconic.models.checkpoint import check_free
from laconic.models.model_folder import read_source_json
from laconic.models.quantized_weights import CONFIG, INDEX, open_float_folder
from laconic.models.sharded_model import ShardedModel, open_sharded_model
from laconic.models.source_loading import read_licence
from laconic.progress import Steps
from laconic.quantization.plan import QuantizedWeight
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import SampleSplits, split_samples
from laconic.recipes.stage import Context, describe_stage
from laconic.registry import trust_addresses
from laconic.tasks.text2text_generation import TargetedText
from laconic.tasks.text_generation import TextGeneration
from laconic.weight_formats.compressed_tensors_format import CompressedTensorsFormat
from laconic.weight_formats.weight_format import LinearWeight


def quantize_checkpoint(
    recipe: Recipe, destination: Path, *, trust: bool = False, steps: Steps | None = None, cache: Cache | None = None
) -> WrittenCheckpoint:
    """Quantize the linear modules in the layers of a language model, and write a folder of transformers in the format
    compressed-tensors to `destination` atomically, with a report.

    One layer is in memory at a time. Each linear module is rounded by itself, by what it reads in the original model,
    as the recipe's stage rounds the weights of an artifact; embeddings and the head stay as they are stored. An
    interrupted run resumes at its layer. Raises a LaconicError for an invalid source, data or recipe.
    """
    check_free(destination.resolve())
    settings, steps, cache = read_settings(recipe), steps or Steps(), cache or Cache()
    if recipe.builder is not None or not Path(recipe.source).is_dir():
        raise RecipeError("a checkpoint is quantized layer by layer from a folder of transformers. Give such a source")
    with (
        trust_addresses(trust),
        open_scratch_folder(destination) as scratch,
        open_float_folder(Path(recipe.source)) as source,
    ):
        with steps.step("read the model and the samples") as step:
            model = open_sharded_model(source, trust=trust)
            loop = LayerLoop(model)
            check_linear(loop)
            samples = split_samples(recipe, model.task)
            judge = with_own_targets(samples.judge, model.task)
            context = make_context(recipe, model, samples, scratch, cache, steps)
            step.note = f"{sum(file.stat().st_size for file in model.files) / 1e6:.1f} MB, {len(judge)} test samples"
        texts = [
            each
            for dataset in draw_calibration_samples(context, settings.samples)
            for each in encode(dataset, model.task)
        ]
        work = cache.folder / f"layers-{context.key}"
        run = LayerwiseRun(loop, texts, encode(judge, model.task), settings, work)
        quantization = describe_quantization(run)
        with cache.lock(f"quantize-{context.key}"):
            work.mkdir(parents=True, exist_ok=True)
            start = time.perf_counter()
            run.quantize(steps)
            comparison = compare_with_original(model.task, *run.compare(steps), judge, recipe)
            folder = scratch / "checkpoint"
            write_folder(run, quantization, folder)
            report = describe_result(recipe, run, comparison, folder, context.key, time.perf_counter() - start)
            write_report(report, recipe, folder)
            replace_folder(folder, destination)
            shutil.rmtree(work, ignore_errors=True)
    return WrittenCheckpoint(destination, report, tuple(find_missed_by_checkpoint(comparison, report, recipe.goal)))


def check_linear(loop: LayerLoop) -> None:
    """Raise RecipeError for a model without a linear module in its layers."""
    if not any(find_linear(layer) for layer in loop.layers):
        raise RecipeError(
            f"the layers of the {type(loop.model.model).__name__} have no nn.Linear, whose weights alone "
            f"compressed-tensors holds (GPT-2 has Conv1D in its place). Leave `to: checkpoint` out, for an artifact"
        )


def make_context(
    recipe: Recipe, model: ShardedModel, samples: SampleSplits, folder: Path, cache: Cache, steps: Steps
) -> Context:
    """Make the context of the recipe's only stage, with a key of everything that its result depends on."""
    (step,), (stage,) = recipe.stages, recipe.make_stages()
    calibrate = with_own_targets(samples.calibrate, model.task)
    data = [each.fingerprint for each in (calibrate, samples.judge)]
    config = read_source_json(model.folder / CONFIG)
    key = hash_of(describe_stage(step.name, stage), model.digest(), config, data, recipe.seed, environment_digest())
    return Context(
        model.task,
        key,
        recipe.seed,
        folder,
        cache,
        steps,
        calibrate,
        calibrate,
        with_own_targets(samples.choose, model.task),
    )


def with_own_targets(dataset: Dataset, task: TextGeneration) -> Dataset:
    """Return a dataset in which a text without a target has its own tokens behind the prompt for one: to have the
    original write them, it would be read from the disk once for each token."""
    texts = []
    for sample in dataset.samples.sources:
        if not task.has_target(sample):
            ((prompt, _),) = task.divide([sample])
            ids, _ = task.tokenize([sample])[0]
            sample = TargetedText(sample, ids[len(prompt) : len(prompt) + task.compared].tolist())
        texts.append(sample)
    return replace(dataset, samples=Samples(texts, task.parse))


def encode(dataset: Dataset, task: TextGeneration) -> list[dict[str, Any]]:
    """Encode the samples, each alone, so that nothing is padded: [1, tokens] by input."""
    return [task.encode([sample]) for sample in dataset.samples]


def describe_quantization(run: LayerwiseRun) -> dict[str, Any]:
    """Make the `quantization_config` of a run. Raises RecipeError for a module that the format does not hold."""
    bits, size = run.settings.bits, run.settings.group_size
    linear: dict[str, LinearWeight] = {}
    others = []
    for path, module in run.loop.model.model.named_modules():
        if path in run.rounded:
            outputs, inputs = module.weight.shape
            integers = np.broadcast_to(np.int8(0), (inputs, outputs))  # its shape alone is read
            scales = np.ones((-(-inputs // size) if size else 1, 1), np.float32)
            linear[path] = LinearWeight(QuantizedWeight(integers, scales, None, size), bits)
        elif isinstance(module, nn.Linear):
            others.append(path)
    if not linear:
        raise RecipeError("`keep` leaves no linear module to quantize. Expected one at least; name fewer patterns")
    try:
        return CompressedTensorsFormat.describe(linear, others)
    except FormatRefused as error:
        raise RecipeError(f"compressed-tensors does not hold this model: {error}") from None


def write_folder(run: LayerwiseRun, quantization: Mapping[str, Any], folder: Path) -> None:
    """Write the folder of transformers: a shard for each layer, one for all other weights, and what the source has
    beside its weights."""
    model, count = run.loop.model, len(run.files) + 1
    shards = [folder / f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
    folder.mkdir()
    for file, shard in zip(run.files, shards, strict=False):
        shutil.copyfile(file, shard)
    within = tuple(f"{path}." for path in run.paths)
    names = [name for name, (stored, _) in model.places.items() if name == stored and not name.startswith(within)]
    save_file(model.read(names), shards[-1], metadata={"format": "pt"})
    places = {name: shard.name for shard in shards for name in list_tensors(shard)}
    size = sum(shard.stat().st_size for shard in shards)
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True), encoding="utf-8")
    config = read_source_json(model.folder / CONFIG) | {"quantization_config": quantization}
    (folder / CONFIG).write_text(json.dumps(config, indent=2), encoding="utf-8")
    for path in model.folder.iterdir():
        if path.suffix in (".json", ".jinja", ".model", ".txt", ".md") and not path.name.endswith(
            (".index.json", CONFIG)
        ):
            shutil.copyfile(path, folder / path.name)


def list_tensors(file: Path) -> list[str]:
    """List the names of the tensors in a safetensors file."""
    with file.open("rb") as opened:
        header = json.loads(opened.read(int.from_bytes(opened.read(8), "little")))
    return [name for name in header if name != "__metadata__"]


def describe_result(
    recipe: Recipe, run: LayerwiseRun, comparison: Comparison, folder: Path, key: str, seconds: float
) -> dict[str, Any]:
    """Describe the checkpoint in a folder for its report, JSON-ready. seconds: that this run took."""
    model, ((name, config, _),) = run.loop.model, [describe_stage(recipe.stages[0].name, recipe.make_stages()[0])]
    parameters = sum(each.numel() for each in model.model.parameters())
    start = {"parameters": parameters, "bytes": sum(file.stat().st_size for file in model.files)}
    figures = {"parameters": parameters, "bytes": sum(file.stat().st_size for file in folder.glob("*.safetensors"))}
    figures |= {"fidelity": comparison.figures["fidelity"], "fidelity worst": comparison.figures["fidelity_worst"]}
    history = [Record(stage=name, config=config, key=key, figures=figures)]
    return {
        "task": model.task.name,
        "source": Path(recipe.source).resolve().name,
        "stages": [entry.plain() for entry in make_ledger({"figures": start}, history, {key: seconds})],
        "drift": comparison.model_dump(mode="json"),
        "licence": read_licence(model.folder),
        "machine": this_machine().model_dump(mode="json"),
    }
