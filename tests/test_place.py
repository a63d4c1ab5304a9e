"""A plan written into a graph: for each engine, architecture and precision the answers stay, and INT8 is what runs."""

from dataclasses import replace
from itertools import product

import numpy as np
import onnx
import pytest
from captured import inputs, mark_swept
from onnx import numpy_helper

from export.candidates.audit import audit
from export.placements.place import has_attention, place
from laconic import registry
from laconic.errors import CaptureError, UnsupportedPrecision
from laconic.metrics import cosine
from laconic.quantization.plan import Plan, Range, Smoothing
from laconic.quantization.plan_file import pack_plan, unpack_flags, unpack_ranges, unpack_smoothing
from laconic.quantization.qparams import quantize_weight
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.runtimes.runtime import Kernel, make_runtime

ENGINES = ("onnxruntime", "openvino")
MODELS = ("residual", "mobilenet", "bert", "distilbert", "embedder", "vit", "lstm", "tied")


def plan_of(graph, ranges, precision):
    lowest = {layer.node: "int8-weight" if layer.kind == "Gather" else precision for layer in graph.layers}
    if precision in ("int8-dynamic", "int4-weight"):
        lowest |= {layer.node: "int8-weight" for layer in graph.layers if layer.kind == "Conv"}
    return Plan(lowest, ranges)


@pytest.mark.sweep("*-bert", "*-vit", "*-mobilenet", "*-tied")
@pytest.mark.parametrize("name", mark_swept(*MODELS))
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("precision", ["int4-weight", "int8", "int8-dynamic", "int8-weight", "float16-weight"])
def test_a_placed_plan_answers_nearly_as_the_graph(zoo, tmp_path, name, engine, precision):
    checkpoint, graph, ranges = zoo(name)
    path = tmp_path / "model.onnx"
    place(graph, plan_of(graph, ranges, precision), registry.resolve("placement", engine)["float32"], path)
    onnx.checker.check_model(path)
    batch = inputs(checkpoint, 3, 9, seed=99)
    with OnnxRuntime().open(graph.path) as float_session, make_runtime(engine).open(path) as session:
        expected, found = float_session.run(batch), session.run(batch)
    for output, array in expected.items():
        assert cosine(array, found[output]).min() > (0.9999 if precision == "float16-weight" else 0.97), output


@pytest.mark.parametrize(("name", "engine"), list(product(("residual", "mobilenet", "bert", "vit"), ENGINES)))
def test_what_was_asked_to_run_in_int8_does(zoo, tmp_path, name, engine):
    checkpoint, graph, ranges = zoo(name)
    plan = plan_of(graph, ranges, "int8")
    path = tmp_path / "model.onnx"
    place(graph, plan, registry.resolve("placement", engine)["float32"], path)
    with make_runtime(engine).open(path) as session:
        session.run(inputs(checkpoint, 2, 8))
        shares = audit(graph, plan, session.kernels(), engine)
    assert shares.get("int8", 0) > 0.99, shares


@pytest.mark.parametrize("name", ["residual", "mobilenet", "bert"])
def test_layers_with_weights_in_8_bits_alone_have_the_kernels_of_the_float_graph_in_onnxruntime(zoo, tmp_path, name):
    _, graph, ranges = zoo(name)
    kinds = []
    for precision in ("float32", "int8-weight"):
        path = tmp_path / f"{precision}.onnx"
        rules = registry.resolve("placement", "onnxruntime")["float32"]
        place(graph, plan_of(graph, ranges, precision), rules, path)
        with OnnxRuntime().open(path) as session:
            kinds.append(sorted(kernel.kind for kernel in session.kernels() if kernel.kind != "Gather"))
    assert kinds[0] == kinds[1]


@pytest.mark.parametrize(("name", "found"), [("residual", False), ("bert", True), ("vit", True)])
def test_attention_is_in_int8_where_the_plan_lets_it_and_the_engine_gains(zoo, tmp_path, name, found):
    _, graph, ranges = zoo(name)
    assert has_attention(graph) == found
    plan, path = plan_of(graph, ranges, "int8"), tmp_path / "model.onnx"

    def write(engine, *, attention):
        place(graph, replace(plan, attention=attention), registry.resolve("placement", engine)["float32"], path)
        return path.read_bytes()

    assert (write("openvino", attention=True) != write("openvino", attention=False)) == found
    assert write("onnxruntime", attention=True) == write("onnxruntime", attention=False)


