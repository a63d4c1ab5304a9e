"""The linter for TensorRT: a graph as it should be has no findings, and each way to spoil it is named by its rule."""

import json
import re
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from artifacts import write_artifact
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from export.lint.sparsity_rules import SparseCount
from export.lint.tensorrt_lint import RULES, count_quantized, count_sparse_layers, lint_tensorrt
from laconic.artifacts.manifest import MANIFEST, MODEL
from laconic.errors import SourceError
from laconic.hashing import digest_file, seal, unseal

DOCS = Path(__file__).parents[1] / "docs"


class Net:
    """A quantized graph in the making. Each method appends nodes and returns the name of their output."""

    def __init__(self, dtype=np.float32):
        self.dtype, self.nodes, self.weights, self.width = dtype, [], [], 0

    def constant(self, name, array):
        self.weights.append(numpy_helper.from_array(np.asarray(array, order="C"), name))
        return name

    def add(self, kind, inputs, name, **settings):
        self.nodes.append(helper.make_node(kind, inputs, [name], name, **settings))
        return name

    def quantize(self, x):
        scale = self.constant(f"{x}/scale", self.dtype(0.05))
        zero = self.constant(f"{x}/zero", np.int8(0))
        self.add("QuantizeLinear", [x, scale, zero], f"{x}/Q")
        return self.add("DequantizeLinear", [f"{x}/Q", scale, zero], f"{x}/DQ")

    def weight(self, name, shape, axis):
        rng = np.random.default_rng(len(self.weights))
        scale = self.constant(f"{name}/scale", rng.uniform(0.01, 0.1, shape[axis]).astype(self.dtype))
        integers = self.constant(f"{name}/int8", rng.integers(-127, 128, shape, np.int8))
        return self.add("DequantizeLinear", [integers, scale], f"{name}/DQ", axis=axis)

    def linear(self, x, name, width, out):
        product = self.add("MatMul", [self.quantize(x), self.weight(f"{name}/weight", (width, out), 1)], name)
        return self.add("Add", [product, self.constant(f"{name}/bias", np.ones(out, self.dtype))], f"{name}/Add")

    def conv(self, x, name, channels):
        bias = self.constant(f"{name}/bias", np.ones(channels, self.dtype))
        weight = self.weight(f"{name}/weight", (channels, channels, 3, 3), 0)
        return self.add("Conv", [x, weight, bias], name, pads=[1, 1, 1, 1])

    def build(self, shape, output, opset=21):
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        x = helper.make_tensor_value_info("x", kind, shape)
        y = helper.make_tensor_value_info(output, kind, [None] * len(shape))
        graph = helper.make_graph(self.nodes, "graph", [x], [y], self.weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)


def make_mlp(widths=(8, 16, 4), dtype=np.float32):
    """Linear layers with ReLU in between."""
    net, x = Net(dtype), "x"
    for number, (width, out) in enumerate(pairwise(widths)):
        x = net.add("Relu", [net.linear(x, f"fc{number}", width, out)], f"relu{number}")
    return net.build(["batch", widths[0]], x)


def make_cnn(blocks=1, both=True):
    """Residual blocks of two convolutions. both: Q/DQ on both sides of the addition, else on the shortcut alone."""
    net, x = Net(), "x"
    for number in range(blocks):
        name = f"block{number}"
        quantized = net.quantize(x)
        inner = net.add("Relu", [net.conv(quantized, f"{name}/conv1", 4)], f"{name}/relu1")
        outer = net.conv(net.quantize(inner), f"{name}/conv2", 4)
        joined = net.add("Add", [net.quantize(outer) if both else outer, quantized], f"{name}/Add")
        x = net.add("Relu", [joined], f"{name}/relu2")
    return net.build(["batch", 4, "height", "width"], x)


def node(model, name):
    return next(each for each in model.graph.node if each.name == name)


def index(model, name):
    return next(number for number, each in enumerate(model.graph.node) if each.name == name)


def tensor(model, name):
    return next(each for each in model.graph.initializer if each.name == name)


def put(model, name, array):
    """Replace the values of an initializer."""
    tensor(model, name).CopyFrom(numpy_helper.from_array(np.asarray(array), name))


def append(model, *nodes):
    model.graph.node.extend(nodes)


def set_opset(model, version):
    model.opset_import[0].version = version


