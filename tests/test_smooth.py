"""SmoothQuant: division and multiplication cancel, and it is used where it pays; the order of the precision ladder."""

from io import BytesIO
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx.helper import make_graph, make_model, make_node

from compress.quantize.sensitivity import make_ladder
from compress.quantize.smoothquant import find_smoothing, make_smoothing, quantization_error, smoothed_range
from compress.quantize.tensor_statistics import SAMPLED_ROWS, ChannelStatistics
from laconic.progress import Steps
from laconic.quantization.graph import Layer
from laconic.quantization.plan import Plan, Precision, Smoothing


def channels_of(rows):
    channels = ChannelStatistics()
    for row in rows:
        channels.add(row[None])
    return channels


def data(width=32, outliers=0.0, seed=0):
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal((200, width)).astype(np.float32)
    rows[:, :2] *= 1 + outliers
    return rows, rng.standard_normal((width, 16)).astype(np.float32)


def plain(channels, width):
    return Smoothing(np.ones(width, np.float32), smoothed_range(channels, None))


def test_channels_with_outliers_are_smoothed_and_the_error_falls():
    rows, weight = data(outliers=50)
    channels = channels_of(rows)
    found = find_smoothing(channels, [weight])
    assert found is not None
    assert quantization_error(channels.rows, [weight], found) < 0.3 * quantization_error(
        channels.rows, [weight], plain(channels, 32)
    )
    assert found.factors[0] > 3 * found.factors[5]


@settings(max_examples=25)
@given(st.integers(2, 20), st.integers(0, 1000), st.sampled_from([0.5, 0.8, 1.0]))
def test_division_and_multiplication_cancel_and_limits_hold_everything(width, seed, alpha):
    rows, weight = data(width, outliers=5, seed=seed)
    channels = channels_of(rows)
    each = make_smoothing(channels, [weight], alpha)
    np.testing.assert_allclose((rows / each.factors) @ (weight * each.factors[:, None]), rows @ weight, atol=1e-3)
    assert each.limits.low <= (rows / each.factors).min() * (1 - 1e-6) + 1e-6
    assert each.limits.high >= (rows / each.factors).max() * (1 - 1e-6) - 1e-6


def test_even_and_dead_channels_are_left_alone():
    rng = np.random.default_rng(0)
    rows = rng.choice([-1.0, 1.0], (200, 32)).astype(np.float32)
    weight = rng.choice([-1.0, 1.0], (32, 16)).astype(np.float32)
    assert find_smoothing(channels_of(rows), [weight]) is None
    rows, weight = data(outliers=20)
    rows[:, 5] = 0
    found = find_smoothing(channels_of(rows), [weight])
    assert found is None or np.isfinite(found.factors).all()


def test_rows_are_kept_in_constant_memory_and_extremes_are_exact():
    channels = ChannelStatistics()
    rng = np.random.default_rng(0)
    batches = [rng.standard_normal((3, 7, 8)).astype(np.float32) for _ in range(400)]
    for batch in batches:
        channels.add(batch)
    everything = np.concatenate(batches).reshape(-1, 8)
    assert channels.rows.shape == (SAMPLED_ROWS, 8)
    np.testing.assert_array_equal(channels.low, everything.min(axis=0))
    np.testing.assert_array_equal(channels.high, everything.max(axis=0))


def layer(name, kind, shape):
    return Layer(node=name, module=name, kind=kind, input="x", weight="w", output="y", shape=shape, axis=1)


LAYERS = (layer("table", "Gather", (100, 4)), layer("small", "MatMul", (4, 4)), layer("large", "MatMul", (4, 40)))
LOWEST: dict[str, Precision] = {"table": "int8-weight", "small": "int8", "large": "int8"}


PRODUCT = make_graph([make_node("MatMul", ["x", "x"], ["y"], "product")], "product", [], [])
ATTENTION = make_graph(
    [
        make_node("MatMul", ["query", "key"], ["scores"], "scores"),
        make_node("Softmax", ["scores"], ["shares"], "shares"),
        make_node("MatMul", ["shares", "value"], ["mixed"], "mixed"),
    ],
    "attention",
    [],
    [],
)


def make(sensitivity, lowest=LOWEST, *, measure=False, nodes=PRODUCT):
    """A ladder of the layers whose sensitivities are given, and the layers that were measured. nodes: of the graph."""
    measured = []

    def trial(plan):
        (node,) = (node for node, precision in plan.precision.items() if precision != "float32")
        measured.append(node)
        return np.array([sensitivity[node]])

    context = SimpleNamespace(steps=Steps(quiet=True), trial=trial)
    graph = SimpleNamespace(layers=LAYERS, path=BytesIO(make_model(nodes).SerializeToString()))
    return make_ladder(graph, Plan(lowest), context, measure=measure), measured


def test_layers_are_raised_in_order_of_sensitivity_per_weight():
    ladder, _ = make({"table": 1.0, "small": 0.2, "large": 1.0})
    first, second, third = ladder.rungs
    assert [plan.precision["small"] for plan in first] == ["int8", "int8-weight", "int8-weight"]
    assert [plan.precision["large"] for plan in first] == ["int8", "int8", "int8-weight"]
    assert {plan.precision["table"] for plan in first} == {"int8-weight"}
    assert {plan.precision["table"] for plan in second} == {"float16-weight"}
    assert second[-1].precision["large"] == "float16-weight"
    assert set(third[0].precision.values()) == {"float32"}


def test_attention_leaves_int8_before_any_layer_does():
    ladder, _ = make({"table": 1.0, "small": 0.2, "large": 1.0}, nodes=ATTENTION)
    (lowest,), *others = ladder.rungs
    assert lowest.attention
    assert {plan.attention for rung in others for plan in rung} == {False}
    assert others[0][0].precision == lowest.precision
    assert [len(rung) for rung in others] == [3, 3, 1]
    weights = dict.fromkeys(LOWEST, "int8-weight")
    assert len(make({}, weights, nodes=ATTENTION)[0].rungs) == 3, "weight-only: attention is in float in any case"


def test_sensitivity_is_measured_once_for_plans_between_the_first_and_the_last_or_where_asked_for():
    ladder, measured = make({"table": 0.3, "small": 0.2, "large": 1.0})
    for rung in ladder.rungs:
        assert rung[0] is not None
        assert rung[-1] is not None
    assert measured == []
    assert ladder.sensitivity == {}
    assert ladder.rungs[0][1].precision == {**LOWEST, "small": "int8-weight"}
    assert ladder.rungs[1][1].precision["small"] == "float16-weight"
    assert measured == ["table", "small", "large"]
    assert ladder.sensitivity == pytest.approx({"table": 0.3, "small": 0.2, "large": 1.0})
    ladder, measured = make({"table": 0.3, "small": 0.2, "large": 1.0}, measure=True)
    assert measured == ["table", "small", "large"] == list(ladder.sensitivity)
    ladder, measured = make({"table": 1.0, "small": 0.2}, {**LOWEST, "large": "float32"})
    for rung in ladder.rungs:
        assert {plan.precision["large"] for plan in rung} == {"float32"}
    assert [len(rung) for rung in ladder.rungs] == [2, 2, 1]
    assert measured == [], "one layer to raise: its plans are the first and the last"
