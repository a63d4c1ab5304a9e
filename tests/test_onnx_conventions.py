"""ONNX files of the conventions that exporters have: each is imported with the answers of the file, or refused in one
sentence that says what to do."""

from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto as T
from onnx import helper as h
from onnx import numpy_helper as nh

from export.sources import open_source
from laconic.cache import Cache
from laconic.data.reader import read
from laconic.errors import DataError, SourceError
from laconic.recipes.recipe import Recipe
from laconic.runtimes.predict import predict
from laconic.runtimes.runtime import make_runtime

RNG = np.random.default_rng(0)
ROWS = 12


def draw(*shape):
    return RNG.normal(size=shape).astype(np.float32)


def weights(name, *shape):
    return nh.from_array((RNG.normal(size=shape) * 0.3).astype(np.float32), name)


def integers(name, *values):
    return nh.from_array(np.array(values, np.int64), name)


def node(kind, inputs, *outputs, **attributes):
    return h.make_node(kind, inputs.split(), list(outputs), **attributes)


def branch(kind, name):
    output = h.make_tensor_value_info(name, T.FLOAT, None)
    return h.make_graph([node(kind, "x two", name)], name, [], [output])


@dataclass
class Case:
    """A file, samples for it, and what its signature becomes. shapes: of inputs and outputs. notes: parts of what is
    said of the interface. rows: of its first input, which is fixed to one where the file cannot take more."""

    nodes: list
    inputs: dict
    outputs: dict
    initializers: list
    samples: dict
    shapes: dict
    notes: tuple = ()
    opset: int = 17
    recipe: dict = field(default_factory=dict)
    kinds: dict = field(default_factory=dict)


LINEAR = [node("MatMul", "x w", "y")]
CONV = [node("Conv", "x k", "c", pads=[1] * 4)]


def linear(shape, samples=None, expected=("batch", 8), **options):
    return Case(
        LINEAR, {"x": shape}, {"y": [None, 4]}, [weights("w", 8, 4)], samples or {"x": draw(ROWS, 8)},
        {"x": expected, "y": (*expected[:-1], 4)}, **options,
    )  # fmt: skip