def set_int4(model, block, axis=0, rows=256):
    """Replace the weight of the first layer by INT4 in blocks, and take the Q/DQ pair off its input."""
    shape = [rows, 16]
    scales = [-(-size // block) if number == axis else size for number, size in enumerate(shape)]
    data = np.zeros(rows * 16 // 2, np.uint8).tobytes()
    tensor(model, "fc0/weight/int8").CopyFrom(
        helper.make_tensor("fc0/weight/int8", TensorProto.INT4, shape, data, raw=True)
    )
    put(model, "fc0/weight/scale", np.full(scales, 0.1, np.float32))
    dequantizer = node(model, "fc0/weight/DQ")
    del dequantizer.attribute[:]
    dequantizer.attribute.extend([helper.make_attribute("axis", axis), helper.make_attribute("block_size", block)])
    node(model, "fc0").input[0] = "x"
    for name in ("x/DQ", "x/Q"):
        del model.graph.node[index(model, name)]
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_value = rows


def quantize_bias(model):
    """Put the bias of the first layer behind DequantizeLinear."""
    scale = numpy_helper.from_array(np.float32(0.1), "bias/scale")
    model.graph.initializer.extend([numpy_helper.from_array(np.ones(16, np.int32), "bias/int32"), scale])
    made = helper.make_node("DequantizeLinear", ["bias/int32", "bias/scale"], ["bias/DQ"], "bias/DQ")
    place = index(model, "fc0/Add")
    model.graph.node.insert(place, made)
    model.graph.node[place + 1].input[1] = "bias/DQ"


def quantize_float_weight(model):
    """Store the weight of the first layer in float, and quantize it in the graph."""
    put(model, "fc0/weight/int8", np.ones((8, 16), np.float32))
    place = index(model, "fc0/weight/DQ")
    zero = numpy_helper.from_array(np.zeros(16, np.int8), "fc0/weight/zero")
    model.graph.initializer.append(zero)
    scale = "fc0/weight/scale"
    made = helper.make_node("QuantizeLinear", ["fc0/weight/int8", scale, zero.name], ["wq"], "fc0/weight/Q", axis=1)
    model.graph.node.insert(place, made)
    model.graph.node[place + 1].input[0] = "wq"


def compute_scale(model):
    """Compute the scale of the input from the input."""
    model.graph.node.insert(0, helper.make_node("ReduceMax", ["x"], ["scale/dynamic"], "max", keepdims=0))
    for name in ("x/Q", "x/DQ"):
        node(model, name).input[1] = "scale/dynamic"


def split_scale(model):
    """Give the two nodes of the first pair different scales."""
    model.graph.initializer.append(numpy_helper.from_array(np.float32(0.2), "other"))
    node(model, "x/DQ").input[1] = "other"


def move_axis(model):
    put(model, "fc0/weight/scale", np.full(8, 0.1, np.float32))
    node(model, "fc0/weight/DQ").attribute[0].i = 0


def scale_channels(model):
    """Quantize the input with one scale per channel."""
    put(model, "x/scale", np.full(8, 0.1, np.float32))
    put(model, "x/zero", np.zeros(8, np.int8))


def drop_name(model):
    model.graph.input[0].type.tensor_type.shape.dim[0].ClearField("dim_param")


def widen_bias(model):
    """Make a weight FP64, with a cast before it is read."""
    put(model, "fc0/bias", np.ones(16))
    model.graph.node.insert(0, helper.make_node("Cast", ["fc0/bias"], ["narrow"], "narrow", to=TensorProto.FLOAT))
    node(model, "fc0/Add").input[1] = "narrow"


def lose_data(model):
    """Let the data of a bias lie in a file that is not there."""
    bias = tensor(model, "fc0/bias")
    bias.ClearField("raw_data")
    bias.data_location = TensorProto.EXTERNAL
    bias.external_data.add(key="location", value="model.onnx.data")


def overflow(model):
    """Cast an FP16 weight that overflowed to the type of the graph."""
    model.graph.initializer.append(numpy_helper.from_array(np.full(16, np.inf, np.float16), "half"))
    model.graph.node.insert(0, helper.make_node("Cast", ["half"], ["wide"], "wide", to=TensorProto.FLOAT))
    node(model, "fc0/Add").input[1] = "wide"


def write_mask(model):
    """Use an FP16 infinity of one number."""
    overflow(model)
    put(model, "half", np.array([-np.inf], np.float16))


def keep_weights(shape, axis, count):
    """INT8 weights, of which `count` of every four along an axis are not zero."""
    weight = np.moveaxis(np.full(shape, 3, np.int8), axis, -1)
    weight[..., np.arange(weight.shape[-1]) % 4 >= count] = 0
    return np.moveaxis(weight, -1, axis)


SPOILED = {
    "opset": lambda model: set_opset(model, 26),
    "quantization-opset": lambda model: set_opset(model, 12),
    "foreign-domain": lambda model: append(
        model, helper.make_node("FusedGelu", ["x"], ["g"], "g", domain="com.microsoft")
    ),
    "unknown-operator": lambda model: append(model, helper.make_node("Unique", ["x"], ["u"], "u")),
    "dynamic-quantization": lambda model: append(
        model, helper.make_node("DynamicQuantizeLinear", ["x"], ["d1", "d2", "d3"], "d")
    ),
    "operator-limit": lambda model: append(
        model, helper.make_node("TopK", ["x", "fc0/bias"], ["t1", "t2"], "t", sorted=0)
    ),
    "data-dependent": lambda model: append(model, helper.make_node("NonZero", ["x"], ["n"], "n")),
    "mixed-types": lambda model: put(model, "fc0/bias", np.ones(16, np.float16)),
    "fp16-overflow": overflow,
    "float64": widen_bias,
    "unnamed-axis": drop_name,
    "quantized-type": lambda model: put(model, "x/zero", np.uint8(0)),
    "zero-point": lambda model: put(model, "x/zero", np.int8(3)),
    "dynamic-scale": compute_scale,
    "bad-scale": lambda model: put(model, "x/scale", np.float32(0)),
    "scale-mismatch": split_scale,
    "activation-channels": scale_channels,
    "weight-quantizer": quantize_float_weight,
    "weight-axis": move_axis,
    "int4-block": lambda model: set_int4(model, 32),
    "half-quantized": lambda model: node(model, "fc0").input.__setitem__(0, "x"),
    "quantized-bias": quantize_bias,
    "external-data": lose_data,
    "sparsity": lambda model: put(model, "fc0/weight/int8", keep_weights((8, 16), 0, 2)),
}
"""A change to the two-layer network for each rule on such a graph."""
WARNINGS = {  # the rules without an error
    "operator-limit",
    "data-dependent",
    "float64",
    "unnamed-axis",
    "scale-mismatch",
    "weight-quantizer",
    "residual-add",
    "sparsity",
}


@pytest.fixture
def lint(tmp_path):
    def run(model):
        path = tmp_path / "model.onnx"
        onnx.save(model, path)
        return lint_tensorrt(path)

    return run


@pytest.mark.parametrize(
    "model",
    [make_mlp(), make_mlp(dtype=np.float16), make_cnn(2), make_cnn(2, both=False)],
    ids=["mlp", "mlp in fp16", "both sides of the addition", "the shortcut alone"],
)
def test_a_graph_as_tensorrt_wants_it_has_no_findings(model, lint):
    onnx.checker.check_model(model, full_check=True)
    assert lint(model) == []


@pytest.mark.parametrize("rule", SPOILED)
def test_each_way_to_spoil_a_graph_is_named_by_its_rule_alone(rule, lint):
    model = make_mlp()
    SPOILED[rule](model)
    findings = lint(model)
    assert {finding.rule for finding in findings} == {rule}
    assert {finding.severity for finding in findings} == {"warning" if rule in WARNINGS else "error"}
    for finding in findings:
        assert re.search(r"\. [A-Z].+[^.]$", finding.message), "a message ends with what to do"


def test_every_rule_has_a_graph_that_it_names_and_is_on_its_page():
    assert set(SPOILED) | {"residual-add"} == set(RULES)
    rows = re.findall(
        r"^\| `([a-z0-9-]+)` \| (error|warning|error or warning) \|", (DOCS / "tensorrt.md").read_text(), re.M
    )
    assert [name for name, _ in rows] == list(RULES)
    assert {name for name, severity in rows if severity == "warning"} == WARNINGS


def make_linear(weight, dtype=np.float16, quantized=False, transposed=False):
    """One linear layer with this weight [in, out]."""
    net = Net(dtype)
    name = net.constant("fc/weight", weight.T.astype(dtype) if transposed else weight.astype(dtype))
    if quantized:
        name = net.add("DequantizeLinear", [net.constant("fc/int8", weight), net.constant("s", dtype(0.1))], "fc/DQ")
    if transposed:
        name = net.add("Transpose", [name], "fc/T")
    net.add("MatMul", [net.quantize("x") if quantized else "x", name], "fc")
    return net.build(["batch", weight.shape[0]], "fc")


@pytest.mark.parametrize("form", [{}, {"quantized": True, "dtype": np.float32}, {"transposed": True}])
def test_two_weights_of_four_along_the_inputs_of_a_wide_layer_are_counted_and_have_no_finding(form, lint, tmp_path):
    assert lint(make_linear(keep_weights((256, 512), 0, 2), **form)) == []
    assert count_sparse_layers(tmp_path / "model.onnx") == SparseCount(1, 1)


@pytest.mark.parametrize(
    ("weight", "form", "words"),
    [
        (keep_weights((256, 512), 1, 2), {}, "groups of four inputs have more than two"),
        (keep_weights((256, 512), 0, 2) + np.eye(256, 512, dtype=np.int8), {}, "groups of four inputs have more"),
        (keep_weights((128, 512), 0, 2), {}, "below 256 channels, and the layer has 128 inputs and 512 outputs"),
        (keep_weights((256, 512), 0, 2), {"dtype": np.float32}, "computes in FP32"),
        (keep_weights((256, 512), 0, 2)[:254], {}, "254 inputs are no multiple of four"),
    ],
    ids=["along the outputs", "a few more", "narrow", "fp32", "odd"],
)
def test_zeros_that_save_no_time_are_named(weight, form, words, lint):
    (finding,) = lint(make_linear(weight, **form))
    assert (finding.rule, finding.severity, finding.node) == ("sparsity", "warning", "fc")
    assert words in finding.message


def test_a_sparse_convolution_is_seen_along_its_input_channels_and_dense_weights_are_not_counted(lint, tmp_path):
    net = Net(np.float16)
    weight = net.constant("conv/weight", keep_weights((256, 256, 1, 1), 1, 2).astype(np.float16))
    net.add("Conv", ["x", weight], "conv")
    assert lint(net.build(["batch", 256, 4, 4], "conv")) == []
    assert count_sparse_layers(tmp_path / "model.onnx") == SparseCount(1, 1)
    assert lint(make_linear(keep_weights((256, 512), 0, 4))) == []
    assert count_sparse_layers(tmp_path / "model.onnx") == SparseCount(0, 1)


@pytest.mark.parametrize("both", [True, False])
def test_an_addition_whose_shortcut_is_not_quantized_is_named(both, lint):
    model = make_cnn(both=both)
    node(model, "block0/Add").input[1] = "x"
    assert {(finding.rule, finding.node) for finding in lint(model)} == {("residual-add", "block0/Add")}


def test_an_addition_needs_one_quantized_side_unless_it_is_in_float(lint):
    net = Net()
    quantized = net.quantize("x")
    net.add("Add", [net.conv(quantized, "one", 4), net.conv(quantized, "two", 4)], "sum")
    assert [finding.rule for finding in lint(net.build(["batch", 4, 8, 8], "sum"))] == ["residual-add"]
    net = Net()
    net.add("Add", ["x", "x"], "twice")
    assert lint(net.build(["batch", 4], "twice")) == []


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda model: set_int4(model, 128, axis=0, rows=200), "a multiple of the block size 128"),
        (lambda model: set_int4(model, 32), "blocks of 64 or 128"),
    ],
)
def test_int4_weights_that_tensorrt_does_not_take_are_explained(spoil, words, lint):
    model = make_mlp()
    spoil(model)
    assert [words in finding.message for finding in lint(model)] == [True]


