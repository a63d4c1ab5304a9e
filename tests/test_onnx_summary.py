"""`laconic inspect` of an ONNX file: what it takes, what stands in the way, and what to type."""

import json

import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from export.capture.onnx_interface import find_states


def save_streaming(path):
    """A model with a state whose batch is the second axis, and a sampling rate."""
    infos = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (
            ("x", TensorProto.FLOAT, ["batch", "time"]),
            ("state", TensorProto.FLOAT, [2, "batch", 8]),
            ("rate", TensorProto.INT64, []),
            ("y", TensorProto.FLOAT, ["batch", "time"]),
            ("state_out", TensorProto.FLOAT, [2, "batch", 8]),
        )
    ]
    nodes = [helper.make_node("Identity", [name], [after]) for name, after in (("x", "y"), ("state", "state_out"))]
    graph = helper.make_graph(nodes, "g", infos[:3], infos[3:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def test_a_file_is_described_with_what_to_type(tmp_path, laconic):
    path = save_streaming(tmp_path / "vad.onnx")
    code, out, _ = laconic("inspect", path, "--json")
    summary = json.loads(out)
    assert code == 0
    assert [(each["batch"], each["free"]) for each in summary["inputs"]] == [("axis 0", [1]), ("axis 1", []), ("", [])]
    (obstacle,) = summary["obstacles"]
    assert "constants: {rate: 1}" in obstacle
    assert summary["states"] == {"state": "state_out"}
    assert summary["command"].startswith("laconic compress")
    code, out, _ = laconic("inspect", path)
    assert code == 0
    words = ("the batch is axis 1", "in the way", "numpy.savez", "to compress", "the server keeps none")
    assert all(word in " ".join(out.split()) for word in words)


def test_a_file_that_does_not_read_is_refused(tmp_path, laconic):
    (tmp_path / "broken.onnx").write_bytes(b"not a graph")
    code, _, err = laconic("inspect", tmp_path / "broken.onnx")
    assert code == 2
    assert "not a valid ONNX file" in err


@pytest.mark.parametrize(
    ("names", "pairs"),
    [
        (("state", "stateN"), True),
        (("h0", "hn"), True),
        (("h_in", "h_out"), True),
        (("past_cache", "present_cache"), True),
        (("lstm_state", "new_lstm_state"), True),
        (("input", "output"), False),
        (("x", "x_out"), False),
        (("in_features", "out_features"), False),
    ],
)
def test_states_are_found_by_their_names(names, pairs):
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, "batch", 8]) for name in names]
    graph = helper.make_graph([helper.make_node("Identity", names[:1], names[1:])], "g", infos[:1], infos[1:])
    model = ir.from_proto(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8))
    assert find_states(model) == ({names[0]: names[1]} if pairs else {})
