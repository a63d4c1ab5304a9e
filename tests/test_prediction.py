"""What is predicted of a step is what it takes: by tracking real tensors, by torch's allocator, and of deep models
by the line through two shallow ones."""

import json
import runpy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from laconic.cache import Cache
from laconic.config import NamedSettings
from laconic.files import read_json
from laconic.models import huggingface, wrappers
from train.planner import meta_kernels, simulate
from train.planner.device_rates import (
    DeviceRates,
    RateCurve,
    measure_optimizer,
    measure_rates,
)
from train.planner.memory_timeline import AllocationLog
from train.planner.meta_model import MetaModel, open_meta_model
from train.planner.prediction import predict
from train.planner.simulate import STEPS, AllocationTracker, Prepare, make_fake_mode, trace_memory
from train.planner.stage_simulation import trace_structure
from train.settings import Training
from train.step.objective import Batch
from train.step.train_state import TrainState
from train.step_assembly import make_step_parts

CPU = torch.device("cpu")
ALLOCATOR = runpy.run_path(str(Path(__file__).parents[1] / "benchmarks" / "allocator.py"))
CURVE = RateCurve(amounts=(1.0, 2.0), seconds=(1.0, 2.0))
RATES = DeviceRates(name="none", kind="cpu", products={"float32": CURVE, "bfloat16": CURVE}, passes=CURVE, copies=CURVE)
ROWS, LENGTH = 6, 24
SMALL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

SPARING = ("sdpa", "chunked-cross-entropy", "gradient-checkpointing")
COMBINATIONS: list[tuple[tuple[Any, ...], Any]] = [
    ((), "adamw"),
    ((), {"adamw": {"implementation": "foreach"}}),
    (("bf16", "gradient-checkpointing"), "adamw-8bit"),
    (("sdpa", "optimizer-in-backward"), "adamw"),
    (({"gradient-accumulation": {"rows": 2}},), {"sgd": {"momentum": 0.9}}),
    (({"layerwise": {"rows": 2, "snapshots_on": "host"}}, "host-weights"), "adamw"),
    (({"activation-offload": {"min_bytes": 1024}},), "lion"),
    (({"activation-offload": {"min_bytes": 1024, "destination": "disk"}},), "adamw"),
]
TEXT = [
    ((*SPARING, {"gradient-accumulation": {"rows": 2}}), "adamw"),
    (("lora",), "adamw"),
    (("qlora",), "adamw"),
]

FP32 = [COMBINATIONS[0], COMBINATIONS[4], COMBINATIONS[6], TEXT[0], TEXT[2]]
"""Products in BF16 take scratch of their own on a processor, which in so small a model is not small."""
HOSTED = ({"layerwise": {"rows": 2, "snapshots_on": "host"}}, {"host-weights": {"dtype": "fp32"}})
CHUNKED: list[tuple[tuple[Any, ...], Any]] = [
    (("sdpa", *others, {"chunked-cross-entropy": {"chunk": 32, "defer": defer}}), "adamw")
    for others, defer in (
        ((), False),
        ((), True),
        (HOSTED, True),
        (({"activation-offload": {"min_bytes": 1024}},), False),
    )
]
"""Several chunks a step, of which one is simulated."""
DEEP = [COMBINATIONS[2], COMBINATIONS[5]]


def sweep(*cases: tuple[Any, ...]) -> list[Any]:
    """Cases of which `make test` has others with the same operations, as parameters of a test."""
    return [pytest.param(*case, marks=pytest.mark.sweep) for case in cases]


def config(kind: str, layers: int, words: int) -> tuple[Any, str]:
    """A tiny config, and what it is for."""
    wide = {"hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 256}
    if kind == "gpt2":
        made = transformers.GPT2Config(
            vocab_size=words, n_embd=64, n_layer=layers, n_head=4, n_positions=64, activation_function="gelu"
        )
        task = "text-generation"
    elif kind == "mixtral":
        made = transformers.MixtralConfig(vocab_size=words, num_local_experts=4, num_key_value_heads=2, **wide)
        task = "text-generation"
    elif kind == "bert":
        made = transformers.BertConfig(vocab_size=words, max_position_embeddings=64, num_labels=3, **wide, **SMALL)
        task = "text-classification"
    else:
        made = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=3, **wide, **SMALL)
        task = "image-classification"
    made.architectures = ["GPT2LMHeadModel"]  # of a config only the kind of model is looked at
    return made, task