@pytest.mark.parametrize("block", [64, 128])
def test_int4_weights_stand_alone(block, lint):
    model = make_mlp()
    set_int4(model, block)
    assert lint(model) == []


def test_a_product_is_quantized_on_both_sides_or_on_none(lint):
    model = make_mlp()
    node(model, "fc1").input[0] = "relu0"
    (finding,) = lint(model)
    assert (finding.rule, finding.node) == ("half-quantized", "fc1")
    assert "the weight is quantized and the input is not" in finding.message
    model = make_mlp()
    model.graph.initializer.append(numpy_helper.from_array(np.ones((16, 4), np.float32), "float"))
    node(model, "fc1").input[1] = "float"
    (finding,) = lint(model)
    assert "the input is quantized and the weight is not" in finding.message
    net = Net()
    net.add("MatMul", [net.quantize("x"), net.add("Relu", ["x"], "y")], "product")
    assert [finding.rule for finding in lint(net.build(["batch", 4, 4], "product"))] == ["half-quantized"]


def test_a_weight_behind_a_transposition_keeps_its_channels(lint):
    for axis, rules in ((0, set()), (1, {"weight-axis"})):
        net = Net()
        weight = net.add("Transpose", [net.weight("w", (16, 8), axis)], "wt", perm=[1, 0])
        net.add("MatMul", [net.quantize("x"), weight], "y")
        assert {finding.rule for finding in lint(net.build(["batch", 8], "y"))} == rules


