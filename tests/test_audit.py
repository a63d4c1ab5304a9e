"""The kernel audit: multiply-adds counted from shapes, the arithmetic that they run in, and why it is another."""

from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import onnx
import pytest
from artifacts import write_artifact
from captured import ZOO
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper

from export.candidates.audit import KernelAudit
from export.candidates.candidate import EngineCandidate, choose_fastest, prefer_int8
from export.candidates.engine_option import EngineOption
from export.candidates.multiply_adds import count_products
from export.validation.missed import find_int8_missed
from laconic import registry
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.inspection import count_kernels
from laconic.artifacts.manifest import MEASURED
from laconic.commands.tables import format_audit
from laconic.errors import RecipeError, UnsupportedPrecision
from laconic.hashing import seal, unseal
from laconic.models.footprint import LENGTH, count_multiply_adds
from laconic.quantization.graph import Graph
from laconic.quantization.plan import INTEGER, Plan
from laconic.recipes.recipe import Recipe
from laconic.runtimes.kernel_audit import (
    FALLBACKS,
    NOT_CHOSEN,
    SENSITIVE,
    UNASKED,
    UNKNOWN,
    audit_products,
    find_reason,
)
from laconic.runtimes.product import (
    ARITHMETIC,
    NOT_AUDITED,
    NOT_COUNTED,
    NOT_REPORTED,
    Product,
    group_fallbacks,
    share_multiply_adds,
)
from laconic.runtimes.runtime import Kernel, find_kernel
from laconic.timing.measurements import Measurements


def write_graph(path, kind, inputs, weights, output="y", **attributes):
    """A graph of one node of random weights. inputs, weights: shapes by name; a free axis is a string."""
    node = helper.make_node(kind, [*inputs, *weights], [output], "node", **attributes)
    graph = helper.make_graph(
        [node],
        "main",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(output, TensorProto.FLOAT, None)],
        [
            helper.make_tensor(name, TensorProto.FLOAT, shape, np.zeros(int(np.prod(shape)), np.float32))
            for name, shape in weights.items()
        ],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11), path)
    return Graph(path, (), (), (), "")


@pytest.mark.sweep("gpt2", "t5-encoder")
@pytest.mark.parametrize("name", [name for name in ZOO if name != "lstm"])
def test_the_multiply_adds_of_a_graph_are_those_that_torch_counts(captured, name):
    checkpoint, graph = captured(name)
    shapes = {key: array.shape for key, array in checkpoint.task.typical(1, 128).items()}
    products = count_products(graph, shapes)
    assert sum(each.multiply_adds for each in products) == count_multiply_adds(checkpoint)
    layers = {layer.node for layer in graph.layers if layer.kind != "Gather"}
    assert layers == {each.node for each in products if each.kind in ("linear", "convolution")}


@pytest.mark.parametrize(
    ("kind", "inputs", "weights", "attributes", "expected"),
    [
        ("MatMul", {"x": ("n", 5, 6)}, {"w": (6, 8)}, {}, 3 * 5 * 6 * 8),
        ("MatMul", {"x": ("n", 6)}, {"w": (6,)}, {}, 3 * 6),
        ("Gemm", {"x": (6, "n")}, {"w": (8, 6)}, {"transA": 1, "transB": 1}, 3 * 6 * 8),
        ("Conv", {"x": ("n", 4, 5, 5)}, {"w": (8, 2, 3, 3)}, {"group": 2}, 3 * 8 * 3 * 3 * 2 * 9),
        ("ConvTranspose", {"x": ("n", 4, 5, 5)}, {"w": (4, 2, 3, 3)}, {}, 3 * 4 * 25 * 2 * 9),
        ("Einsum", {"x": ("n", 5, 6)}, {"w": (6, 8)}, {"equation": "bij,jk->bik"}, 3 * 5 * 6 * 8),
        ("Einsum", {"x": ("n", 5, 6)}, {"w": (6, 8)}, {"equation": "...ij,jk->...ik"}, 3 * 5 * 6 * 8),
        ("LSTM", {"x": (7, "n", 4)}, {"w": (1, 20, 4), "r": (1, 20, 5)}, {"hidden_size": 5}, 7 * 3 * 20 * (4 + 5)),
        ("Attention", dict.fromkeys("qkv", ("n", 2, 7, 4)), {}, {}, 3 * 2 * 7 * 7 * (4 + 4)),
        (
            "Attention",
            {"q": ("n", 7, 8), "k": ("n", 7, 4), "v": ("n", 7, 4)},
            {},
            {"q_num_heads": 2, "kv_num_heads": 1},
            3 * 7 * 7 * (8 + 8),
        ),
    ],
)
def test_each_operator_is_counted_by_its_formula(tmp_path, kind, inputs, weights, attributes, expected):
    graph = write_graph(tmp_path / "model.onnx", kind, inputs, weights, **attributes)
    sizes = {name: [3 if axis == "n" else axis for axis in shape] for name, shape in inputs.items()}
    assert [each.multiply_adds for each in count_products(graph, sizes)] == [expected]


