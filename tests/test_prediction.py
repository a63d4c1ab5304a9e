"""What is predicted of a step is what it takes: by the watch on real tensors, by torch's allocator, and of deep models
by the line through two shallow ones."""

import gc
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from laconic.cache import Cache
from laconic.config import NamedSettings
from laconic.models import huggingface
from laconic.models.embedder import read_json
from laconic.planner.memory_timeline import Ledger
from laconic.planner.meta_model import Subject, open_subject
from laconic.planner.prediction import predict
from laconic.planner.rates import Curve, Rates, measure, per_parameter
from laconic.planner.simulate import STEPS, Prepare, Watch, imagining, trace
from laconic.training.assembly import make_kit
from laconic.training.settings import Training
from laconic.training.step.objective import Batch
from laconic.training.step.parts import Kit
from laconic.training.step.step import step

CPU = torch.device("cpu")
CURVE = Curve(amounts=(1.0, 2.0), seconds=(1.0, 2.0))
RATES = Rates(name="none", kind="cpu", products={"float32": CURVE, "bfloat16": CURVE}, passes=CURVE, copies=CURVE)
ROWS, LENGTH = 6, 24
SMALL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}

SPARING = ("sdpa", "chunked-loss", "checkpoint")
COMBINATIONS: list[tuple[tuple[Any, ...], Any]] = [
    ((), "adamw"),
    ((), {"adamw": {"implementation": "foreach"}}),
    (("bf16", "checkpoint"), "adamw-8bit"),
    (("sdpa", "in-backward"), "adamw"),
    (({"accumulate": {"rows": 2}},), {"sgd": {"momentum": 0.9}}),
    (({"layerwise": {"rows": 2, "keep": "host"}}, "host-weights"), "adamw"),
    (({"offload": {"smallest": 1024}},), "lion"),
    (({"offload": {"smallest": 1024, "where": "disk"}},), "adamw"),
]
TEXT = [((*SPARING, {"accumulate": {"rows": 2}}), "adamw"), (("qlora",), "adamw")]