@pytest.mark.parametrize("transposed", [0, 1])
def test_gemm_has_its_channels_where_it_says(transposed, lint):
    for axis in (0, 1):
        net = Net()
        net.add("Gemm", [net.quantize("x"), net.weight("w", (8, 8), axis)], "y", transB=transposed)
        found = [finding.rule for finding in lint(net.build(["batch", 8], "y"))]
        assert found == ([] if axis == 1 - transposed else ["weight-axis"])


def test_a_quantizer_without_a_zero_point_is_unsigned_and_a_mask_of_one_infinity_is_a_warning(lint):
    model = make_mlp()
    for name in ("x/Q", "x/DQ"):
        del node(model, name).input[2:]
    (finding,) = lint(model)
    assert finding.rule == "quantized-type"
    assert "UINT8 (it has no zero point)" in finding.message
    model = make_mlp()
    write_mask(model)
    assert [(finding.rule, finding.severity) for finding in lint(model)] == [("fp16-overflow", "warning")]


@pytest.mark.parametrize(("opset", "rules"), [(18, {"quantization-opset", "mixed-types"}), (19, set())])
def test_scales_in_fp16_need_opset_19(opset, rules, lint):
    model = make_mlp(dtype=np.float16)
    set_opset(model, opset)
    assert {finding.rule for finding in lint(model)} == rules