def opened(folder: Path, kind: str, layers: int, words: int = 300) -> tuple[MetaModel, dict[str, Any]]:
    """A model without weights, and how to build it with them."""
    made, task = config(kind, layers, words)
    made.save_pretrained(folder)
    return open_meta_model(folder, task=task), huggingface.describe_source(
        folder, read_json(folder / "config.json"), task
    )


def settings(choice: tuple[Any, ...], optimizer: Any) -> Training:
    techniques = tuple(NamedSettings.model_validate(each) for each in choice)
    clip = None if "optimizer-in-backward" in choice else 1.0
    return Training(
        batch_size=ROWS, techniques=techniques, optimizer=NamedSettings.model_validate(optimizer), max_grad_norm=clip
    )


def real(subject: MetaModel, source: dict[str, Any], training: Training) -> Prepare:
    def prepare() -> tuple[TrainState, Batch]:
        torch.manual_seed(0)
        objective = subject.objective()
        module: nn.Module = wrappers.build(source)
        state = make_step_parts(module, objective, training.components(), CPU).assemble()
        batch = objective.make_example(ROWS, LENGTH)
        if "attention_mask" in batch:
            batch["attention_mask"][0, -1] = 0  # without any padding no mask would be made of it
        return state, batch

    return prepare


def most(found: profile, folder: Path) -> int:
    """The most bytes that a profile has seen given out within "steps", beside those of before it."""
    path = folder / "trace.json"
    found.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    (mark,) = (event for event in events if event.get("name") == "steps" and "dur" in event)
    memory = sorted((event for event in events if event.get("name") == "[memory]"), key=lambda event: event["ts"])
    begin = int(memory[0]["args"]["Total Allocated"]) - int(memory[0]["args"]["Bytes"])
    within = [event for event in memory if mark["ts"] <= event["ts"] <= mark["ts"] + mark["dur"]]
    return int(max(event["args"]["Total Allocated"] for event in within)) - begin


@pytest.mark.sweep("*foreach*", "*momentum*")
@pytest.mark.parametrize(
    ("kind", "choice", "optimizer"),
    [("gpt2", *each) for each in COMBINATIONS + TEXT]
    + [("bert", *COMBINATIONS[2]), ("vit", *COMBINATIONS[4]), ("mixtral", *COMBINATIONS[0])]
    + sweep(("bert", *COMBINATIONS[5]), ("vit", *COMBINATIONS[6])),
    ids=str,
)
def test_what_is_predicted_is_what_real_tensors_take(tmp_path, kind, choice, optimizer):
    subject, source = opened(tmp_path, kind, 2)
    training = settings(choice, optimizer)
    states: list[TrainState] = []

    def prepare() -> tuple[TrainState, Batch]:
        state, batch = real(subject, source, training)()
        states.append(state)
        return state, batch

    watched = trace_memory(prepare, CPU, clip=training.max_grad_norm)
    states[0].finish()
    predicted = predict(subject, training, LENGTH, RATES)
    assert predicted.peak == pytest.approx(watched.peak(), rel=0.01)
    assert predicted.host == pytest.approx(watched.host.max(initial=0), rel=0.01)


@pytest.mark.sweep("*activation-offload*", "*defer*", "('sdpa', 'chunked*")
@pytest.mark.parametrize(
    ("choice", "optimizer", "words"),
    [(*each, 300) for each in FP32[2:]]
    + sweep(*((*each, 300) for each in FP32[:2]))
    + [(*each, 4000) for each in CHUNKED[1:3]]
    + sweep(*((*each, 4000) for each in (CHUNKED[0], CHUNKED[3]))),
    ids=str,
)
def test_what_is_predicted_is_what_the_allocator_gives_out_to_the_device_and_to_the_host(
    tmp_path, choice, optimizer, words
):
    subject, source = opened(tmp_path, "gpt2", 2, words)
    training = settings(choice, optimizer)
    predicted = predict(subject, training, LENGTH, RATES)
    peaks = ALLOCATOR["measure_allocated_peaks"](real(subject, source, training), STEPS, training.max_grad_norm)
    assert predicted.peak == pytest.approx(peaks.device, rel=0.03)
    assert predicted.host == pytest.approx(peaks.host, rel=0.03, abs=0.01 * peaks.both)


