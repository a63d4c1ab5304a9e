"""`laconic inspect` of an ONNX file: what it takes, what stands in the way, and what to type."""

import json

import onnx
from onnx import TensorProto, helper


def save_streaming(path):
    """A model with a state whose batch is the second axis, and a sampling rate."""
    infos = [
        helper.make_tensor_value_info(name, kind, shape)
        for name, kind, shape in (
            ("x", TensorProto.FLOAT, ["batch", "time"]),
            ("state", TensorProto.FLOAT, [2, "batch", 8]),
            ("rate", TensorProto.INT64, []),
            ("y", TensorProto.FLOAT, ["batch", "time"]),
        )
    ]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", infos[:3], infos[3:])
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
    assert summary["command"].startswith("laconic compress")
    code, out, _ = laconic("inspect", path)
    assert code == 0
    assert all(word in out for word in ("the batch is axis 1", "in the way", "numpy.savez", "to compress"))


def test_a_file_that_does_not_read_is_refused(tmp_path, laconic):
    (tmp_path / "broken.onnx").write_bytes(b"not a graph")
    code, _, err = laconic("inspect", tmp_path / "broken.onnx")
    assert code == 2
    assert "not a valid ONNX file" in err