CASES = {
    "a batch that is named N": linear(["N", 8]),
    "a batch without a name": linear([None, 8]),
    "a batch that is written as -1": linear([-1, 8]),
    "a batch that is written as 0": linear([0, 8]),
    "a batch that is called ?": linear(["?", 8]),
    "a batch fixed to one row, which can be freed": linear([1, 8]),
    "two axes that are called ?": Case(
        [*CONV, node("GlobalAveragePool", "c", "y")], {"x": ["?", 3, "?", "?"]}, {"y": ["?", 4, 1, 1]},
        [weights("k", 4, 3, 3, 3)], {"x": draw(ROWS, 3, 20, 12)}, {"x": ("batch", 3, "axis_2", "axis_3")},
    ),
    "a Reshape that repeats the row": Case(
        [*CONV, node("Reshape", "c s", "y")], {"x": [1, 3, 8, 8]}, {"y": [1, 4, 64]},
        [weights("k", 4, 3, 3, 3), integers("s", 1, 4, 64)], {"x": draw(ROWS, 3, 8, 8)},
        {"x": ("batch", 3, 8, 8), "y": ("batch", 4, 64)},
    ),
    "a Reshape by which rows meet": Case(
        [node("Reshape", "x s", "r"), node("Softmax", "r", "p", axis=0), node("Reshape", "p t", "y")],
        {"x": [1, 8]}, {"y": [1, 8]}, [integers("s", 8), integers("t", 1, 8)], {"x": draw(ROWS, 8)},
        {"x": ("batch", 8), "y": ("batch", 8)}, ("row by row",),
    ),
    "an output of one row without an axis for it": Case(
        [node("Reshape", "x s", "r"), node("Softmax", "r", "y", axis=0)], {"x": [1, 8]}, {"y": [8]},
        [integers("s", 8)], {"x": draw(ROWS, 8)}, {"y": ("batch", 8)}, ("gets one", "row by row"),
    ),
    "an output with time first": Case(
        [node("MatMul", "x w", "a"), node("Transpose", "a", "y", perm=[1, 0, 2])], {"x": ["N", 20, 8]},
        {"y": [20, "N", 4]}, [weights("w", 8, 4)], {"x": draw(ROWS, 20, 8)},
        {"x": ("batch", 20, 8), "y": ("batch", 20, 4)}, ("axis 1 of output 'y'",),
    ),
    "an input with time first": Case(
        LINEAR, {"x": ["T", "N", 8]}, {"y": ["T", "N", 4]}, [weights("w", 8, 4)], {"x": draw(ROWS, 6, 8)},
        {"x": ("batch", "T", 8), "y": ("batch", "T", 4)}, ("axis 1 of input 'x'", "axis 1 of output 'y'"),
    ),
    "a state whose batch is the second axis": Case(
        [node("ReduceSum", "h zero", "s", keepdims=0), node("Add", "x s", "y"), node("Identity", "h", "g")],
        {"x": ["batch", 8], "h": [2, "batch", 8]}, {"y": ["batch", 8], "g": [2, "batch", 8]}, [integers("zero", 0)],
        {"x": draw(ROWS, 8), "h": draw(ROWS, 2, 8)},
        {"h": ("batch", 2, 8), "g": ("batch", 2, 8)}, ("axis 1 of input 'h'", "axis 1 of output 'g'"),
    ),
    "a fixed state whose batch is the second axis": Case(
        [node("ReduceSum", "h zero", "s", keepdims=0), node("Add", "x s", "y")], {"x": [1, 8], "h": [2, 1, 8]},
        {"y": [1, 8]}, [integers("zero", 0)], {"x": draw(ROWS, 8), "h": draw(ROWS, 2, 8)},
        {"x": ("batch", 8), "h": ("batch", 2, 8)}, ("axis 1 of input 'h'",),
    ),
    "a number that all samples share": Case(
        [node("Cast", "rate", "f", to=T.FLOAT), node("Div", "x f", "y")], {"x": ["N", 8], "rate": []},
        {"y": ["N", 8]}, [], {"x": draw(ROWS, 8), "rate": np.full(ROWS, 16000)}, {"x": ("batch", 8)},
        ("'rate' has one value",), kinds={"rate": T.INT64},
    ),
    "a number from the recipe": Case(
        [node("Cast", "rate", "f", to=T.FLOAT), node("Div", "x f", "y")], {"x": ["N", 8], "rate": []},
        {"y": ["N", 8]}, [], {"x": draw(ROWS, 8)}, {"x": ("batch", 8)}, ("'rate' has one value",),
        recipe={"constants": {"rate": 16000}}, kinds={"rate": T.INT64},
    ),
    "a vector that all samples share": Case(
        [node("Mul", "x scale", "y")], {"x": ["N", 8], "scale": [8]}, {"y": ["N", 8]}, [],
        {"x": draw(ROWS, 8), "scale": np.repeat(draw(1, 8), ROWS, axis=0)}, {"x": ("batch", 8)},
        ("'scale' has one value",),
    ),
    "axes from the recipe": Case(
        LINEAR, {"x": ["a", "c", 8]}, {"y": ["a", "c", 4]}, [weights("w", 8, 4)], {"x": draw(ROWS, 6, 8)},
        {"x": ("batch", "time", 8)},
        recipe={"inputs": [{"name": "x", "dtype": "float32", "shape": ["time", "batch", 8]}]},
    ),
    "sides that must be multiples of 4": Case(
        [node("Conv", "x k", "a", strides=[2, 2], pads=[1] * 4), node("Conv", "a l", "b", strides=[2, 2], pads=[1] * 4),
         node("Resize", "b roi four", "u", mode="nearest"), node("Add", "x u", "y")],
        {"x": ["N", 3, "H", "W"]}, {"y": ["N", 3, "H", "W"]},
        [weights("k", 4, 3, 3, 3), weights("l", 3, 4, 3, 3), nh.from_array(np.empty(0, np.float32), "roi"),
         nh.from_array(np.array([1, 1, 4, 4], np.float32), "four")],
        {"x": draw(ROWS, 3, 16, 24)}, {"x": ("batch", 3, 16, 24), "y": ("batch", 3, 16, 24)},
    ),
    "an axis that is free": Case(
        LINEAR, {"x": ["N", "T", 8]}, {"y": ["N", "T", 4]}, [weights("w", 8, 4)], {"x": draw(ROWS, 6, 8)},
        {"x": ("batch", "T", 8), "y": ("batch", "T", 4)},
    ),
    "samples of several shapes": Case(
        LINEAR, {"x": ["N", "T", 8]}, {"y": ["N", "T", 4]}, [weights("w", 8, 4)],
        {"x": draw(120), "x_shapes": np.array([[5, 8], [4, 8], [6, 8]])},
        {"x": ("batch", "T", 8), "y": ("batch", "T", 4)},
    ),
    "samples that are joined": Case(
        LINEAR, {"x": ["N", "T", 8]}, {"y": ["N", "T", 4]}, [weights("w", 8, 4)],
        {"x": draw(15, 8), "x_offsets": np.array([0, 5, 9, 15])}, {"x": ("batch", "T", 8)},
    ),
    "truth values": Case(
        [node("Cast", "m", "f", to=T.FLOAT), node("Mul", "x f", "y")], {"x": ["N", 8], "m": ["N", 8]},
        {"y": ["N", 8]}, [], {"x": draw(ROWS, 8), "m": draw(ROWS, 8) > 0}, {"m": ("batch", 8)}, kinds={"m": T.BOOL},
    ),
    "ids of a table": Case(
        [node("Gather", "e x", "g"), node("MatMul", "g w", "y")], {"x": ["N", "T"]}, {"y": ["N", "T", 4]},
        [weights("e", 300, 8), weights("w", 8, 4)], {"x": RNG.integers(0, 300, (ROWS, 7))}, {"x": ("batch", "T")},
        kinds={"x": T.INT64},
    ),
    "ids as fractions, as Keras writes them": Case(
        [node("Cast", "x", "i", to=T.INT64), node("Gather", "e i", "g"), node("MatMul", "g w", "y")],
        {"x": ["N", "T"]}, {"y": ["N", "T", 4]}, [weights("e", 10, 8), weights("w", 8, 4)],
        {"x": RNG.integers(0, 10, (ROWS, 7)).astype(np.float32)}, {"x": ("batch", "T")},
    ),
    "lengths, of which 0 gives NaN": Case(
        [node("Cast", "n", "f", to=T.FLOAT), node("Unsqueeze", "f one", "u"), node("ReduceSum", "x one", "s"),
         node("Div", "zeros u", "q"), node("Add", "s q", "y")],
        {"x": ["N", 8], "n": ["N"]}, {"y": ["N", 1]},
        [integers("one", 1), nh.from_array(np.zeros(1, np.float32), "zeros")],
        {"x": draw(ROWS, 8), "n": RNG.integers(1, 9, ROWS)}, {"n": ("batch",)}, kinds={"n": T.INT64},
    ),
    "a logarithm of counts": Case(
        [node("Log", "x", "l"), node("MatMul", "l w", "y")], {"x": ["N", 8]}, {"y": ["N", 4]}, [weights("w", 8, 4)],
        {"x": np.abs(draw(ROWS, 8)) + 1}, {"x": ("batch", 8)},
    ),
    "several outputs, one through which a tensor passes": Case(
        [node("MatMul", "x w", "a"), node("Softmax", "a", "s", axis=-1), node("Identity", "s", "y")],
        {"x": ["N", 8]}, {"y": ["N", 4], "s": ["N", 4]}, [weights("w", 8, 4)], {"x": draw(ROWS, 8)},
        {"y": ("batch", 4), "s": ("batch", 4)},
    ),
    "an output that no sample changes": Case(
        [node("MatMul", "x w", "y"), node("Identity", "w", "z")], {"x": ["N", 8]}, {"y": ["N", 4], "z": [8, 4]},
        [weights("w", 8, 4)], {"x": draw(ROWS, 8)}, {"y": ("batch", 4)}, ("'z' does not depend",),
    ),
    "a branch": Case(
        [node("ReduceSum", "x", "t", keepdims=0), node("Greater", "t zero", "c"),
         h.make_node("If", ["c"], ["b"],
                     then_branch=branch("Mul", "p"), else_branch=branch("Sub", "q")),
         node("MatMul", "b w", "y")],
        {"x": ["N", 8]}, {"y": ["N", 4]},
        [weights("w", 8, 4), nh.from_array(np.float32(0), "zero"), nh.from_array(np.float32(2), "two")],
        {"x": draw(ROWS, 8)}, {"x": ("batch", 8)},
    ),
    "weights in half precision": Case(
        [node("Cast", "x", "f", to=T.FLOAT16), node("MatMul", "f w", "a"), node("Cast", "a", "y", to=T.FLOAT)],
        {"x": ["N", 8]}, {"y": ["N", 4]}, [nh.from_array(draw(8, 4).astype(np.float16), "w")], {"x": draw(ROWS, 8)},
        {"x": ("batch", 8)}, ("half precision",),
    ),
    "inputs in half precision": Case(
        LINEAR, {"x": ["N", 8]}, {"y": ["N", 4]}, [nh.from_array(draw(8, 4).astype(np.float16), "w")],
        {"x": draw(ROWS, 8)}, {"x": ("batch", 8)}, ("half precision",), kinds={"x": T.FLOAT16, "y": T.FLOAT16},
    ),
    "doubles": Case(
        LINEAR, {"x": ["N", 8]}, {"y": ["N", 4]}, [nh.from_array(draw(8, 4).astype(np.float64), "w")],
        {"x": draw(ROWS, 8).astype(np.float64)}, {"x": ("batch", 8)}, kinds={"x": T.DOUBLE, "y": T.DOUBLE},
    ),
    **{
        f"a Softmax of opset {opset}": Case(
            [node("MatMul", "x w", "a"), node("Softmax", "a", "s", axis=1), node("Identity", "s", "y")],
            {"x": ["N", 3, 8]}, {"y": ["N", 3, 4]}, [weights("w", 8, 4)], {"x": draw(ROWS, 3, 8)},
            {"y": ("batch", 3, 4)}, opset=opset,
        )
        for opset in (7, 9, 11, 12, 13, 18, 21, 24)
    },
}  # fmt: skip