@pytest.mark.parametrize(
    ("loss", "choice", "words"),
    [
        *sweep(("dpo", (), 300), ("dpo", ("lora", "gradient-checkpointing"), 300)),
        ("dpo", ({"gradient-accumulation": {"rows": 2}}, {"chunked-cross-entropy": {"chunk": 32}}), 4000),
        ("orpo", ("sdpa", {"chunked-cross-entropy": {"chunk": 32}}), 4000),
    ],
    ids=str,
)
def test_pairs_of_answers_take_what_is_predicted(tmp_path, loss, choice, words):
    subject, source = opened(tmp_path, "gpt2", 2, words)
    subject, training = replace(subject, preference=NamedSettings(name=loss)), settings(choice, "adamw")
    predicted = predict(subject, training, LENGTH, RATES)
    peaks = ALLOCATOR["measure_allocated_peaks"](real(subject, source, training), STEPS, training.max_grad_norm)
    assert predicted.peak == pytest.approx(peaks.device, rel=0.03)
    assert predicted.host == peaks.host == 0


def leaf() -> Tensor:
    return torch.zeros(64, 256, requires_grad=True)


def residual() -> Tensor:
    """The first gradient of x is nobody else's when the second comes."""
    x = leaf() * 1
    return (x + x.neg()).exp().sum()


def shared() -> Tensor:
    """The first gradient of x is that of w as well, which is still needed."""
    w, x = leaf().exp(), leaf().exp()
    return ((x.tanh() + (w + x)) * 2).exp().sum()


def spread() -> Tensor:
    """The first gradient of x is one number, seen as many."""
    x = leaf().exp()
    return (x + x.tanh()).sum()


def formula() -> Tensor:
    """A sum that is no gradient's, but on the way to one."""
    deviation, mean = torch.std_mean(leaf().exp(), 1)
    return (deviation * mean).sum()


def tied() -> Tensor:
    """A weight that is used twice."""
    x = leaf()
    return (functional.embedding(torch.arange(8), x) @ x.t()).exp().sum()


@pytest.mark.parametrize("graph", [residual, shared, spread, formula, tied])
def test_gradients_are_added_up_in_place_where_autograd_does(tmp_path, graph):
    def backward(log: AllocationLog) -> None:
        loss = graph()
        log.start()
        with record_function("steps"):
            loss.backward()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        backward(AllocationLog())
    tracker = AllocationTracker(AllocationLog(), CPU)
    with tracker:
        backward(tracker.log)
    fake = AllocationTracker(AllocationLog(), CPU)
    with make_fake_mode(), fake:
        backward(fake.log)
    assert tracker.log.build_timeline().peak() == fake.log.build_timeline().peak()
    assert tracker.log.build_timeline().peak() == pytest.approx(most(found, tmp_path), rel=0.001)


@pytest.mark.sweep
@pytest.mark.parametrize(("choice", "optimizer"), [DEEP[1], *sweep(DEEP[0])], ids=str)
def test_a_deep_model_is_predicted_from_shallow_ones(tmp_path, choice, optimizer):
    subject, _ = opened(tmp_path, "gpt2", 7)
    training = settings(choice, optimizer)
    lengthened = predict(subject, training, LENGTH, RATES)
    whole = predict(subject, training, LENGTH, RATES, whole=True)
    assert lengthened.timeline is None
    assert lengthened.peak == pytest.approx(whole.peak, rel=0.001)
    assert lengthened.host == pytest.approx(whole.host, rel=0.001)
    assert sum(lengthened.at_peak.values()) == pytest.approx(whole.peak, rel=0.001)
    assert lengthened.seconds == pytest.approx(whole.seconds, rel=0.05)


@pytest.fixture(scope="module")
def _made_once(tmp_path_factory):
    """What a process makes once is in its first prediction: the codes of QLoRA and of optimizers of 8 bits."""
    subject, _ = opened(tmp_path_factory.mktemp("once"), "gpt2", 2)
    for choice, optimizer in (TEXT[2], COMBINATIONS[2]):
        predict(subject, settings(choice, optimizer), LENGTH, RATES)