def test_shapes_that_depend_on_values_are_not_guessed(tmp_path):
    nodes = [
        helper.make_node("NonZero", ["x"], ["where"]),
        helper.make_node("Cast", ["where"], ["float"], to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["w", "float"], ["y"], "node"),
    ]
    made = helper.make_graph(
        nodes,
        "main",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n"])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [helper.make_tensor("w", TensorProto.FLOAT, (2, 1), [1, 1])],
    )
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    assert count_products(Graph(tmp_path / "m.onnx", (), (), (), ""), {"x": (4,)}) == ()


def audited(zoo, name, engine, precision, folder, compute="float32"):
    """A candidate of a model of the zoo with its kernels."""
    checkpoint, graph, ranges = zoo(name)
    lowest = {layer.node: "int8-weight" if layer.kind == "Gather" else precision for layer in graph.layers}
    plan = Plan(lowest, ranges)
    option = EngineOption.here(engine, compute)
    option.build(graph, plan, folder / "model.onnx")
    adapted = option.adapt(graph, plan)
    candidate = EngineCandidate(option, adapted, folder / "model.onnx", np.ones(2), met=True)
    shapes = {name: array.shape for name, array in checkpoint.task.typical(1, LENGTH).items()}
    audit = KernelAudit(graph, checkpoint.task, count_products(graph, shapes), plan)
    return audit.check(candidate, checkpoint.task.examples(1))


def test_counting_prints_no_warning_of_a_node_that_cannot_be_folded(zoo, caplog):
    checkpoint, graph, _ = zoo("embedder")
    assert count_products(graph, {key: each.shape for key, each in checkpoint.task.typical(1, 128).items()})
    assert [each.name for each in caplog.records if each.name.startswith("onnxscript")] == []


def test_openvino_runs_all_of_a_transformer_in_int8_attention_included(zoo, tmp_path):
    found = audited(zoo, "bert", "openvino", "int8", tmp_path)
    assert share_multiply_adds(found.products) == {"int8": pytest.approx(1)}
    assert group_fallbacks(found.products) == []
    assert {each.kind for each in found.products} == {"linear", "attention"}


def test_attention_in_float_on_onnxruntime_is_told_with_its_share_and_its_reason(zoo, tmp_path):
    found = audited(zoo, "bert", "onnxruntime", "int8", tmp_path)
    shares = share_multiply_adds(found.products)
    assert set(shares) == {"int8", "float32"}
    (group,) = group_fallbacks(found.products)
    assert (group.kind, group.asked, group.runs) == ("attention", "int8", "float32")
    assert group.kernels == ("MultiHeadAttention",)
    assert group.share == pytest.approx(shares["float32"])
    assert "ONNX Runtime" in group.reason
    assert len(group.nodes) == 2


def test_a_layer_that_the_engine_does_not_run_in_int8_is_refused_with_the_reason(zoo, tmp_path):
    with pytest.raises(UnsupportedPrecision, match="OpenVINO multiplies dynamically quantized integers"):
        audited(zoo, "tied", "openvino", "int8-dynamic", tmp_path)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", ["residual", "mobilenet", "vit", "bert"])
@pytest.mark.parametrize("precision", ["int8", "float32"])
def test_every_product_is_found_among_the_kernels(zoo, tmp_path, engine, name, precision):
    found = audited(zoo, name, engine, precision, tmp_path)
    assert [each.node for each in found.products if not each.runs] == []
    assert all(each.kernel for each in found.products)


