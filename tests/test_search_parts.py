"""The parts of a search: Pareto front, budget, constraints, search space, study, latency table, executor."""

import math
from dataclasses import dataclass
from itertools import pairwise

import models
import numpy as np
import onnx
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from language_models import save

from compress.search import layer_timing
from compress.search.budget import Budget
from compress.search.constraints import Constraints, Quality, measure_quality
from compress.search.evaluation import make_build_key
from compress.search.executor import open_executor
from compress.search.latency_model import LatencyTable
from compress.search.layer_spec import LayerSpec, read_layer_specs
from compress.search.layer_timing import ATTENTION_INPUTS, write_graph
from compress.search.search_candidate import CostPrediction, dominates
from compress.search.search_space import AXES, Study, apply_settings, can_heal, find_axes, predict_specs
from compress.search.search_state import find_objectives, mark_front
from export.candidates.engine_option import EngineOption
from laconic import registry
from laconic.cache import Cache
from laconic.data.reader import make_dataset
from laconic.errors import DataError, UsageError
from laconic.models.checkpoint import Checkpoint
from laconic.models.processors import plain_task
from laconic.models.signature import probe_module
from laconic.models.source_loading import load_source
from laconic.quantization.plan import Plan, Range
from laconic.recipes.goal import Goal
from laconic.recipes.recipe import Recipe
from laconic.runtimes.runtime import make_runtime
from laconic.timing.measurements import TrialRecord

FIGURE = st.floats(0, 10)


def of_module(module):
    module.eval()
    task = plain_task("image-classification" if module.inputs[0].name == "image" else "tensors", module.inputs, "model")
    source = {"kind": "builder", "builder": "models:none", "arguments": {}}
    return Checkpoint.of(module, task, outputs=probe_module(module, module.inputs), source=source, size=1)


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return load_source(models.save_bert(tmp_path_factory.mktemp("bert") / "bert"))


# Front


@st.composite
def trials(draw):
    drops = draw(st.booleans())
    made = []
    for number in range(draw(st.integers(1, 12))):
        fidelity, drop, latency, size, speedup = draw(st.tuples(*[FIGURE] * 5))
        made.append(
            TrialRecord(
                name=str(number),
                fidelity=fidelity,
                drop=drop if drops else None,
                latency=latency,
                size=size,
                speedup=speedup,
                measured=draw(st.booleans()),
                reason="",
            )
        )
    return made


@given(trials())
def test_no_point_of_the_front_is_dominated_and_each_other_built_one_is(made):
    found = mark_front(made)
    built = [trial for trial in found if trial.measured]
    assert {trial.name for trial in found} == {trial.name for trial in made}
    for trial in found:
        beaten = any(dominates(find_objectives(other), find_objectives(trial)) for other in built)
        assert trial.front == (trial.measured and not beaten)
    assert not built or any(trial.front for trial in built)


# Budget


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_a_second_run_is_charged_for_the_first_and_a_budget_says_what_it_has_time_for(tmp_path):
    clock = Clock()
    first = Budget(100, Cache(tmp_path), clock)
    clock.now = 30
    assert first.charge("a", "cut", 3) == 30
    assert first.is_fresh
    clock.now = 50
    first.charge("b")
    second = Budget(100, Cache(tmp_path), clock)
    clock.now = 51
    assert second.charge("a", "cut", 3) == 30
    assert not second.is_fresh
    assert second.estimate("cut", 2) == first.estimate("cut", 2) == 20
    second.charge("b")
    assert second.spent == first.spent == 50
    assert second.remaining == 50
    clock = Clock()
    budget = Budget(10, Cache(tmp_path / "other"), clock)
    assert budget.estimate("heal") is None
    assert budget.allows("heal", 1000)
    clock.now = 8
    budget.charge("a", "heal", 4)
    assert budget.allows("heal", 0.5)
    assert not budget.allows("heal", 1)
    assert not budget.allows("heal", 0.5, keep=1)
    clock.now = 13
    budget.charge("b")
    assert budget.overrun == 3


# Constraints


def classifier_task():
    return plain_task("image-classification", (models.IMAGE,), "model")


def dataset(labels):
    task = classifier_task()
    return make_dataset(task.examples(len(labels)), task, labels=labels)


def logits(classes):
    return {"logits": 10 * np.eye(4, dtype=np.float32)[classes]}


