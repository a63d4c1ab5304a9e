"""End to end on an NVIDIA GPU: placed graphs against reference execution, the engine cache, tuning, and the memory of a
training step against its plan. Skipped without a GPU; `make gpu` runs them where there is one.
"""

import logging

import digits
import numpy as np
import pytest
import torch
from captured import inputs
from test_place import plan_of
from transformers import GPT2Config

import export.candidates.engine_option
from compress.pipeline import compress
from export.candidates.audit import audit
from export.candidates.engine_option import EngineOption
from export.candidates.reference import open_reference
from laconic.artifacts.bench import tune
from laconic.artifacts.golden import GOLDEN_FLOOR
from laconic.cache import Cache
from laconic.errors import MissingPackage
from laconic.metrics import cosine
from laconic.models import huggingface, wrappers
from laconic.models.model_folder import read_source_json
from laconic.progress import Steps
from laconic.recipes.recipe import Recipe
from laconic.runtimes.engine_store import ENGINE, FOLDER
from laconic.runtimes.runtime import make_runtime
from train.planner.device_rates import measure_rates
from train.planner.meta_model import CONFIG, open_meta_model
from train.planner.prediction import predict
from train.settings import Training
from train.step.train_step import train_step
from train.step_assembly import make_step_parts

pytestmark = pytest.mark.gpu

LEAST = {"float32": 0.9995, "int8": 0.98, "float8": 0.98}
"""Cosine similarity with reference execution, by the precision of the plan: the same graph in other kernels."""
WORKSPACES = 64 * 2**20
"""Bytes that cuBLAS may take from PyTorch's allocator; the plan does not know of them."""


def require(engine):
    """The engine; the test is skipped where it is missing."""
    try:
        return make_runtime(engine)
    except MissingPackage as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("name", ["residual", "bert", "vit"])
@pytest.mark.parametrize(
    ("engine", "compute", "precision"),
    [
        ("onnxruntime-cuda", "float16", "float32"),
        ("onnxruntime-cuda", "bfloat16", "float32"),
        ("tensorrt", "float16", "float32"),
        ("tensorrt", "bfloat16", "float32"),
        ("tensorrt", "float16", "int8"),
        ("tensorrt", "float16", "float8"),
    ],
)
def test_a_placed_graph_answers_as_by_reference_execution(zoo, tmp_path, name, engine, compute, precision):
    require(engine)
    if precision == "float8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 needs compute capability 8.9")
    checkpoint, graph, ranges = zoo(name)
    path = tmp_path / "model.onnx"
    option = EngineOption(engine, compute)
    option.build(graph, plan_of(graph, ranges, precision), path)
    batch = inputs(checkpoint, 3, 9, seed=99)
    with open_reference(path) as reference, option.open(path, 1) as session:
        expected, found = reference.run(batch), session.run(batch)
    for output, array in expected.items():
        assert cosine(array, found[output]).min() > LEAST[precision], output


@pytest.mark.parametrize("name", ["residual", "bert", "vit"])
def test_what_was_asked_to_run_in_int8_does_in_tensorrt(zoo, tmp_path, name):
    require("tensorrt")
    checkpoint, graph, ranges = zoo(name)
    option = EngineOption("tensorrt", "float16")
    plan = plan_of(graph, ranges, "int8")
    option.build(graph, plan, tmp_path / "model.onnx")
    with option.open(tmp_path / "model.onnx", 1) as session:
        session.run(inputs(checkpoint, 2, 8))
        shares = audit(graph, option.adapt(graph, plan), session.kernels(), option.name)
    assert shares.get("int8", 0) > 0.9, shares


def test_an_engine_is_built_once_and_again_when_its_file_is_damaged(zoo, tmp_path, caplog):
    engine = type(require("tensorrt"))(cache=Cache(tmp_path / "cache"))
    checkpoint, graph, ranges = zoo("residual")
    path = tmp_path / "model.onnx"
    EngineOption("tensorrt", "float16").build(graph, plan_of(graph, ranges, "int8"), path)
    batch = inputs(checkpoint, 2, 8)

    def answer():
        with engine.open(path) as session:
            return next(iter(session.run(batch).values()))

    first = answer()
    (stored,) = (tmp_path / "cache" / FOLDER).glob(f"*{ENGINE}")
    made = stored.stat().st_mtime_ns
    assert np.array_equal(answer(), first)
    assert stored.stat().st_mtime_ns == made
    stored.write_bytes(stored.read_bytes()[:-100])
    with caplog.at_level(logging.WARNING):
        assert cosine(first, answer()).min() > 0.999
    assert "made again" in caplog.text
    assert stored.stat().st_mtime_ns != made


@pytest.mark.parametrize(("target", "engine"), [("cuda", "onnxruntime-cuda"), ("tensorrt", "tensorrt")])
def test_tuning_completes_an_artifact_that_reference_execution_proved(target, engine, tmp_path, monkeypatch):
    require(engine)
    weights, data = digits.write(tmp_path)
    given = {"source": str(weights), "builder": "digits:DigitsNet", "data": str(data), "target": target}

    def refuse(name):
        raise MissingPackage(f"{name} is left out of this test")

    with monkeypatch.context() as patch:
        patch.setattr(export.candidates.engine_option, "make_runtime", refuse)
        cache = Cache(tmp_path / "cache")
        made = compress(Recipe.parse(given), tmp_path / "d.laconic", cache=cache, steps=Steps(quiet=True)).artifact
    assert made.measured.timings == ()
    tuned = tune(made.path, steps=Steps(quiet=True))
    assert {each.batch for each in tuned.measured.timings} >= {1, 8}
    placement = tuned.manifest.placements[0]
    with tuned.open(placement.runtime) as session:
        assert min(tuned.measure_golden_agreement(session, placement).values()) >= GOLDEN_FLOOR


@pytest.mark.parametrize(
    "techniques", [(), ("sdpa", "gradient-checkpointing"), ("sdpa", "chunked-cross-entropy", "bf16")]
)
def test_the_peak_of_a_training_step_is_that_of_the_plan(techniques, tmp_path):
    device = torch.device("cuda")
    config = GPT2Config(
        n_embd=512, n_layer=6, n_head=8, vocab_size=16384, n_positions=512, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, architectures=["GPT2LMHeadModel"],
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    source = huggingface.describe_source(tmp_path, read_source_json(tmp_path / CONFIG), "text-generation")
    model = open_meta_model(tmp_path, task="text-generation")
    training = Training.model_validate({"batch_size": 8, "techniques": techniques, "max_grad_norm": 1.0})
    expected = predict(model, training, 512, measure_rates(device)).peak
    before = torch.cuda.memory_allocated()
    objective = model.objective()
    state = make_step_parts(wrappers.build(source), objective, training.components(), device).assemble()
    batch = {name: tensor.to(device) for name, tensor in objective.make_example(8, 512).items()}
    torch.cuda.reset_peak_memory_stats()
    for _ in range(2):
        train_step(state, batch, max_grad_norm=1.0)
    found = torch.cuda.max_memory_allocated() - before
    assert abs(found - expected) < 0.1 * expected + WORKSPACES, (found, expected)
