"""Every stage that quantizes: from what it decides to what both engines answer, on a tiny model."""

import copy
from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from captured import open_captured
from onnx import numpy_helper

from compress.quantize.calibration import draw_calibration_samples, single_sample_batches
from compress.quantize.fake_quantize import LearnedRange, attach_fake_quantization, fake_quantize_weight, find_operation
from compress.quantize.graph_moments import collect_moments
from compress.quantize.plan_rounding import RoundingConfig, round_plan
from compress.quantize.qat import find_quantizable
from compress.quantize.ranges import RANGES, read_learned_ranges
from compress.quantize.sensitivity import measure_sensitivity
from compress.quantize.static import Static
from export.candidates.audit import audit
from export.capture.capture import capture
from export.placements.place import place
from laconic import registry
from laconic.artifacts.record import Record
from laconic.cache import Cache
from laconic.data.reader import make_dataset
from laconic.errors import MissingPackage, RecipeError
from laconic.models.checkpoint import Checkpoint
from laconic.progress import Steps
from laconic.quantization import qparams
from laconic.quantization.graph import Layer
from laconic.quantization.plan import Plan, Range
from laconic.recipes.stage import PlanContext, TorchContext
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.predict import predict
from laconic.runtimes.runtime import make_runtime

ENGINES = ("onnxruntime", "openvino")
SETTINGS = {
    "quantize.static": [{}, {"rounding": "gptq"}, {"rounding": "adaround", "bias_correction": False}],
    "quantize.weights": [{"bits": 8}, {"bits": 16}, {"bits": 4}, {"bits": 8, "rounding": "gptq"}],
    "quantize.gptq": [{}, {"bits": 8}, {"group_size": 16, "act_order": False, "bias_correction": True}],
    "quantize.awq": [{"mixed_precision": False}, {"group_size": 16, "symmetric": False, "mixed_precision": False}],
    "quantize.dynamic": [{}],
}
CASES = [
    (name, given) for name in registry.STAGES if name.startswith("quantize.") for given in SETTINGS.get(name, [{}])
]


@pytest.fixture(scope="module")
def made(shared):
    """A checkpoint, its graph, and the original's answers."""
    checkpoint, graph = open_captured(shared, "embedder")
    data = make_dataset(checkpoint.task.examples(24), checkpoint.task)
    with OnnxRuntime().open(graph.path) as session:
        return checkpoint, graph, data, predict(session, checkpoint.task, data)


def common(made, folder):
    checkpoint, _, data, _ = made
    return {
        "task": checkpoint.task,
        "key": "key",
        "seed": 0,
        "folder": folder,
        "cache": Cache(folder / "cache"),
        "steps": Steps(quiet=True),
        "train": data,
        "calibrate": data,
        "choose": data,
    }


def planning(made, folder, trial=lambda plan: np.zeros(3), history=()):
    return PlanContext(**common(made, folder), trial=trial, history=history)


def training(made, folder):
    return TorchContext(
        **common(made, folder), original=made[0], fidelity=lambda checkpoint: np.ones(3), work=folder / "work"
    )


def fidelities(made, graph, plan, folder, engines=ENGINES):
    """The least of each engine's answers, audited."""
    checkpoint, _, data, original = made
    for engine in engines:
        path = folder / f"{engine}.onnx"
        place(graph, plan, registry.resolve("placement", engine)["float32"], path)
        with make_runtime(engine).open(path) as session:
            found = predict(session, checkpoint.task, data)
            audit(graph, plan, session.kernels(), engine)
        yield checkpoint.task.fidelity(original, found).min()


@pytest.mark.sweep("quantize.qat-given9")
@pytest.mark.parametrize(("name", "given"), CASES)
def test_what_a_stage_decides_runs_on_both_engines(made, tmp_path, name, given):
    try:
        stage = registry.resolve("stage", name)(**given)
    except MissingPackage as error:
        pytest.skip(str(error))
    _, graph, _, _ = made
    if stage.kind == "torch":
        stage = stage.model_copy(update={"steps": 2, "batch_size": 4, "samples": 4})
        changed = stage.apply(made[0], training(made, tmp_path))
        graph = capture(changed, tmp_path / "graph")
        ladder = Static(samples=8, mixed_precision=False).plan(graph, planning(made, tmp_path, history=changed.history))
    else:
        ladder = stage.plan(graph, planning(made, tmp_path))
    engines = ENGINES[:1] if name == "quantize.dynamic" else ENGINES  # OpenVINO has no kernel for that, and is refused
    for fidelity in fidelities(made, graph, ladder.rungs[0][0], tmp_path, engines):
        assert fidelity > (0.97 if given.get("bits") != 4 and name not in ("quantize.awq", "quantize.gptq") else 0.9)


@pytest.mark.parametrize("lowest", ["int8", "int4-weight"])
def test_a_layers_sensitivity_costs_one_trial(made, tmp_path, lowest):
    _, graph, _, _ = made
    tried = []

    def trial(plan):
        tried.append([node for node, precision in plan.precision.items() if precision != "float32"])
        return np.full(3, 0.1)

    found = measure_sensitivity(graph, Plan({x.node: lowest for x in graph.layers}), planning(made, tmp_path, trial))
    assert tried == [[layer.node] for layer in graph.layers]
    assert found == pytest.approx({layer.node: 0.1 for layer in graph.layers})


