"""What is loaded is never executed: every field of an artifact, a recipe or a checkpoint that could name code."""

import copy
import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from artifacts import embedding_task, write_artifact
from models import Perceptron
from onnx import TensorProto, helper
from safetensors.numpy import save_file
from safetensors.torch import save_file as save_torch

from laconic.artifacts.manifest import GOLDEN, MANIFEST, MEASURED, MODEL
from laconic.cache import VARIABLE
from laconic.errors import LaconicError, RuntimeFailure, UsageError
from laconic.hashing import digest_file, seal, unseal
from laconic.models.checkpoint import CARD
from laconic.models.source_loading import load_source
from laconic.runtimes.runtime import make_runtime
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tensor import TensorSpec
from serve.model_repository.loader import open_models
from serve.settings.server_settings import Settings

HERE = Path(__file__).parent
ADDRESS = "trap:spring"
OTHERS = ("os:system", None, -1, 1e308, [], {}, [ADDRESS], {ADDRESS: ADDRESS}, True, 10**15)


@pytest.fixture(autouse=True)
def trap(tmp_path, monkeypatch):
    """A module that leaves a file when it is imported, and the file."""
    sprung = tmp_path / "sprung"
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "trap.py").write_text(
        f"import pathlib\npathlib.Path({str(sprung)!r}).touch()\n"
        f"def spring(*args, **kwargs):\n    pathlib.Path({str(sprung)!r}).touch()\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "code")
    yield sprung
    sys.modules.pop("trap", None)


@pytest.fixture
def laconic(laconic, tmp_path, monkeypatch):
    """Run the command with an empty cache: exit code, standard error. A traceback fails the test."""
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    monkeypatch.chdir(HERE)
    return lambda *arguments: laconic(*arguments)[::2]


def write_embedder(path):
    """An artifact of texts with every file that a task can bring, run by the fake engine."""
    task = embedding_task()
    write_artifact(path, assets=task.assets(), factor=2, input="input_ids", output="embedding")
    ids = np.array([[2, 3, 4]])
    save_file({"0.input.input_ids": ids, "0.output.embedding": 2 * ids}, path / GOLDEN)
    manifest = unseal(path / MANIFEST)
    manifest |= {
        "task": "text-embedding",
        "inputs": [task.inputs[0].model_dump(mode="json")],
        "outputs": [task.inputs[0].model_dump(mode="json") | {"name": "embedding"}],
        "source": {"kind": "builder", "builder": "models:Perceptron", "arguments": {"widths": [3, 3]}},
        "history": [{"stage": "quantize.static", "config": {"method": "minmax"}, "key": "k", "figures": {"bytes": 1}}],
        "recipe": {"source": "m", "stages": ["quantize.static"], "goal": {"fidelity": 0.9}},
        "precision": {"layer": "int8"},
        "data": {"calibrate": "f" * 32},
        "licence": "mit",
    }
    manifest["files"][GOLDEN] = digest_file(path / GOLDEN).model_dump()
    (path / MANIFEST).write_bytes(seal(manifest))
    return path


def serve(path):
    """Open an artifact as the server does; returns the error, or ""."""
    try:
        for model in open_models({"model": path}, Settings(unproven=True)):
            model.close()
    except LaconicError as error:
        return str(error)
    return ""


def places(content, at=()):
    """The path of every value in JSON."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (*at, key)
        if isinstance(value, (dict, list)):
            yield from places(value, (*at, key))


def replaced(content, at, value):
    """The same JSON with another value at this place."""
    content = copy.deepcopy(content)
    inner = content
    for key in at[:-1]:
        inner = inner[key]
    inner[at[-1]] = value
    return content


def rewrite(path, name, content):
    """Write a JSON file of an artifact, and seal the artifact, as whoever crafts one would."""
    if name in (MANIFEST, MEASURED):
        (path / name).write_bytes(seal(content))
        return
    (path / name).write_text(json.dumps(content))
    manifest = unseal(path / MANIFEST)
    manifest["files"][name] = digest_file(path / name).model_dump()
    (path / MANIFEST).write_bytes(seal(manifest))


def write_classifier(path):
    """An artifact of images, with the names of its classes."""
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", 3, 4, 4))
    task = ImageClassification((spec,), preprocess=ImagePreprocess(resize=(4, 4)), labels=("dark", "light"))
    write_artifact(path, assets=task.assets(), factor=1)
    x = np.ones((1, 3, 4, 4), np.float32)
    save_file({"0.input.x": x, "0.output.y": x}, path / GOLDEN)
    plain = spec.model_dump(mode="json")
    manifest = unseal(path / MANIFEST) | {
        "task": task.name, "inputs": [plain], "outputs": [plain | {"name": "y"}]
    }  # fmt: skip
    manifest["files"][GOLDEN] = digest_file(path / GOLDEN).model_dump()
    (path / MANIFEST).write_bytes(seal(manifest))
    return path


def write_portable(path):
    """An artifact with a second placement."""
    write_artifact(path)
    manifest = unseal(path / MANIFEST)
    other = {"runtime": "fake", "compute": "float32", "precision": {"layer": "int8"}, "model": MODEL, "golden": GOLDEN}
    alternatives = [other | {"verdict": manifest["verdict"]}]
    (path / MANIFEST).write_bytes(seal(manifest | {"format": 2, "alternatives": alternatives}))
    return path


def hostile():
    """Make a function that returns the values for one place: the address, and the next of the others."""
    others = itertools.cycle(OTHERS)
    return lambda: (ADDRESS, next(others))


def crafted(path, name, root=None):
    """Put hostile values at every place of a file; yields what was changed. root: the key whose values are changed,
    without what is inside of a verdict: it is of the same form wherever it stands."""
    values = hostile()
    files = {each.name: each.read_bytes() for each in path.iterdir()}
    content = unseal(path / name) if name in (MANIFEST, MEASURED) else json.loads(files[name])
    for at in places(content):
        for value in values() if root is None or (at[0] == root and "verdict" not in at[:-1]) else ():
            rewrite(path, name, replaced(content, at, value))
            yield at, value
            for each, before in files.items():
                (path / each).write_bytes(before)


@pytest.mark.parametrize(
    ("write", "name", "root"),
    [
        *((write_embedder, name, None) for name in (MANIFEST, MEASURED, MODEL, "tokenizer.json", "preprocess.json")),
        *((write_classifier, name, None) for name in ("preprocess.json", "labels.json")),
        (write_portable, MANIFEST, "alternatives"),
    ],
)
def test_no_value_in_an_artifact_runs_code_or_gives_a_traceback(write, name, root, tmp_path, laconic, trap):
    path = write(tmp_path / "crafted.laconic")
    commands = (("inspect", path), ("verify", path), ("compare", path, path))
    turns = itertools.cycle((*commands, ()))
    count = 0
    for what in crafted(path, name, root):
        # Each address is served, and goes through every command up to one that refuses it; other values take turns.
        turn = () if what[1] == ADDRESS else next(turns)
        for command in commands if what[1] == ADDRESS else filter(None, [turn]):
            code, err = laconic(*command)
            assert code in (0, 1, 2, 3), (what, command)
            assert err.count("\n") == (code != 0), (what, command, err)
            if code == UsageError.exit_code:
                break
        if not turn:
            assert "\n" not in serve(path), what
        count += 1
    assert count >= 4
    assert "trap" not in sys.modules
    assert not trap.exists()


@pytest.fixture
def checkpoint(tmp_path):
    """A checkpoint of the user's own module, pruned by nothing, saved."""
    weights = tmp_path / "net.safetensors"
    save_torch(Perceptron([6, 8, 3]).state_dict(), weights)
    load_source(weights, builder="models:Perceptron", arguments={"widths": [6, 8, 3]}).save(tmp_path / "saved")
    return tmp_path / "saved"


def test_no_value_in_a_checkpoint_runs_code_or_gives_a_traceback(checkpoint, laconic, trap):
    card = unseal(checkpoint / CARD)
    card["history"] = [{"stage": "quantize.static", "config": {"criterion": "magnitude"}, "key": "k", "figures": {}}]
    values = hostile()
    plan, export = ("plan", checkpoint, "--memory", "1GiB"), ("export", checkpoint, "-o", checkpoint / "out")
    verbs = itertools.cycle((plan, export))
    for at in places(card):
        for value in values():
            (checkpoint / CARD).write_bytes(seal(replaced(card, at, value)))
            for verb in itertools.islice(verbs, 2 if value == ADDRESS else 1):
                code, err = laconic(*verb)
                assert code in (1, 2), (at, value, verb)
                assert err.splitlines()[-1].startswith("laconic: "), (at, value, verb, err)
    assert "trap" not in sys.modules
    assert not trap.exists()


NET = "source: {source}\ninputs: [{{name: x, dtype: float32, shape: [batch, 6]}}]\n"


@pytest.mark.parametrize(
    "text",
    [
        "stages: ['trap:spring']",
        "stages: [{'trap:spring': {size: 1}}]",
        "stages: [{prune.ffn: {keep: 0.5, criterion: 'trap:spring'}}]",
        "stages: [{distill.heal: {optimizer: 'trap:spring'}}]",
        "stages: [{distill.heal: {schedule: 'trap:spring'}}]",
        "stages: [{distill.heal: {techniques: ['trap:spring']}}]",
        "stages: [prune.ffn]\nheal: {optimizer: 'trap:spring'}",
        "builder: trap:spring",
    ],
)
def test_a_recipe_that_names_code_needs_trust(text, checkpoint, laconic, trap, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(NET.format(source=checkpoint.parent / "net.safetensors") + text)
    code, err = laconic("compress", "--recipe", recipe, "--data", recipe, "-o", tmp_path / "out")
    assert code == 2
    assert "trap:spring" in err
    assert "--trust" in err
    assert err.count("\n") == 1
    assert not trap.exists()
    laconic("compress", "--recipe", recipe, "--data", recipe, "-o", tmp_path / "out", "--trust")
    assert trap.exists()


@pytest.mark.parametrize("field", ["task", "target", "runtimes", "to"])
def test_an_address_is_no_value_of_the_other_fields_of_a_recipe(field, laconic, trap, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    value = ADDRESS if field != "runtimes" else f"[{ADDRESS}]"
    recipe.write_text(f"source: net.safetensors\n{field}: {value}")
    code, err = laconic("compress", "--recipe", recipe, "-o", tmp_path / "out", "--trust")
    assert code == 2
    assert "trap:spring" in err
    assert not trap.exists()


@pytest.mark.parametrize(
    "text",
    ["optimizer: 'trap:spring'", "schedule: 'trap:spring'", "techniques: ['trap:spring']", "builder: trap:spring"],
)
@pytest.mark.parametrize("verb", ["finetune", "plan"])
def test_a_training_recipe_that_names_code_needs_trust(verb, text, laconic, trap, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"source: net.safetensors\ndata: data.npz\n{text}")
    given = ["-o", tmp_path / "out"] if verb == "finetune" else ["--memory", "1GiB"]
    source = [tmp_path] if verb == "plan" else []
    code, err = laconic(verb, *source, "--recipe", recipe, *given)
    assert code == 2
    assert "trap:spring" in err
    assert "--trust" in err
    assert not trap.exists()


def test_the_builder_of_an_artifact_is_never_called(tmp_path, laconic, trap):
    path = write_embedder(tmp_path / "crafted.laconic")
    content = unseal(path / MANIFEST)
    weights = tmp_path / "net.safetensors"
    save_torch(Perceptron([3, 3]).state_dict(), weights)
    source = {"kind": "builder", "builder": ADDRESS, "arguments": {"command": "x"}}
    rewrite(path, MANIFEST, content | {"source": source})
    code, err = laconic("bench", path, "--original", weights)
    assert (code, "--builder" in err) == (2, True)
    code, err = laconic("bench", path, "--original", weights, "--trust")
    assert (code, "--builder" in err) == (2, True)
    code, err = laconic("bench", path, "--original", weights, "--builder", "models:Perceptron")
    assert (code, "--trust" in err) == (2, True)
    assert not trap.exists()


def write_graph(path, location):
    """A graph that adds a weight, which is in another file."""
    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": "0", "length": "16"}.items():
        weight.external_data.add(key=key, value=value)
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", 4]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Add", ["x", "w"], ["y"])], "g", ends[:1], ends[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    path.write_bytes(model.SerializeToString())


@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_a_graph_reads_no_file_outside_its_folder(engine, tmp_path):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(np.arange(4, dtype=np.float32).tobytes())
    folder = tmp_path / "crafted.laconic"
    folder.mkdir()
    (folder / "weights.bin").write_bytes(secret.read_bytes())
    write_graph(folder / MODEL, "weights.bin")
    with make_runtime(engine).open(folder / MODEL) as session:
        assert session.run({"x": np.zeros((1, 4), np.float32)})["y"].tolist() == [[0, 1, 2, 3]]
    for location in ("../secret.bin", str(secret)):
        write_graph(folder / MODEL, location)
        with pytest.raises(RuntimeFailure, match=engine):
            make_runtime(engine).open(folder / MODEL)