def test_part_of_the_interval_is_added_to_a_drop():
    labels = [number % 4 for number in range(200)]
    right = logits(labels)
    wrong = logits([(label + 1) % 4 if number < 2 else label for number, label in enumerate(labels)])
    same = measure_quality(classifier_task(), right, right, dataset(labels), 0)
    lost = measure_quality(classifier_task(), right, wrong, dataset(labels), 0)
    assert same.drop == 0 < same.cautious_drop < 0.01, "what no sample shows may be so all the same"
    assert lost.drop == pytest.approx(0.01)
    assert 0.01 < lost.cautious_drop < 0.03
    constraints = Constraints.from_goal(Goal(max_drop="1%"), classifier_task(), dataset(labels))
    assert constraints.shortfall(same) < 1
    assert constraints.shortfall(lost) > 1


def test_a_drop_needs_labels_and_without_any_goal_the_task_says_how_faithful():
    task = classifier_task()
    with pytest.raises(DataError, match="labels"):
        Constraints.from_goal(Goal(max_drop="1%"), task, make_dataset(task.examples(8), task))
    task = classifier_task()
    few = make_dataset(task.examples(8), task)
    with pytest.raises(
        UsageError, match=r"goal\.min_tokens_per_second is for models that write, and the task is image"
    ):
        Constraints.from_goal(Goal(min_tokens_per_second=30), task, few)
    constraints = Constraints.from_goal(Goal(), task, few)
    assert constraints.prefers_speed
    assert constraints.shortfall(Quality(1, 1)) == 0
    assert constraints.shortfall(Quality(0.5, 0.1)) > 1
    assert not Constraints.from_goal(Goal(max_size="1 MB"), task, few).prefers_speed
    assert Constraints.from_goal(Goal(max_size="1 MB"), task, few).excess(CostPrediction(1.0, 1.0, 2e6)) == 2
    constraints = Constraints(None, 0.0, None, None)
    assert constraints.shortfall(Quality(1, 1, 0.0, 0.0)) == 0
    assert constraints.shortfall(Quality(1, 1, 0.01, 0.02)) == math.inf


def test_models_that_write_are_held_to_divergence_and_to_the_speed_of_reading_and_of_writing(tmp_path):
    task = load_source(save(tmp_path / "llama", "llama"), task="text-generation").task
    goal = Goal(max_divergence=0.01, max_first_token="100 ms", min_tokens_per_second=20)
    constraints = Constraints.from_goal(goal, task, make_dataset(task.examples(4), task))
    assert not constraints.prefers_speed
    near, far = (Quality(0.99, 0.99, divergence=divergence) for divergence in (0.003, 0.012))
    assert constraints.shortfall(near) < 1
    assert constraints.shortfall(far) == pytest.approx(2)
    assert "divergence 0.012 nats, asked for 0.006" in constraints.describe_infidelity(far)
    fast = CostPrediction(1.0, 1.0, 1e6, first_token=0.05, tokens_per_second=40)
    assert constraints.excess(fast) < 1
    assert not constraints.describe_excess(fast)
    slow = CostPrediction(1.0, 1.0, 1e6, first_token=0.19, tokens_per_second=5)
    assert constraints.excess(slow) == pytest.approx(20 / 5 / 0.95)
    assert constraints.describe_excess(slow, "predicted ") == (
        "predicted 190.00 ms to the first token, asked for 95.00 ms; predicted 5.0 tokens/s, asked for 21.1"
    )
    goal = Goal(max_divergence=0.01)
    assert Constraints.from_goal(goal, task, make_dataset(task.examples(4), task)).prefers_speed


# Layer specs and search space


def test_the_layers_of_a_transformer_are_told_apart(bert):
    found = read_layer_specs(bert)
    roles = [spec.role for spec in found if spec.block == 0]
    assert sorted(roles) == ["attention-output", "down", "other", "qkv", "qkv", "qkv", "up"]
    assert [(spec.role, spec.groups) for spec in found if spec.kind == "attention"] == 2 * [("other", 4)]
    assert {spec.block for spec in found} == {0, 1, None}
    up = next(spec for spec in found if spec.role == "up")
    assert (up.weight, up.shape[-1], up.width) == ((64, 32), 32, (32, 64))