@pytest.mark.parametrize("engine", ["tensorrt", "onnxruntime-cuda"])
def test_by_reference_execution_nothing_is_audited_and_the_plan_has_its_reasons(zoo, tmp_path, engine):
    if not EngineOption.here(engine, "float16").reference:
        pytest.skip("the engine is on this machine")
    found = audited(zoo, "bert", engine, "int8", tmp_path, "float16").products
    assert share_multiply_adds(found) == {}
    planned = share_multiply_adds(found, planned=True)
    assert ("int8" in planned) == (engine == "tensorrt")
    reasons = {group.kind: group.reason for group in group_fallbacks(found)}
    assert "attention" in reasons
    assert ("linear" in reasons) == (engine == "onnxruntime-cuda")


PRODUCTS = (
    Product(node="a/MatMul", names=("a/MatMul",), kind="linear", multiply_adds=60, asked="int8", planned="int8"),
    Product(node="b/MatMul", names=("b/MatMul",), kind="linear", multiply_adds=30, asked="int8", planned="float32"),
    Product(node="c/MatMul", names=("c/MatMul",), kind="attention", multiply_adds=10, asked="int8", planned="float32"),
)
KERNELS = [
    Kernel("a/MatMul", "brgemm_i8", "int8"),
    Kernel("b/MatMul", "gemm_f32", "float32"),
    Kernel("c/Add", "eltwise_i8", "int8"),
    Kernel("c/MatMul", "gemm_f32", "float32"),
]


def test_shares_are_those_of_the_multiply_adds_and_kernels_are_found_by_their_activations():
    found = audit_products(PRODUCTS, KERNELS, "onnxruntime")
    assert share_multiply_adds(found) == {"int8": pytest.approx(0.6), "float32": pytest.approx(0.4)}
    assert [each.reason for each in found][:2] == ["", SENSITIVE]
    assert share_multiply_adds(PRODUCTS, planned=True) == share_multiply_adds(found)
    assert share_multiply_adds(audit_products(PRODUCTS, [], "fake")) == {}
    assert share_multiply_adds(()) == {}
    kernels = [Kernel("node_relu", "Conv", "float32")]
    assert find_kernel("stem/Conv", kernels) is None
    assert find_kernel("stem/Conv", kernels, ("stem/Conv", "node_relu")) is kernels[0]


@given(st.lists(st.tuples(st.integers(0, 10**9), st.sampled_from(["", "int8", "float32", "bfloat16"])), max_size=20))
def test_shares_add_up_to_one_or_are_not_told(found):
    products = [
        Product(node=str(number), kind="linear", multiply_adds=count, runs=runs)
        for number, (count, runs) in enumerate(found)
    ]
    shares = share_multiply_adds(products)
    assert not shares or sum(shares.values()) == pytest.approx(1)
    assert bool(shares) == any(runs for _, runs in found) or sum(count for count, _ in found) == 0


@pytest.mark.parametrize(
    ("asked", "planned", "runs", "quantized", "expected"),
    [
        ("int8", "int8", "int8", True, ""),
        ("int8", "int8", "", True, ""),
        ("float32", "float32", "float32", False, ""),
        ("int8", "float32", "float32", True, SENSITIVE),
        ("int8", "float32", "float32", False, NOT_CHOSEN),
        ("float32", "float32", "int8", True, UNASKED),
        ("float32", "float32", "bfloat16", False, UNKNOWN),
        ("", "", "float32", False, ""),
    ],
)
def test_a_reason_is_given_where_something_else_runs_and_only_there(asked, planned, runs, quantized, expected):
    assert find_reason("openvino", "linear", asked, planned, runs, quantized=quantized) == expected


@pytest.mark.parametrize("engine", registry.PLACEMENTS)
def test_every_precision_that_an_engine_replaces_has_its_reason(engine):
    for compute, rules in registry.resolve("placement", engine).items():
        for precision in set(rules.instead) & (INTEGER | {"float8"}):
            reason = find_reason(engine, "linear", precision, compute, "", quantized=False)
            assert reason not in ("", UNKNOWN, SENSITIVE, NOT_CHOSEN), (engine, precision)
        if not rules.attention:
            reason = find_reason(engine, "attention", "int8", compute, compute, quantized=True)
            assert reason not in ("", UNKNOWN, SENSITIVE, NOT_CHOSEN), engine


def test_the_table_names_engines_that_exist_and_each_reason_can_be_reached():
    for each in FALLBACKS:
        assert each.engines <= set(registry.PLACEMENTS)
        for engine, kind, asked in product(each.engines, each.kinds, each.asked):
            planned = ARITHMETIC.get(asked, asked) if each.placed else each.planned or "float32"
            assert find_reason(engine, kind, asked, planned, "float32", quantized=True) == each.reason, engine


