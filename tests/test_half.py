"""Graphs for GPUs: half precision written into the graph, what overflows kept in FP32, and reference execution."""

from collections import Counter
from itertools import product

import numpy as np
import onnx
import pytest
import torch
from captured import inputs
from onnx import TensorProto, helper, numpy_helper, shape_inference
from test_place import MODELS, plan_of
from torch import nn

from export.candidates.engine_option import EngineOption
from export.candidates.magnitudes import find_overflow
from export.candidates.reference import open_reference
from export.capture.capture import capture
from export.lint.tensorrt_lint import count_quantized, lint_tensorrt
from export.passes.half import convert_to_half, to_half
from laconic.errors import UnsupportedPrecision
from laconic.metrics import cosine
from laconic.models.source_loading import load_source
from laconic.quantization.plan import Plan
from laconic.runtimes.engine_spec import AXIS_PROPERTY, describe_model, read_axis_bounds
from laconic.runtimes.onnx_file import GraphInput, read_inputs, read_properties
from laconic.runtimes.onnxruntime import OnnxRuntime
from laconic.tensor import TensorSpec

ENGINES = ("tensorrt", "onnxruntime-cuda")
PRECISIONS = ("float32", "int8", "float8", "int4-weight")


@pytest.mark.parametrize(
    ("name", "engine", "compute"), list(product(MODELS, ENGINES, ("float16", "bfloat16"))), ids="-".join
)
def test_a_graph_for_a_gpu_answers_nearly_as_the_float_graph(zoo, tmp_path, name, engine, compute):
    checkpoint, graph, ranges = zoo(name)
    batch = inputs(checkpoint, 3, 9, seed=99)
    with OnnxRuntime().open(graph.path) as session:
        expected = session.run(batch)
    for precision in PRECISIONS:
        path = tmp_path / f"{precision}.onnx"
        EngineOption(engine, compute, reference=True).build(graph, plan_of(graph, ranges, precision), path)
        onnx.checker.check_model(path)
        with open_reference(path) as session:
            found = session.run(batch)
        least = {"float32": 0.9995, "int8": 0.97, "float8": 0.97, "int4-weight": 0.97}[precision]
        for output, array in expected.items():
            assert found[output].dtype == np.float32
            assert cosine(array, found[output]).min() > least, (precision, output)


@pytest.mark.parametrize("name", ["residual", "bert", "vit"])
def test_a_strongly_typed_graph_has_one_float_type_at_every_node(zoo, tmp_path, name):
    _, graph, ranges = zoo(name)
    path = tmp_path / "model.onnx"
    EngineOption("tensorrt", "float16", reference=True).build(graph, plan_of(graph, ranges, "int8"), path)
    model = shape_inference.infer_shapes(onnx.load(path), strict_mode=True).graph
    types = {value.name: value.type.tensor_type.elem_type for value in (*model.value_info, *model.input, *model.output)}
    types |= {tensor.name: tensor.data_type for tensor in model.initializer}
    for node in model.node:
        if node.op_type != "Cast":
            floats = {types[each] for each in node.input if types.get(each) in (TensorProto.FLOAT, TensorProto.FLOAT16)}
            assert len(floats) <= 1, (node.name, node.op_type)
    assert Counter(types.values())[TensorProto.FLOAT16] > 10


@pytest.mark.parametrize("name", ["residual", "mobilenet", "bert", "vit"])
def test_tensorrt_quantizes_both_sides_of_every_layer_symmetrically(zoo, tmp_path, name):
    _, graph, ranges = zoo(name)
    path = tmp_path / "model.onnx"
    EngineOption("tensorrt", "float16", reference=True).build(graph, plan_of(graph, ranges, "int8"), path)
    model = onnx.load(path).graph
    producers = {name: node for node in model.node for name in node.output}
    constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.initializer}
    nodes = {node.name: node for node in model.node}
    for layer in graph.layers:
        if layer.kind == "Gather":
            continue
        for tensor in nodes[layer.node].input[:2]:
            producer = producers[tensor]
            assert producer.op_type == "DequantizeLinear", layer.node
            if len(producer.input) > 2:
                assert constants[producer.input[2]] == 0
                assert constants[producer.input[2]].dtype == np.int8
    assert [finding.message for finding in lint_tensorrt(path)] == []
    count = count_quantized(path)
    assert count.quantized == count.total
    additions = [node for node in model.node if node.op_type == "Add"]
    sides = [{producers[each].op_type for each in node.input if each in producers} for node in additions]
    assert name != "residual" or {"Conv", "DequantizeLinear"} in sides, "the shortcut alone is quantized"


def test_the_bounds_of_dynamic_axes_reach_the_engine(zoo, tmp_path):
    checkpoint, graph, _ = zoo("bert")
    bounds = {axis: limits for spec in checkpoint.inputs for axis, limits in spec.bounds.items()}
    assert bounds
    path = tmp_path / "model.onnx"
    plan = Plan({layer.node: "float32" for layer in graph.layers})
    EngineOption("tensorrt", "float16", reference=True).build(graph, plan, path)
    found = read_axis_bounds(read_properties(path), read_inputs(path))
    assert {axis: (each.least, each.most) for axis, each in found.items()} == bounds
    _, profile, _ = describe_model(path, {})
    assert all(most[1] == bounds["seq"][1] for _, _, most in profile.values())