FP32 = [COMBINATIONS[0], COMBINATIONS[4], *COMBINATIONS[6:], *TEXT]
"""Products in BF16 take scratch of their own on a processor, which in so small a model is not small."""
DEEP = [COMBINATIONS[2], COMBINATIONS[5]]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def config(kind: str, layers: int) -> tuple[Any, str]:
    """A tiny config, and what it is for."""
    wide = {"hidden_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 256}
    if kind == "gpt2":
        made = transformers.GPT2Config(
            vocab_size=300, n_embd=64, n_layer=layers, n_head=4, n_positions=64, activation_function="gelu"
        )
        task = "causal-lm"
    elif kind == "bert":
        made = transformers.BertConfig(vocab_size=300, max_position_embeddings=64, num_labels=3, **wide, **SMALL)
        task = "text-classification"
    else:
        made = transformers.ViTConfig(image_size=16, patch_size=4, num_labels=3, **wide, **SMALL)
        task = "image-classification"
    made.architectures = ["GPT2LMHeadModel"]  # of a config only the kind of model is looked at
    return made, task


def opened(folder: Path, kind: str, layers: int) -> tuple[Subject, dict[str, Any]]:
    """A model without weights, and how to build it with them."""
    made, task = config(kind, layers)
    made.save_pretrained(folder)
    return open_subject(folder, task=task), huggingface.source_of(folder, read_json(folder / "config.json"), task)


def settings(choice: tuple[Any, ...], optimizer: Any) -> Training:
    techniques = tuple(NamedSettings.model_validate(each) for each in choice)
    clip = None if "in-backward" in choice else 1.0
    return Training(batch=ROWS, techniques=techniques, optimizer=NamedSettings.model_validate(optimizer), clip=clip)


def real(subject: Subject, source: dict[str, Any], training: Training) -> Prepare:
    def prepare() -> tuple[Kit, Batch]:
        torch.manual_seed(0)
        objective = subject.objective()
        module: nn.Module = huggingface.build(source)
        kit = make_kit(module, objective, training.parts(), CPU)
        kit.assemble()
        batch = objective.example(ROWS, LENGTH)
        if "attention_mask" in batch:
            batch["attention_mask"][0, -1] = 0  # without any padding no mask would be made of it
        return kit, batch

    return prepare


def allocated(prepare: Prepare, clip: float | None, folder: Path) -> int:
    """The most bytes that torch's allocator gave out at once, in some steps."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        kit, batch = prepare()
        gc.collect()
        with record_function("steps"):
            for _ in range(STEPS):
                step(kit, batch, clip=clip)
        kit.finish()
        del kit, batch
        gc.collect()
    return most(found, folder)


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


@pytest.mark.parametrize(
    ("kind", "choice", "optimizer"),
    [("gpt2", *each) for each in COMBINATIONS + TEXT]
    + [("bert", *each) for each in COMBINATIONS[2::3]]
    + [("vit", *each) for each in COMBINATIONS[4::2]],
    ids=str,
)
def test_what_is_predicted_is_what_real_tensors_take(tmp_path, kind, choice, optimizer):
    subject, source = opened(tmp_path, kind, 2)
    training = settings(choice, optimizer)
    kits: list[Kit] = []

    def prepare() -> tuple[Kit, Batch]:
        kit, batch = real(subject, source, training)()
        kits.append(kit)
        return kit, batch

    watched = trace(prepare, CPU, clip=training.clip)
    kits[0].finish()
    predicted = predict(subject, training, LENGTH, RATES)
    assert predicted.peak == pytest.approx(watched.peak(), rel=0.01)
    assert predicted.host == pytest.approx(watched.host.max(initial=0), rel=0.01)


@pytest.mark.parametrize(("choice", "optimizer"), FP32, ids=str)
def test_what_is_predicted_is_what_the_allocator_gives_out(tmp_path, choice, optimizer):
    subject, source = opened(tmp_path, "gpt2", 2)
    training = settings(choice, optimizer)
    predicted = predict(subject, training, LENGTH, RATES)
    assert predicted.course is not None
    both = int((predicted.course.device + predicted.course.host).max())  # it cannot tell one from the other
    assert both == pytest.approx(allocated(real(subject, source, training), training.clip, tmp_path), rel=0.03)


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
    def backward(ledger: Ledger) -> None:
        loss = graph()
        ledger.begin()
        with record_function("steps"):
            loss.backward()

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as found:
        backward(Ledger())
    watch = Watch(Ledger(), CPU)
    with watch:
        backward(watch.ledger)
    imaginary = Watch(Ledger(), CPU)
    with imagining(), imaginary:
        backward(imaginary.ledger)
    assert watch.ledger.close().peak() == imaginary.ledger.close().peak()
    assert watch.ledger.close().peak() == pytest.approx(most(found, tmp_path), rel=0.001)


@pytest.mark.parametrize(("choice", "optimizer"), DEEP, ids=str)
def test_a_deep_model_is_predicted_from_shallow_ones(tmp_path, choice, optimizer):
    subject, _ = opened(tmp_path, "gpt2", 9)
    training = settings(choice, optimizer)
    lengthened = predict(subject, training, LENGTH, RATES)
    whole = predict(subject, training, LENGTH, RATES, whole=True)
    assert lengthened.course is None
    assert lengthened.peak == pytest.approx(whole.peak, rel=0.001)
    assert lengthened.host == pytest.approx(whole.host, rel=0.001)
    assert sum(lengthened.at_peak.values()) == pytest.approx(whole.peak, rel=0.001)
    assert lengthened.seconds == pytest.approx(whole.seconds, rel=0.05)


def test_an_optimizer_is_timed_beside_memory_and_kept_in_its_terms(tmp_path):
    cache = Cache(tmp_path)
    rates = measure(CPU, cache)
    slow = rates.passes.model_copy(update={"seconds": tuple(2 * each for each in rates.passes.seconds)})
    optimizer = NamedSettings(name="adamw-8bit").configure("optimizer")
    first = per_parameter(optimizer, rates, cache)
    assert first > 0
    assert per_parameter(optimizer, rates, cache) == first, "it is kept"
    assert per_parameter(optimizer, rates.model_copy(update={"passes": slow}), cache) == pytest.approx(2 * first)