@pytest.mark.parametrize(("opset", "rules"), [(18, {"quantization-opset"}), (19, set()), (25, set())])
def test_fp8_is_taken_from_opset_19(opset, rules, lint):
    model = make_mlp((8, 4))
    for each in model.graph.initializer:
        if each.data_type == TensorProto.INT8:
            kind, size = TensorProto.FLOAT8E4M3FN, int(np.prod(each.dims))
            number = b"\x38" if each.name.endswith("int8") else b"\0"  # weights are 1, zero points 0
            each.CopyFrom(helper.make_tensor(each.name, kind, each.dims, number * size, raw=True))
    set_opset(model, opset)
    assert {finding.rule for finding in lint(model)} == rules


def test_nodes_inside_of_branches_are_looked_at(lint):
    model = make_mlp()
    value = helper.make_tensor_value_info("u", TensorProto.FLOAT, None)
    body = helper.make_graph([helper.make_node("Unique", ["x"], ["u"], "inner")], "body", [], [value])
    model.graph.initializer.append(numpy_helper.from_array(np.array(True), "yes"))
    append(model, helper.make_node("If", ["yes"], ["either"], "branch", then_branch=body, else_branch=body))
    assert {(each.rule, each.node) for each in lint(model)} == {
        ("data-dependent", "branch"),
        ("unknown-operator", "inner"),
    }


@pytest.mark.parametrize(
    ("entries", "size", "words"),
    [
        ({"location": "data", "offset": "0", "length": "64"}, 10, "which has 10"),
        ({"location": "../data"}, 0, "outside the folder"),
        ({"location": "none"}, 0, "is missing"),
    ],
)
def test_external_data_that_is_not_there_is_named(entries, size, words, lint, tmp_path):
    (tmp_path / "data").write_bytes(bytes(size))
    model = make_mlp()
    bias = tensor(model, "fc0/bias")
    bias.ClearField("raw_data")
    bias.data_location = TensorProto.EXTERNAL
    for key, value in entries.items():
        bias.external_data.add(key=key, value=value)
    (finding,) = lint(model)
    assert words in finding.message


def test_layers_are_counted_with_the_names_of_those_in_float(tmp_path):
    model = make_mlp((8, 16, 16, 4))
    node(model, "fc1").input[0] = "relu0"
    onnx.save(model, tmp_path / "model.onnx")
    count = count_quantized(tmp_path / "model.onnx")
    assert (count.quantized, count.total, count.floating) == (2, 3, ("fc1",))