@pytest.mark.parametrize(
    "flags",
    [
        {"attention": True, "int8_kv_cache": False, "int4_value_cache": False},
        {"attention": False, "int8_kv_cache": True, "int4_value_cache": True},
    ],
)
def test_what_calibration_found_is_packed_and_unpacked(flags):
    smoothing = {"x": Smoothing(np.ones(4, np.float32), Range(-1.0, 2.0))}
    arrays = pack_plan(Plan({"layer": "int8"}, {"y": Range(0.0, 0.5)}, smoothing, **flags))
    assert unpack_ranges(arrays) == {"y": Range(0.0, 0.5)}
    assert unpack_smoothing(arrays)["x"].limits == Range(-1.0, 2.0)
    assert unpack_flags(arrays) == flags


def test_a_layer_that_does_not_run_in_int8_or_has_no_range_is_named(zoo, tmp_path):
    _, graph, ranges = zoo("bert")
    plan = plan_of(graph, ranges, "int8")
    layer = next(layer for layer in graph.layers if layer.kind == "MatMul")
    with pytest.raises(UnsupportedPrecision, match=layer.module.replace(".", r"\.")):
        audit(graph, plan, [Kernel(layer.node, "gemm_f32", "float32")], "engine")
    _, graph, _ = zoo("bert")
    with pytest.raises(CaptureError, match="has no range"):
        place(
            graph,
            plan_of(graph, {}, "int8"),
            registry.resolve("placement", "openvino")["float32"],
            tmp_path / "model.onnx",
        )


def test_weights_are_stored_in_eight_bits_only(zoo, tmp_path):
    _, graph, ranges = zoo("embedder")
    path = tmp_path / "model.onnx"
    place(graph, plan_of(graph, ranges, "int8"), registry.resolve("placement", "openvino")["float32"], path)
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in onnx.load(path).graph.initializer}
    floats = [
        name for name, array in stored.items() if array.dtype == np.float32 and array.ndim == 2 and array.shape[1] > 1
    ]
    assert not floats
    assert {layer.weight for layer in graph.layers}.isdisjoint(stored)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_order_in_which_a_plan_names_its_tensors_changes_no_byte(zoo, tmp_path, engine):
    """Tensors of a plan that comes from the cache are in another order than those of one that was just calibrated."""
    _, graph, ranges = zoo("bert")
    plan = plan_of(graph, ranges, "int8")
    widths = {layer.input: layer.shape[0] for layer in graph.layers if layer.kind == "MatMul"}
    smoothing = {name: Smoothing(np.full(width, 2.0, np.float32), ranges[name]) for name, width in widths.items()}
    for number, order in enumerate((list, reversed)):
        changed = replace(
            plan,
            precision=dict(order(plan.precision.items())),
            ranges=dict(order(plan.ranges.items())),
            smoothing=dict(order(smoothing.items())),
        )
        place(graph, changed, registry.resolve("placement", engine)["float32"], tmp_path / f"{number}.onnx")
    assert (tmp_path / "0.onnx").read_bytes() == (tmp_path / "1.onnx").read_bytes()


@pytest.mark.parametrize(("shape", "axis"), [((5, 7), 1), ((8, 3, 3, 3), 0), ((6, 4), 0)])
def test_quantized_weights_are_within_half_a_step(shape, axis):
    weight = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    integers, scale = quantize_weight(weight, axis)
    steps = scale.reshape([-1 if each == axis else 1 for each in range(len(shape))])
    assert integers.dtype == np.int8
    assert np.abs(integers).max() <= 127
    assert (np.abs(integers * steps - weight) <= steps * 0.5001).all()


def test_a_weight_of_zeros_stays_zero():
    integers, scale = quantize_weight(np.zeros((3, 2), np.float32), 1)
    assert not integers.any()
    assert np.isfinite(scale).all()