def test_bias_correction_removes_the_mean_error_of_a_layer(made, tmp_path):
    _, graph, _, _ = made
    context = planning(made, tmp_path)
    layer = next(layer for layer in graph.layers if layer.kind == "MatMul" and "intermediate" in layer.module)
    plan = Plan({x.node: "int4-weight" if x == layer else "float32" for x in graph.layers})
    datasets = draw_calibration_samples(context, 8)
    given = {layer.node: lambda rows: rows}
    ((_, _, seen),) = collect_moments(
        graph,
        [layer],
        given,
        lambda: single_sample_batches(datasets, context.task),
        OnnxRuntime(),
        tmp_path,
        second=False,
    )
    errors = []
    for bias in (False, True):
        made_plan = round_plan(graph, plan, RoundingConfig("nearest", 16, bias_correction=bias), datasets, context)
        each = made_plan.weights[layer.node, "int4-weight"]
        weight = numpy_helper.to_array(
            next(x for x in onnx.load(graph.path).graph.initializer if x.name == layer.weight)
        )
        rounded = each.integers * qparams.expand_scales(each.scales, layer.shape[0], 16)
        error = seen.total[0] / seen.count @ (rounded - weight) + (
            0 if each.bias_correction is None else each.bias_correction
        )
        errors.append(np.abs(error).max())
    assert errors[0] > 1e-3
    assert errors[1] < 1e-6


def largest_weights(plan, precision="int8"):
    """The largest integer of each layer's weight."""
    return {np.abs(each.integers).max() for (_, kind), each in plan.weights.items() if kind == precision}


def lowest_of(stage, made, folder, **given):
    """The smallest plan of a stage on this machine's processor."""
    return stage.plan(made[1], replace(planning(made, folder), **given)).rungs[0][0]


def largest_pair(plan, layers):
    """The largest absolute sum of two neighbouring channels' integers, over all layers of more than one channel."""
    found = 0
    for layer in layers:
        integers = np.asarray(plan.weights[layer.node, "int8"].integers, np.int32)
        rows = np.moveaxis(integers, 1, 0) if layer.kind == "Conv" else integers
        even = len(rows) // 2 * 2
        found = max(found, np.abs(rows[0:even:2] + rows[1:even:2]).max(initial=0))
    return found


@pytest.mark.parametrize("rounding", ["nearest", "gptq"])
def test_weights_with_a_reduced_range_cannot_saturate_in_16_bits(made, tmp_path, rounding):
    settings = {"samples": 8, "mixed_precision": False, "rounding": rounding}
    plan = lowest_of(Static(**settings, reduce_range=True), made, tmp_path)
    layers = [layer for layer in made[1].layers if layer.kind != "Gather"]
    allowed = 128 if rounding == "nearest" else 130
    assert 64 < largest_pair(plan, layers) <= allowed
    for fidelity in fidelities(made, made[1], plan, tmp_path):
        assert fidelity > 0.97
    plan = lowest_of(Static(**settings, reduce_range=False), made, tmp_path)
    assert largest_weights(plan) == {127}
    assert largest_pair(plan, layers) > allowed


def test_where_sums_may_saturate_the_more_faithful_range_is_taken(made, tmp_path):
    static = Static(samples=8, mixed_precision=False)
    layers = [layer for layer in made[1].layers if layer.kind != "Gather"]

    def prefer(*, reduced):
        return lambda plan: np.full(3, 0.0 if (largest_pair(plan, layers) <= 128) == reduced else 0.5)

    for reduced in (True, False):
        plan = lowest_of(static, made, tmp_path, trial=prefer(reduced=reduced), int8_saturates=True)
        assert (largest_pair(plan, layers) <= 128) == reduced
    plan = lowest_of(static, made, tmp_path, trial=prefer(reduced=True))
    assert largest_pair(plan, layers) > 128, "another processor"


def test_the_same_samples_give_the_same_integers_and_the_second_time_from_the_cache(made, tmp_path):
    _, graph, _, _ = made
    context = planning(made, tmp_path)
    plan = Plan({x.node: "int4-weight" if x.kind == "MatMul" else "float32" for x in graph.layers})
    first, second = (
        round_plan(graph, plan, RoundingConfig("gptq", 16), draw_calibration_samples(context, 8), each)
        for each in (context, replace(context, cache=Cache(tmp_path / "other")))
    )
    third = round_plan(graph, plan, RoundingConfig("gptq", 16), draw_calibration_samples(context, 8), context)
    for other in (second, third):
        assert first.weights.keys() == other.weights.keys()
        for key, each in first.weights.items():
            assert each.group_size == other.weights[key].group_size == 16
            for name, array in each.arrays.items():
                np.testing.assert_array_equal(array, other.weights[key].arrays[name])


