"""Trials that run the graph from a layer on give what runs of the whole graph give."""

from dataclasses import replace

import numpy as np
import pytest

from export.candidates import layer_trials
from export.candidates.engine_option import SENSITIVITY_OPTION, EngineOption
from export.candidates.layer_trials import LayerTrials
from export.candidates.plan_evaluator import PlanEvaluator
from laconic.cache import Cache
from laconic.data.reader import make_dataset
from laconic.quantization.plan import Plan
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.predict import predict

MODELS = ("residual", "mobilenet", "embedder", "vit", "gpt2", "lstm", "tied")


class Runs(PlanEvaluator):
    """Counts the trials that run a part of the graph."""

    parts = 0

    def plan_divergence(self, plan, option, dataset, run=None):
        def counted():
            type(self).parts += 1
            return run()

        return super().plan_divergence(plan, option, dataset, run and counted)


def open_trials(zoo, name, folder, cache="parts", evaluator=PlanEvaluator):
    """The trials of a model of the zoo on six samples, and a function that makes the plan with some layers in INT8."""
    checkpoint, graph, ranges = zoo(name)
    dataset = make_dataset(checkpoint.task.examples(6, seed=7), checkpoint.task, name="probe")
    with OnnxRuntime().open(graph.path) as session:
        reference = predict(session, checkpoint.task, dataset)
    folder = folder / cache
    folder.mkdir(exist_ok=True)
    made = evaluator(graph, checkpoint.task, Cache(folder), folder, {dataset.fingerprint: reference})

    def plan_of(*layers):
        floats = {layer.node: "float32" for layer in graph.layers}
        lowest = {layer.node: "int8-weight" if layer.kind == "Gather" else "int8" for layer in layers}
        return Plan(floats | lowest, ranges)

    return LayerTrials(made, SENSITIVITY_OPTION, dataset), plan_of


@pytest.mark.parametrize("section", [2, layer_trials.SECTION])
@pytest.mark.parametrize("name", MODELS)
def test_a_layer_alone_costs_what_it_costs_in_a_run_of_the_whole_graph(zoo, tmp_path, monkeypatch, name, section):
    monkeypatch.setattr(layer_trials, "SECTION", section)

    class Counted(Runs):
        pass

    trials, plan_of = open_trials(zoo, name, tmp_path, evaluator=Counted)
    whole, _ = open_trials(zoo, name, tmp_path, "whole")
    layers = trials.evaluator.graph.layers[::2]
    for layer in layers:
        plan = plan_of(layer)
        expected = whole.evaluator.plan_divergence(plan, whole.option, whole.dataset)
        np.testing.assert_allclose(trials(plan), expected, atol=2e-5, err_msg=layer.module)
    assert Counted.parts == len(layers)


def test_layers_may_be_asked_for_in_any_order(zoo, tmp_path):
    trials, plan_of = open_trials(zoo, "embedder", tmp_path)
    again, _ = open_trials(zoo, "embedder", tmp_path, "again")
    layers = trials.evaluator.graph.layers
    found = [trials(plan_of(layer)) for layer in layers]
    backwards = [again(plan_of(layer)) for layer in reversed(layers)]
    np.testing.assert_allclose(found, backwards[::-1], atol=2e-5)


def test_a_section_after_the_layer_is_loaded_once_and_closed_when_no_layer_needs_it(zoo, tmp_path, monkeypatch):
    monkeypatch.setattr(layer_trials, "SECTION", 3)
    trials, plan_of = open_trials(zoo, "vit", tmp_path)
    layers = trials.evaluator.graph.layers
    opened, open_section = [], LayerTrials._open_section

    def count(self, reached, *, stop):
        section = open_section(self, reached, stop=stop)
        opened.append((reached.place, id(section)))
        return section

    monkeypatch.setattr(LayerTrials, "_open_section", count)
    for layer in layers:
        trials(plan_of(layer))
    places = {place for place, _ in opened}
    assert len(set(opened)) == len(places) == (len(layers) - 1) // 3
    assert len(opened) > 2 * len(places)
    assert len(trials._sections) <= 1


def test_what_was_measured_before_an_interruption_is_not_run_again(zoo, tmp_path, monkeypatch):
    trials, plan_of = open_trials(zoo, "bert", tmp_path)
    first, second, *_ = trials.evaluator.graph.layers
    found = trials(plan_of(first))
    resumed, _ = open_trials(zoo, "bert", tmp_path)
    monkeypatch.setattr(LayerTrials, "_run_from", lambda *given: pytest.fail("was run again"))
    np.testing.assert_array_equal(resumed(plan_of(first)), found)
    with pytest.raises(pytest.fail.Exception, match="again"):
        resumed(plan_of(second))


def test_plans_of_several_layers_engines_of_a_gpu_and_encoder_decoders_run_the_whole_graph(zoo, tmp_path, monkeypatch):
    monkeypatch.setattr(LayerTrials, "_run_from", lambda *given: pytest.fail("a part was run"))
    trials, plan_of = open_trials(zoo, "bert", tmp_path)
    _, table, *_, last = trials.evaluator.graph.layers
    assert trials(plan_of(table, last)).mean() < 0.01
    absent = replace(trials, option=EngineOption("tensorrt", "float16", reference=True))
    assert absent(plan_of(last)).mean() < 0.01
    monkeypatch.setattr("export.candidates.layer_trials.has_decoder", lambda graph: True)
    alone, plan_of = open_trials(zoo, "embedder", tmp_path, "decoder")
    assert alone(plan_of(last_of(alone))).mean() < 0.01


def last_of(trials):
    """The last layer of the graph."""
    return trials.evaluator.graph.layers[-1]
