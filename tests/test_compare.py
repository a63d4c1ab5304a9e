"""Two artifacts side by side."""

import json

import numpy as np
import pytest
from artifacts import FAILED, write_artifact
from test_report import measured

from laconic.artifacts.compare import compare, make_rows
from laconic.artifacts.manifest import MANIFEST, MEASURED
from laconic.artifacts.record import Record
from laconic.errors import ArtifactError, DataError, UsageError
from laconic.hashing import seal, unseal


def change(path, **changes):
    """Write an artifact's manifest anew."""
    (path / MANIFEST).write_bytes(seal(unseal(path / MANIFEST) | changes))
    return path


@pytest.fixture
def pair(tmp_path):
    one = write_artifact(tmp_path / "one.laconic")
    two = write_artifact(tmp_path / "two.laconic", verdict=FAILED, factor=2.5)
    record = Record(stage="quantize.static", config={"method": "mse", "samples": 9}, key="k").model_dump(mode="json")
    change(one, history=[record], recipe={"seed": 0, "goal": {"fidelity": 0.99}})
    other = record | {"config": {"method": "minmax", "samples": 9}}
    change(two, history=[other], recipe={"seed": 1, "goal": {}}, precision={"a": "int8", "b": "int8"})
    report = unseal(one / MEASURED)["report"]
    (one / MEASURED).write_bytes(seal(measured().model_dump(mode="json") | {"report": report}))
    return one, two


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "data.npz"
    np.savez(path, x=np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32))
    return path


def test_what_each_is_stands_side_by_side_in_the_table_too(pair):
    found = compare(*pair)
    one, two = found["a"], found["b"]
    assert (one["name"], two["name"]) == ("one", "two")
    assert (one["verdict"], two["verdict"]) == ("passed", "failed")
    assert one["latency"] == pytest.approx(0.003)
    assert one["speedup"] == 3.0
    assert two["latency"] is None, "it was never timed"
    assert two["layers"] == {"int8": 2}
    assert one["stages"] == ["quantize.static"]
    json.dumps(found)
    rows = {name: (one, two) for name, one, two in make_rows(compare(*pair))}
    assert rows["latency, one sample"] == ("3.00 ms", "")
    assert rows["verdict"] == ("passed", "failed")
    assert rows["layers"][1] == "2 int8"


def test_every_setting_that_differs_is_named_and_no_other(pair):
    differ = {each["setting"]: (each["a"], each["b"]) for each in compare(*pair)["differ"]}
    assert differ == {"quantize.static, method": ("mse", "minmax"), "goal.fidelity": (0.99, None), "seed": (0, 1)}


def test_a_stage_that_only_one_went_through_is_a_row_with_what_was_asked_of_it(pair):
    record = unseal(pair[0] / MANIFEST)["history"][0]
    healed = record | {"stage": "distill.heal", "config": {"steps": 5, "batch_size": 32}}
    recipe = {"seed": 0, "goal": {}, "stages": [{"name": "distill.heal", "config": {"steps": 5}}]}
    change(pair[0], history=[healed, healed, record], recipe=recipe)
    differ = {each["setting"]: (each["a"], each["b"]) for each in compare(*pair)["differ"]}
    assert differ["distill.heal"] == ({"steps": 5}, None)
    assert differ["distill.heal (2)"] == ("as it is by default", None)
    assert differ["quantize.static, method"] == ("mse", "minmax"), (
        "it is the third stage of the one, the first of the other"
    )


def test_an_artifact_does_not_differ_from_itself_and_both_are_asked_the_same_samples(pair, data):
    found = compare(pair[0], pair[0], data)
    assert found["differ"] == []
    assert found["agreement"] == pytest.approx({"samples": 20, "fidelity": 1.0, "fidelity_worst": 1.0})
    change(pair[1], verdict=unseal(pair[0] / MANIFEST)["verdict"])
    found = compare(*pair, data)["agreement"]
    assert found["samples"] == 20
    assert 0 < found["fidelity_worst"] <= found["fidelity"] <= 1


def test_bad_input_is_answered_with_a_sentence(pair, data, tmp_path):
    with pytest.raises(ArtifactError, match=r"holds no manifest\.json"):
        compare(pair[0], tmp_path / "nowhere")
    with pytest.raises(DataError):
        compare(*pair, tmp_path / "none.npz")
    outputs = unseal(pair[0] / MANIFEST)["outputs"]
    change(pair[1], outputs=[{**outputs[0], "shape": ["batch", "width"]}])
    with pytest.raises(UsageError, match=r"they cannot be compared\. Leave out --data"):
        compare(*pair, data)
    change(pair[1], task="text-generation")
    with pytest.raises(UsageError, match="Give two artifacts of one task"):
        compare(*pair)