def write_case(case, folder):
    """Write the model and the samples of a case; returns their paths."""
    infos = {
        place: [h.make_tensor_value_info(name, case.kinds.get(name, T.FLOAT), shape) for name, shape in part.items()]
        for place, part in (("inputs", case.inputs), ("outputs", case.outputs))
    }
    graph = h.make_graph(case.nodes, "g", infos["inputs"], infos["outputs"], case.initializers)
    version = 10 if case.opset < 23 else 11
    model = h.make_model(graph, opset_imports=[h.make_opsetid("", case.opset)], ir_version=version)
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "samples.npz", **case.samples)
    return folder / "model.onnx", folder / "samples.npz"


def open_case(case, folder):
    file, samples = write_case(case, folder)
    recipe = Recipe.parse({"source": str(file), "stages": [], **case.recipe})
    return open_source(recipe, Cache(folder / "cache"), trust=False, samples=samples), read(
        samples, _task_of(recipe, folder, samples)
    )


def _task_of(recipe, folder, samples):
    return open_source(recipe, Cache(folder / "cache"), trust=False, samples=samples).task


@pytest.mark.parametrize("name", CASES)
def test_a_file_of_this_convention_is_imported_with_its_own_answers(name, tmp_path):
    case = CASES[name]
    source, dataset = open_case(case, tmp_path)
    found = {spec.name: spec.shape for spec in (*source.graph.inputs, *source.graph.outputs)}
    assert case.shapes.items() <= found.items(), found
    for part in case.notes:
        assert any(part in note for note in source.notes), source.notes
    original, graph = source.open(1), make_runtime("onnxruntime").open(source.graph.path)
    with original, graph:
        expected, answers = (predict(session, source.task, dataset) for session in (original, graph))
    for output, array in expected.items():
        assert len(array) == len(dataset)
        np.testing.assert_allclose(answers[output], array, atol=2e-2 if "half" in name else 1e-5)


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
@pytest.mark.parametrize("name", ["a Reshape by which rows meet", "several outputs, one through which a tensor passes"])
def test_each_engine_answers_in_rows_and_by_the_names_of_the_file(name, engine, tmp_path):
    source, dataset = open_case(CASES[name], tmp_path)
    original, session = source.open(1), make_runtime(engine).open(source.graph.path)
    with original, session:
        expected, answers = (predict(each, source.task, dataset) for each in (original, session))
    assert answers.keys() == expected.keys()
    for output, array in expected.items():
        np.testing.assert_allclose(answers[output], array, atol=1e-4)