@pytest.mark.parametrize("value", ["", "1", "0 5", "5 1", "a b", "1 99999999999", "1 2 3", "-1 4"])
def test_bounds_that_are_no_sizes_in_order_are_left_out(value):
    assert read_axis_bounds({f"{AXIS_PROPERTY}seq": value}, [GraphInput("ids", ("batch", "seq"))]) == {}


def test_where_int8_was_planned_onnxruntime_on_gpus_gets_fp16_and_openvino_refuses_fp8(zoo, tmp_path):
    _, graph, ranges = zoo("bert")
    option = EngineOption("onnxruntime-cuda", "float16", reference=True)
    plan = option.adapt(graph, plan_of(graph, ranges, "int8"))
    assert set(plan.precision.values()) == {"float16-weight"}
    path = tmp_path / "model.onnx"
    option.build(graph, plan, path)
    assert not {"QuantizeLinear", "DequantizeLinear"} & {node.op_type for node in onnx.load(path).graph.node}
    _, graph, ranges = zoo("bert")
    with pytest.raises(UnsupportedPrecision, match="--target tensorrt"):
        EngineOption("openvino", "float32").build(graph, plan_of(graph, ranges, "float8"), tmp_path / "model.onnx")


class Loud(nn.Module):
    """A network whose hidden activations exceed FP16, and whose outputs do not."""

    def __init__(self):
        super().__init__()
        self.first, self.loud, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        with torch.no_grad():
            self.first.weight.mul_(100)
            self.loud.weight.mul_(1e4)

    def forward(self, x):
        return self.last(nn.functional.layer_norm(self.loud(self.first(x).relu()), (16,)))


@pytest.fixture
def loud(tmp_path):
    torch.manual_seed(0)
    module = Loud()
    torch.save(module.state_dict(), tmp_path / "weights.pt")
    checkpoint = load_source(
        tmp_path / "weights.pt",
        task="tensors",
        builder=f"{__name__}:Loud",
        inputs=(TensorSpec(name="x", dtype="float32", shape=("batch", 8)),),
        trust=True,
    )
    return checkpoint, capture(checkpoint, tmp_path)


def test_activations_beyond_fp16_stay_finite_and_are_named(loud, tmp_path):
    _, graph = loud
    rng = np.random.default_rng(0)
    batches = [{"x": rng.standard_normal((1, 8)).astype(np.float32)} for _ in range(20)]
    overflow = find_overflow(graph, batches, tmp_path)
    assert any("loud" in name for name in overflow)
    assert not any("last" in name for name in overflow)
    plan = Plan({layer.node: "float32" for layer in graph.layers})
    with OnnxRuntime().open(graph.path) as session:
        expected = [session.run(batch)[graph.outputs[0].name] for batch in batches]
    found = {}
    for kept in (frozenset(), overflow):
        path = tmp_path / f"{len(kept)}.onnx"
        EngineOption("tensorrt", "float16", reference=True, overflow=kept).build(graph, plan, path)
        with open_reference(path) as session:
            found[bool(kept)] = [session.run(batch)[graph.outputs[0].name] for batch in batches]
    assert not all(np.isfinite(each).all() for each in found[False])
    for wanted, answer in zip(expected, found[True], strict=True):
        assert cosine(wanted, answer).min() > 0.9999


def test_nothing_of_a_quiet_network_overflows(zoo, tmp_path):
    checkpoint, graph, _ = zoo("bert")
    assert find_overflow(graph, [inputs(checkpoint, 1, 7)], tmp_path) == frozenset()


@pytest.mark.parametrize(("half", "largest"), [("float16", 65504.0), ("bfloat16", 3.3895313892515355e38)])
def test_rounding_to_half_saturates_and_keeps_small_scales_positive(half, largest):
    rounded = to_half(np.array([1e39, -1e39, 1e-44, 0.0, 1.0]), half).astype(np.float64)
    assert rounded.tolist() == [largest, -largest, 0.0, 0.0, 1.0]
    scales = to_half(np.array([1e-44, 1.0]), half).astype(np.float64)
    assert 0 < scales[0] < 1e-7


def test_a_graph_with_control_flow_is_refused():
    body = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "body", [], [helper.make_tensor_value_info("y", 1, [1])]
    )
    node = helper.make_node("If", ["c"], ["z"], "choice", then_branch=body, else_branch=body)
    values = [
        helper.make_tensor_value_info(*each) for each in (("c", TensorProto.BOOL, []), ("x", 1, [1]), ("z", 1, [1]))
    ]
    model = helper.make_model(helper.make_graph([node], "main", values[:2], values[2:]))
    with pytest.raises(UnsupportedPrecision, match="control flow"):
        convert_to_half(model, "float16")