@pytest.mark.sweep("gpt2-()-adamw", "bert-*", "gpt2-('qlora',)-adamw", "*host-weights*")
@pytest.mark.usefixtures("_made_once")
@pytest.mark.parametrize(
    ("kind", "choice", "optimizer"),
    [("gpt2", *each) for each in (COMBINATIONS[0], COMBINATIONS[5], TEXT[0], TEXT[2])]
    + [("bert", *COMBINATIONS[2])]
    + sweep(*(("gpt2", *each) for each in (*COMBINATIONS[1:5], *COMBINATIONS[6:], TEXT[1])), ("vit", *COMBINATIONS[4])),
    ids=str,
)
def test_meta_kernels_predict_what_the_fake_mode_alone_predicts(tmp_path, monkeypatch, kind, choice, optimizer):
    subject, _ = opened(tmp_path, kind, 2)
    training = settings(choice, optimizer)
    found = predict(subject, training, LENGTH, RATES)
    monkeypatch.setattr(simulate, "run_operation", lambda func, args, kwargs: func(*args, **kwargs))
    expected = predict(subject, training, LENGTH, RATES)
    assert (found.peak, found.host, found.phases, found.cost) == (
        expected.peak,
        expected.host,
        expected.phases,
        expected.cost,
    )
    assert found.timeline is not None
    assert expected.timeline is not None
    assert found.timeline.positions == expected.timeline.positions
    for name in ("accounts", "changes", "places"):
        assert np.array_equal(getattr(found.timeline, name), getattr(expected.timeline, name))


@pytest.mark.parametrize("name", sorted(str(func) for func in meta_kernels.PURE | meta_kernels.IN_PLACE))
def test_a_meta_kernel_gives_the_shape_strides_and_storage_of_the_real_one(name):
    calls: dict[str, Callable[[Tensor, Tensor], tuple[Any, ...]]] = {
        "amax": lambda a, b: (a, [-1], True),
        "mm": lambda a, b: (b, b.t()),
        "slice": lambda a, b: (a, 1, 1, 3),
        "sum": lambda a, b: (a, [0], False),
        "t": lambda a, b: (b,),
        "transpose": lambda a, b: (a, 0, 2),
        "unsqueeze": lambda a, b: (a, 1),
        "view": lambda a, b: (a, [2, 20]),
        "_unsafe_view": lambda a, b: (a, [2, 20]),
        "detach": lambda a, b: (a,),
    }
    (func,) = (each for each in meta_kernels.PURE | meta_kernels.IN_PLACE if str(each) == name)
    make = calls.get(name.split(".")[1], lambda a, b: (a, b))
    real = make(torch.ones(2, 4, 5, dtype=torch.bfloat16), torch.ones(4, 5, dtype=torch.bfloat16))
    expected = func(*real)
    with make_fake_mode():
        fake = make(torch.ones(2, 4, 5, dtype=torch.bfloat16), torch.ones(4, 5, dtype=torch.bfloat16))
        found = meta_kernels.run_operation(func, fake, {})
    described = [(each.shape, each.stride(), each.dtype, each.device) for each in (found, expected)]
    assert described[0] == described[1]
    shared = [out.untyped_storage()._cdata == given[0].untyped_storage()._cdata for out, given in
              ((found, fake), (expected, real))]  # fmt: skip
    assert shared[0] == shared[1]


def test_an_optimizer_is_timed_beside_memory_and_kept_in_its_terms(tmp_path):
    cache = Cache(tmp_path)
    rates = measure_rates(CPU, cache)
    slow = rates.passes.model_copy(update={"seconds": tuple(2 * each for each in rates.passes.seconds)})
    optimizer = NamedSettings(name="adamw-8bit").configure("optimizer")
    first = measure_optimizer(optimizer, rates, cache)
    assert first > 0
    assert measure_optimizer(optimizer, rates, cache) == first, "it is kept"
    assert measure_optimizer(optimizer, rates.model_copy(update={"passes": slow}), cache) == pytest.approx(2 * first)


def test_experts_are_among_the_operations_of_a_layer(tmp_path):
    subject, _ = opened(tmp_path, "mixtral", 2)
    traced = trace_structure(subject, settings((), "adamw"), LENGTH)
    experts = 3 * 2 * LENGTH * 2 * 64 * 256  # three products for each of two experts of a token
    assert 1.05 * experts < traced.flops[1] < 1.5 * experts