def test_an_axis_that_a_model_or_the_registry_has_nothing_for_is_left_out(bert, monkeypatch):
    for axis in AXES:
        monkeypatch.setitem(registry.STAGES, axis.stage, "anything")
    names = {axis.name for axis in find_axes(read_layer_specs(bert))}
    assert names == {"layers", "heads", "ffn", "rank"}
    convolutional = {axis.name for axis in find_axes(read_layer_specs(of_module(models.ResidualNet())))}
    assert convolutional == {"channels", "rank"}
    assert find_axes(read_layer_specs(of_module(models.BiLstm(4)))) == ()
    monkeypatch.delitem(registry.STAGES, "prune.heads", raising=False)
    assert "heads" not in {axis.name for axis in find_axes(read_layer_specs(bert))}


@given(st.data())
def test_whatever_is_taken_leaves_layers_that_fit_together_and_weigh_less(data):
    before = data.draw(st.sampled_from([transformer(), convolutions()]))
    settings = {
        axis.name: data.draw(st.sampled_from(axis.values))
        for axis in AXES
        if axis.applies(before) and data.draw(st.booleans())
    }
    after = predict_specs(before, settings)
    assert sum(spec.parameters for spec in after) <= sum(spec.parameters for spec in before) * (1 + 1e-9)
    for spec in after:
        each = 16 if spec.kind == "attention" else spec.weight[1]
        assert spec.width[0] == each * spec.groups
    for a, b in pairwise(after):
        if a.kind == b.kind == "conv":
            assert a.width[1] == b.width[0]


def transformer():
    def linear(into, out, role, block):
        return LayerSpec("linear", (1, 16, into), (out, into), role=role, block=block)

    return tuple(
        spec
        for block in range(2)
        for spec in (
            *(linear(64, 64, "qkv", block),) * 3,
            LayerSpec("attention", (1, 16, 64), (), groups=4, block=block),
            linear(64, 64, "attention-output", block),
            linear(64, 256, "up", block),
            linear(256, 64, "down", block),
        )
    )