REFUSED = {
    "a batch of two": (linear([2, 8]), "dynamic batch"),
    "a number without a value": (
        Case([node("Mul", "x s", "y")], {"x": ["N", 8], "s": []}, {"y": ["N", 8]}, [], {"x": draw(ROWS, 8)}, {}),
        r"constants: \{s: 1\}",
    ),
    "a constant that is no input": (linear(["N", 8], recipe={"constants": {"z": 1}}), "no input 'z'"),
    "a constant of another shape": (
        Case(
            [node("Mul", "x s", "y")], {"x": ["N", 8], "s": [8]}, {"y": ["N", 8]}, [], {"x": draw(ROWS, 8)}, {},
            recipe={"constants": {"s": [1, 2]}},
        ),
        "has shape",
    ),
    "texts": (
        Case([node("Identity", "x", "y")], {"x": ["N", 8]}, {"y": ["N", 8]}, [], {"x": draw(ROWS, 8)}, {},
             kinds={"x": T.STRING, "y": T.STRING}),
        "text",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_imported_is_refused_with_what_to_do(name, tmp_path):
    case, expected = REFUSED[name]
    with pytest.raises(SourceError, match=expected):
        open_case(case, tmp_path)


def test_another_value_of_a_constant_is_refused_by_its_row(tmp_path):
    rate = np.full(ROWS, 16000)
    rate[7] = 8000
    case = CASES["a number from the recipe"]
    changed = Case(**{**vars(case), "samples": {**case.samples, "rate": rate}})
    with pytest.raises(DataError, match="row 8: input 'rate' is 8000"):
        open_case(changed, tmp_path)


@pytest.mark.parametrize(
    ("arrays", "expected"),
    [
        ({"x": draw(40), "x_shapes": np.array([[2, 8], [4, 8]])}, "x_shapes"),
        ({"x": draw(5, 8), "x_offsets": np.array([0, 2, 4])}, "x_offsets"),
        ({"x": draw(5, 8), "x_offsets": np.array([0, 4, 2, 5])}, "x_offsets"),
        ({"x": np.float32(3)}, "no samples"),
    ],
)
def test_samples_that_do_not_divide_are_refused_by_name(arrays, expected, tmp_path):
    case = CASES["samples of several shapes"]
    with pytest.raises(DataError, match=expected):
        open_case(Case(**{**vars(case), "samples": arrays}), tmp_path)


@pytest.mark.parametrize("names", [("x",), ("x", "h")])
def test_a_folder_of_npy_files_holds_samples_of_any_shape(names, tmp_path):
    case = CASES["an axis that is free"] if len(names) == 1 else CASES["a state whose batch is the second axis"]
    file, _ = write_case(case, tmp_path)
    shapes = {"x": (8,), "h": (2, 8)} if len(names) > 1 else {"x": (5, 8)}
    for name in names:
        folder = tmp_path / "rows" / name if len(names) > 1 else tmp_path / "rows"
        folder.mkdir(parents=True)
        for row in range(3):
            np.save(folder / f"{row}.npy", draw(*shapes[name]))
    recipe = Recipe.parse({"source": str(file), "stages": []})
    source = open_source(recipe, Cache(tmp_path / "cache"), trust=False, samples=Path(tmp_path / "rows"))
    assert len(read(tmp_path / "rows", source.task)) == 3