def test_fragments_that_another_seed_draws_are_calibrated_anew(made, tmp_path):
    stage, context = Static(samples=24, mixed_precision=False), planning(made, tmp_path)
    for seed in (0, 1, 1):
        stage.plan(made[1], replace(context, seed=seed))
    assert len(list(context.cache.folder.glob("calibrated-*"))) == 2


def test_a_layer_that_leaves_its_precision_is_rounded_anew(made, tmp_path):
    _, graph, _, _ = made
    stage = registry.resolve("stage", "quantize.gptq")(samples=8, group_size=16)
    *_, (last,) = stage.plan(graph, planning(made, tmp_path)).rungs
    assert set(last.precision.values()) == {"float32"}
    for fidelity in fidelities(made, graph, last, tmp_path):
        assert fidelity > 0.99999


# Learned ranges.


@pytest.mark.parametrize("limits", [Range(-1.3, 2.0), Range(0.0, 3.0), Range(-2.0, 0.0), Range(0.5, 3.0)])
def test_a_layer_in_training_computes_as_placement_quantizes(limits):
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(64, 8, generator=generator) * 2
    expected = qparams.fake_quantize_activation(values.numpy(), limits)
    np.testing.assert_allclose(LearnedRange(limits)(values).detach().numpy(), expected, atol=1e-5)
    weight = torch.randn(8, 5, generator=generator)
    for axis in (0, 1):
        np.testing.assert_allclose(
            fake_quantize_weight(weight, axis), qparams.fake_quantize_weight(weight.numpy(), axis), atol=1e-6
        )


def test_a_clipped_value_moves_the_end_that_clipped_it_and_what_was_attached_comes_off():
    learned = LearnedRange(Range(0.0, 1.0))
    learned(torch.tensor([5.0, 0.5])).sum().backward()
    low, high = learned.growth.grad
    assert low == 0
    assert high > 0, "a higher end gives a greater sum"
    inside = torch.tensor([0.3, 0.9], requires_grad=True)
    outside = torch.tensor([-4.0, 4.0], requires_grad=True)
    learned(torch.cat([inside, outside])).sum().backward()
    np.testing.assert_allclose(inside.grad, 1, atol=1e-5)
    np.testing.assert_allclose(outside.grad, 0, atol=1e-5)
    layer = torch.nn.Conv2d(2, 3, 3)
    values = torch.randn(1, 2, 6, 6)
    before, state = layer(values), copy.deepcopy(layer.state_dict())
    undo = attach_fake_quantization(layer, find_operation(layer), LearnedRange(Range(-0.5, 0.5)))
    assert not torch.equal(layer(values), before)
    undo()
    assert torch.equal(layer(values), before)
    assert layer.state_dict().keys() == state.keys()


def test_training_leaves_the_same_module_with_its_ranges_in_the_history(made, tmp_path):
    checkpoint, graph, _, _ = made
    stage = registry.resolve("stage", "quantize.qat")(steps=3, batch_size=4, samples=4, keep=("*.intermediate.*",))
    before = {name: value.clone() for name, value in checkpoint.module.state_dict().items()}
    changed = stage.apply(checkpoint, training(made, tmp_path))
    after = changed.module.state_dict()
    assert after.keys() == before.keys()
    assert any(not torch.equal(after[name], before[name]) for name in before)
    assert all(torch.equal(value, before[name]) for name, value in checkpoint.module.state_dict().items())
    ranges = changed.history[-1].structure[RANGES]
    assert ranges
    assert not any(".intermediate." in path for path in ranges)
    shared = [ranges[path] for path in ranges if ".layer.0.attention.self." in path]
    assert len(shared) == 3
    assert shared[0] == shared[1] == shared[2], "three layers that read one tensor"
    changed.save(tmp_path / "saved")
    assert Checkpoint.load(tmp_path / "saved").history == changed.history
    context = planning(made, tmp_path, history=changed.history)
    plan = Static(samples=8, mixed_precision=False).plan(graph, context).rungs[0][0]
    for layer in graph.layers:
        if layer.module in ranges:
            assert plan.ranges[layer.input] == Range(*ranges[layer.module])
            assert layer.input not in plan.smoothing


def test_readers_share_the_wider_range_of_the_last_training_and_a_pattern_that_names_no_layer_is_refused():
    layers = [Layer(name, name, "MatMul", "x", "w", "y", (2, 2), 1) for name in "ab"]
    history = [
        Record(stage="quantize.qat", config={}, key="1", structure={RANGES: {"a": [-9.0, 9.0]}}),
        Record(stage="quantize.qat", config={}, key="2", structure={RANGES: {"a": [-1.0, 2.0], "b": [-2.0, 1.0]}}),
        Record(stage="finetune", config={}, key="3"),
    ]
    assert read_learned_ranges(history, layers) == {"x": Range(-2.0, 2.0)}
    assert read_learned_ranges([], layers) == {}
    with pytest.raises(RecipeError, match="no layer is named 'zero'"):
        find_quantizable(torch.nn.Sequential(torch.nn.Linear(2, 2)), ["zero"])