def convolutions():
    def conv(into, out, groups=1):
        return LayerSpec(
            "conv", (1, into, 8, 8), (out, into // groups, 3, 3), (1, 1), (1, 1), (1, 1), groups, role="channels"
        )

    return (conv(3, 64), conv(64, 64), conv(64, 64, 64), conv(64, 96))


def test_a_recipe_of_settings_keeps_what_the_recipe_says_of_the_stages_and_of_healing(tmp_path):
    recipe = Recipe.parse(
        {
            "source": "model",
            "heal": False,
            "stages": [{"prune.ffn": {"keep": 0.9, "round_to": 4}}, {"quantize.static": {"method": "mse"}}],
        }
    )
    made = apply_settings(recipe, {"ffn": 0.5, "heads": 0.75}, (60, 180))
    assert [step.name for step in made.stages] == [
        "prune.heads",
        "prune.ffn",
        "distill.heal",
        "distill.heal",
        "quantize.static",
    ]
    assert made.stages[1].config == {"keep": 0.5, "round_to": 4}
    assert [step.config["steps"] for step in made.stages[2:4]] == [60, 180]
    assert made.stages[4].config == {"method": "mse"}
    made.make_stages()
    bare = {"source": "model", "stages": ["quantize.static"]}
    assert can_heal(Recipe.parse(bare))
    assert not can_heal(Recipe.parse(bare | {"heal": False}))
    assert can_heal(Recipe.parse({"source": "model", "stages": [{"distill.heal": {"max_length": 32}}], "heal": False}))


# Study


def answer(settings):
    return (sum(1 - value for value in settings.values()), 1 / (1 + len(settings)))


def questions(count, seed=0, stop=None):
    """What a study asks; where it is stopped, a second one repeats what the first was told."""
    found = []
    for part in (stop, count) if stop else (count,):
        study = Study(AXES[:3], seed)
        found = []
        for _ in range(part):
            number, settings = study.ask()
            found.append(settings)
            study.tell(number, None if len(settings) == 3 else answer(settings))
    return found


def test_a_study_asks_for_what_lies_in_the_space_the_same_for_a_seed_and_goes_on_where_it_was():
    assert questions(20) == questions(20) == questions(20, stop=11)
    assert questions(20) != questions(20, seed=1)
    values = {axis.name: axis.values for axis in AXES[:3]}
    for settings in questions(20):
        assert all(value in values[name] for name, value in settings.items())


# Latency table


def test_the_table_is_measured_once_and_more_work_takes_longer(tmp_path):
    table = LatencyTable(EngineOption("onnxruntime", "float32"), Cache(tmp_path))
    small, large = (LayerSpec("linear", (1, 128, width), (width, width)) for width in (32, 512))
    seconds = [[table.seconds(spec, batch) for spec in (small, large)] for batch in (1, 8)]
    assert seconds[0][0] < seconds[0][1] < seconds[1][1]
    assert len(list(tmp_path.glob("layer-*"))) == 3  # the two, and a layer of nearly nothing
    again = LatencyTable(EngineOption("onnxruntime", "float32"), Cache(tmp_path))
    assert [[again.seconds(spec, batch) for spec in (small, large)] for batch in (1, 8)] == seconds


@pytest.mark.parametrize("engine", ["openvino", "onnxruntime"])
@pytest.mark.parametrize("precision", ["int8", "int8-weight", "float32"])
def test_every_kind_of_layer_runs_by_itself(tmp_path, monkeypatch, engine, precision):
    monkeypatch.setattr(layer_timing, "RUNS", 1)
    table = LatencyTable(EngineOption(engine, "float32"), Cache(tmp_path), precision)
    for spec in (transformer()[0], transformer()[3], convolutions()[1], convolutions()[2]):
        assert table.seconds(spec, 1) > 0


def test_load_on_the_machine_slows_the_reference_layer_too(tmp_path, monkeypatch):
    pace = {"seconds": 0.001}
    monkeypatch.setattr(layer_timing, "time_run", lambda session, inputs: pace["seconds"])
    timer = layer_timing.ReferenceTimer(EngineOption("onnxruntime", "float32"), Cache(tmp_path))
    with layer_timing.open_layer(layer_timing.REFERENCE_LAYER, timer.option, "float32") as (session, draw_inputs):
        inputs = draw_inputs(1)
        quiet = timer.measure(session, inputs)
        pace["seconds"] = 0.003
        assert timer.measure(session, inputs) == quiet == pytest.approx(0.001)


def test_the_attention_that_is_timed_is_attention_in_int8(tmp_path):
    spec = LayerSpec("attention", (1, 16, 64), (), groups=4, block=0).keep_heads(0.5)
    assert (spec.groups, spec.shape, spec.parameters) == (2, (1, 16, 32), 0)
    graph = write_graph(spec, tmp_path)
    model = onnx.load(graph.path)
    model.graph.output.append(onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, None))
    rng = np.random.default_rng(0)
    given = {name: rng.normal(size=(3, 16, 32)).astype(np.float32) for name in "qkv"}
    onnx.save(model, tmp_path / "seen.onnx")
    with make_runtime("onnxruntime").open(tmp_path / "seen.onnx") as session:
        found = session.run(given)["x"]
    parts = [torch.tensor(given[name]).unflatten(-1, (2, 16)).transpose(1, 2) for name in "qkv"]
    wanted = torch.nn.functional.scaled_dot_product_attention(*parts, scale=1.0).transpose(1, 2).flatten(2)
    np.testing.assert_allclose(found, wanted.numpy(), atol=1e-5)

    plan = Plan({layer.node: "int8" for layer in graph.layers}, dict.fromkeys(("x", *ATTENTION_INPUTS), Range(-1, 1)))
    EngineOption("openvino", "float32").build(graph, plan, tmp_path / "model.onnx")
    makers = {out: node.op_type for node in onnx.load(tmp_path / "model.onnx").graph.node for out in node.output}
    products = [node for node in onnx.load(tmp_path / "model.onnx").graph.node if node.op_type == "MatMul"]
    assert len(products) == 3
    assert {makers[tensor] for node in products for tensor in node.input} == {"DequantizeLinear"}


def test_an_engine_that_is_not_known_is_refused():
    with pytest.raises(UsageError, match="Did you mean 'ray'"), open_executor("rey", 1, None, lambda: None):
        pass


@dataclass
class Context:
    """What the key of an artifact takes from the context of a search."""

    key: str = "source and samples"


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"goal": {"fidelity": 0.9}},
        {"runtimes": ["onnxruntime"]},
        {"engine_only": "onnxruntime"},
        {"stages": [{"quantize.static": {"smoothquant": False}}]},
    ],
)
def test_an_artifact_in_the_cache_is_not_taken_for_that_of_another_recipe(changes):
    keys = [make_build_key(Context(), Recipe.default("m", **given)) for given in ({}, {}, changes)]
    assert keys[0] == keys[1] != keys[2]
    alike = ({"runtimes": ["openvino"]}, {"engine_only": "openvino"})
    one, only = (make_build_key(Context(), Recipe.default("m", **given)) for given in alike)
    assert one != only, "one engine is raced in each of its arithmetics, the only engine is not"