@pytest.fixture
def measurements(tmp_path):
    content = unseal(write_artifact(tmp_path / "x.laconic") / MEASURED)
    return lambda products: Measurements.model_validate(content | {"products": products})


def test_a_share_that_is_below_the_goal_or_not_known_does_not_meet_it_and_says_why(measurements):
    found = measurements(audit_products(PRODUCTS, KERNELS, "onnxruntime"))
    (sentence,) = find_int8_missed(found, 0.9)
    assert sentence.startswith(
        "60 % of the multiply-adds run in INT8, the goal is 90 %: b/MatMul (30 %) in float32, as "
    )
    assert "c/MatMul (10 %) in float32" in sentence
    assert list(find_int8_missed(found, 0.6)) == []
    (sentence,) = find_int8_missed(measurements(PRODUCTS), 0.5)
    assert NOT_AUDITED in sentence
    (sentence,) = find_int8_missed(measurements(()), 0.5)
    assert NOT_COUNTED in sentence
    assert Recipe.parse({"source": "m", "goal": {"int8_share": "90%"}}).goal.int8_share == 0.9
    with pytest.raises(RecipeError, match="int8_share"):
        Recipe.parse({"source": "m", "goal": {"int8_share": "900%"}})
    with pytest.raises(RecipeError, match="int8_share is for artifacts"):
        Recipe.parse(
            {"source": "m", "to": "checkpoint", "goal": {"int8_share": 0.9}, "stages": ["prune.ffn"]}
        ).complete()


def test_the_candidates_with_enough_in_int8_are_preferred_and_fidelity_comes_before():
    low = EngineCandidate(
        EngineOption("onnxruntime", "float32"), Plan({"a": "int8"}), Path("m"), np.ones(1), met=True, speedup=9.0
    )
    low = replace(low, products=audit_products(PRODUCTS, KERNELS, "onnxruntime"))
    whole = audit_products(PRODUCTS, [Kernel(each.node, "i8", "int8") for each in PRODUCTS], "openvino")
    high = replace(low, option=EngineOption("openvino", "float32"), products=whole, speedup=1.0)
    assert choose_fastest(prefer_int8([low, high], 0.0)) is low
    assert choose_fastest(prefer_int8([low, high], 0.9)) is high
    assert list(prefer_int8([low, replace(high, met=False)], 0.9)) == [low]
    assert len(prefer_int8([replace(low, met=False), replace(high, met=False)], 0.9)) == 2


def with_products(path, products):
    (path / MEASURED).write_bytes(
        seal(unseal(path / MEASURED) | {"products": [each.model_dump() for each in products]})
    )
    return Artifact.load(path)


def test_inspection_says_what_was_audited_or_why_nothing_was(tmp_path):
    path = write_artifact(tmp_path / "x.laconic")
    content = unseal(path / MEASURED)
    content.pop("products")
    (path / MEASURED).write_bytes(seal(content))
    artifact = Artifact.load(path)
    assert artifact.measured.multiply_adds == {}
    assert count_kernels(artifact)["audit"] is None
    assert list(format_audit(None)) == []
    artifact = with_products(write_artifact(tmp_path / "x.laconic"), PRODUCTS)
    found = count_kernels(artifact)["audit"]
    assert (found["state"], found["shares"], found["multiply_adds"]) == (NOT_REPORTED, {}, 100)
    ((head, line), *_) = format_audit(found)
    assert head == "multiply-adds"
    assert line == f"60.0 % int8, 40.0 % float32, of 100 for one sample; {NOT_REPORTED}"
    artifact = with_products(write_artifact(tmp_path / "x.laconic"), PRODUCTS)
    found = count_kernels(artifact, "onnxruntime")
    assert "error" in found
    assert found["audit"]["state"] == NOT_AUDITED
    assert NOT_AUDITED in dict(format_audit(found["audit"]))["multiply-adds"]
    products = audit_products(PRODUCTS, KERNELS, "onnxruntime")
    artifact = with_products(write_artifact(tmp_path / "x.laconic"), products)
    rows = list(format_audit(count_kernels(artifact, "onnxruntime")["audit"]))
    assert rows[0][1].startswith("60.0 % int8, 40.0 % float32, of 100 for one sample")
    assert [head for head, _ in rows[1:]] == ["fell back", "fell back"]
    assert rows[1][1] == f"b/MatMul, 30 %: float32 (gemm_f32) instead of int8; {SENSITIVE}"