networks = st.one_of(
    st.lists(st.integers(1, 24), min_size=3, max_size=6).map(lambda widths: make_mlp((8, 16, *widths))),
    st.builds(make_cnn, st.integers(1, 3), st.booleans()),
)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(model=networks, data=st.data())
def test_any_network_is_clean_and_one_change_gives_that_changes_finding(model, data, lint):
    assert lint(model) == []
    pairs = [each.name for each in model.graph.node if each.op_type == "QuantizeLinear"]
    name = data.draw(st.sampled_from(pairs)).removesuffix("/Q")
    rule, array = data.draw(
        st.sampled_from(
            [
                ("zero-point", np.int8(-5)),
                ("quantized-type", np.uint8(0)),
                ("bad-scale", np.float32(-1)),
                ("bad-scale", np.float32(np.inf)),
            ]
        )
    )
    put(model, f"{name}/scale" if rule == "bad-scale" else f"{name}/zero", array)
    assert {(each.rule, each.node) for each in lint(model)} == {(rule, f"{name}/Q")}


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(place=st.integers(0, 10**6), garbage=st.binary(min_size=1, max_size=8))
def test_a_damaged_file_gives_findings_or_a_sentence(place, garbage, tmp_path):
    content = make_cnn().SerializeToString()
    place %= len(content)
    path = tmp_path / "model.onnx"
    path.write_bytes(content[:place] + garbage + content[place + len(garbage) :])
    with suppress(SourceError):
        assert all(finding.rule in RULES for finding in lint_tensorrt(path))


@pytest.mark.parametrize("content", [b"", b"\x00\x01not a model", make_mlp().SerializeToString()[:400]])
def test_what_is_no_model_is_refused_in_one_sentence(content, tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"model\.onnx is not an ONNX file"):
        lint_tensorrt(path)


def test_a_graph_out_of_order_is_refused(tmp_path):
    model = make_mlp()
    first = model.graph.node[0]
    model.graph.node.append(first)
    del model.graph.node[0]
    onnx.save(model, tmp_path / "model.onnx")
    with pytest.raises(SourceError, match="before it is written"):
        lint_tensorrt(tmp_path / "model.onnx")


def test_the_command_lists_a_few_findings_of_a_rule_and_exits_with_3_unless_they_are_warnings_alone(laconic, tmp_path):
    model = make_mlp()
    node(model, "fc1").input[0] = "relu0"
    onnx.save(model, tmp_path / "model.onnx")
    code, out, err = laconic("lint", tmp_path / "model.onnx")
    assert code == 3
    assert "half-quantized: fc1: MatMul: the weight is quantized" in " ".join(out.split())
    assert "1 of 2 linear layers and convolutions quantized, in float: fc1" in " ".join(out.split())
    assert err == f"laconic: {tmp_path / 'model.onnx'} is not fit for tensorrt: half-quantized\n"
    code, out, _ = laconic("lint", tmp_path / "model.onnx", "--json")
    found = json.loads(out)
    assert code == 3
    assert [(each["rule"], each["severity"], each["node"]) for each in found["findings"]] == [
        ("half-quantized", "error", "fc1")
    ]
    assert found["quantized"] == {"quantized": 1, "total": 2, "floating": ["fc1"]}
    model = make_mlp()
    drop_name(model)
    onnx.save(model, tmp_path / "model.onnx")
    code, out, err = laconic("lint", tmp_path / "model.onnx", "--target", "tensorrt")
    assert (code, err) == (0, "")
    assert "unnamed-axis" in out
    model = make_mlp((8, 16, 16, 16, 16, 4))
    for each in model.graph.initializer:
        if each.name.endswith("/zero"):
            put(model, each.name, np.int8(1))
    onnx.save(model, tmp_path / "model.onnx")
    _, out, _ = laconic("lint", tmp_path / "model.onnx")
    assert out.count("has the zero point 1") == 3
    assert "2 more of zero-point; --json prints all" in out
    assert len(json.loads(laconic("lint", tmp_path / "model.onnx", "--json")[1])["findings"]) == 5


def test_of_an_artifact_the_graph_is_read_where_it_has_one(laconic, tmp_path):
    folder = write_artifact(tmp_path / "made.laconic")
    path = folder / MODEL
    onnx.save(make_mlp(), path)
    content = unseal(folder / MANIFEST)
    content["files"][MODEL] = digest_file(path).model_dump()
    (folder / MANIFEST).write_bytes(seal(content))
    code, out, err = laconic("lint", folder)
    assert (code, err) == (0, "")
    assert "2 of 2 linear layers and convolutions quantized" in out
    code, out, err = laconic("lint", write_artifact(tmp_path / "made.laconic"))
    assert (code, out) == (2, "")
    assert "is not an ONNX file" in err
