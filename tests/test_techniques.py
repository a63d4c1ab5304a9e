"""Every technique of the registry trains as plain training does, is taken off again, and saves what is predicted."""

import copy
import functools
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from laconic import registry
from laconic.config import NamedSettings
from laconic.errors import MissingPackage, RecipeError
from laconic.models.language_model import LanguageModel
from laconic.models.wrappers import TextClassifier
from laconic.tasks.token_positions import IGNORED
from train.memory import activation_offload
from train.objectives.cross_entropy import CrossEntropy
from train.objectives.next_token import NextToken
from train.offload.activation_store import FileStore
from train.optimizers.adamw import AdamW
from train.planner.simulate import fakify, simulate, trace_memory
from train.settings import TrainingComponents
from train.step.compatibility import find_conflict
from train.step.objective import TARGETS, Batch, Objective
from train.step.technique import Technique
from train.step.train_state import TrainState
from train.step.train_step import train_step
from train.step_assembly import make_step_parts

CPU = torch.device("cpu")
SMALL = {"num_hidden_layers": 2, "num_attention_heads": 2, "attn_implementation": "eager"}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}

VARIANTS: dict[str, list[dict[str, Any]]] = {
    "gradient-accumulation": [{"rows": 2}],
    "gradient-checkpointing": [{}, {"policy": "selective"}, {"every": 2}],
    "chunked-cross-entropy": [{"chunk": 7}, {"chunk": 7, "defer": True}],
    "activation-offload": [{"min_bytes": 0}, {"min_bytes": 64, "destination": "disk", "prefetch": 2}],
    "sdpa": [{}, {"backend": "math"}, {"float32": True}],
}
"""Settings that mean something for tiny models; other techniques are tried with their own."""
CASES = [(name, config) for name in sorted(registry.TECHNIQUES) for config in VARIANTS.get(name, [{}])]


def gpt2(**changes: Any) -> tuple[nn.Module, Objective, Batch]:
    """A language model with a tied head, and texts of several lengths."""
    settings = {"bos_token_id": 0, "eos_token_id": 0, "activation_function": "gelu", **STILL, **SMALL, **changes}
    config = transformers.GPT2Config(vocab_size=61, n_embd=16, n_positions=32, **settings)
    texts = torch.randint(0, 61, (4, 13), generator=torch.Generator().manual_seed(1))
    mask = (torch.arange(12)[None, :] < torch.tensor([12, 8, 12, 5])[:, None]).long()
    batch = {"input_ids": texts[:, :-1], "attention_mask": mask}
    batch[TARGETS] = texts[:, 1:].masked_fill(mask == 0, IGNORED)
    return LanguageModel(transformers.GPT2LMHeadModel(config)), NextToken(None), batch


def bert() -> tuple[nn.Module, Objective, Batch]:
    """A classifier, and texts of which one is shorter: transformers leaves a mask out that hides nothing."""
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=16,
        intermediate_size=32,
        max_position_embeddings=32,
        num_labels=3,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        **SMALL,
    )
    ids = torch.randint(0, 61, (4, 10), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[2, 7:] = 0
    batch = {"input_ids": ids, "attention_mask": mask, TARGETS: torch.tensor([0, 1, 2, 1])}
    return TextClassifier(transformers.BertForSequenceClassification(config)), CrossEntropy(None), batch


class Convolutions(nn.Module):
    """[batch, 3, 8, 8] to [batch, 4]. LayerNorm, since BatchNorm's statistics depend on how a batch is cut."""

    def __init__(self) -> None:
        super().__init__()
        stages = [
            nn.Sequential(nn.Conv2d(width, 6, 3, padding=1), nn.LayerNorm([6, 8, 8]), nn.ReLU()) for width in (3, 6, 6)
        ]
        self.stages = nn.ModuleList(stages)
        self.head = nn.Linear(6, 4)

    def forward(self, image: Tensor) -> Tensor:
        for stage in self.stages:
            image = stage(image)
        return self.head(image.mean(dim=(2, 3)))


def cnn() -> tuple[nn.Module, Objective, Batch]:
    """A classifier of images."""
    image = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return Convolutions(), CrossEntropy(None), {"image": image, TARGETS: torch.tensor([0, 3, 2, 1])}


MODELS = {"gpt2": gpt2, "bert": bert, "cnn": cnn}


def made(model: str, **changes: Any) -> tuple[nn.Module, Objective, Batch]:
    torch.manual_seed(0)
    return MODELS[model](**changes)


def find(name: str, config: dict[str, Any]) -> dict[str, Technique]:
    """The technique, and what it needs beside it."""
    if importlib.util.find_spec(registry.TECHNIQUES[name].partition(":")[0]) is None:
        pytest.skip(f"there is no {name} yet")
    try:
        technique = NamedSettings(name=name, config=config).configure("technique")
    except MissingPackage as error:
        pytest.skip(str(error))
    needed = {} if not technique.requires else find(technique.requires[0], {})
    return {name: technique, **needed}


def optimizer(techniques: dict[str, Technique]) -> AdamW:
    rounding = any("stochastic-rounding" in one.requires_of_optimizer for one in techniques.values())
    return AdamW(lr=3e-3, implementation="loop", stochastic_rounding=rounding)


def make_state(module: nn.Module, objective: Objective, techniques: dict[str, Technique]) -> TrainState:
    """An assembled state. Skips where the model gives a technique nothing to work on."""
    try:
        parts = make_step_parts(module, objective, TrainingComponents(optimizer(techniques), None, techniques), CPU)
        state = parts.assemble()
    except RecipeError as error:
        pytest.skip(str(error))
    return state


def losses(state: TrainState, batch: Batch, steps: int = 5) -> list[float]:
    return [float(train_step(state, batch)) for _ in range(steps)]


@functools.cache
def plain(model: str, **changes: Any) -> list[float]:
    module, objective, batch = made(model, **changes)
    return losses(make_state(module, objective, {}), batch)


def look(module: nn.Module) -> tuple[Any, ...]:
    """What a technique may not change for good."""
    return (
        [(name, type(part)) for name, part in module.named_modules()],
        [(name, tuple(one.shape), one.dtype) for name, one in module.state_dict().items()],
        [name for name, _ in module.named_parameters()],
        [(name, "forward" in vars(part), len(part._forward_pre_hooks)) for name, part in module.named_modules()],
        [(name, getattr(part, "inplace", None)) for name, part in module.named_modules()],
    )


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(("name", "config"), CASES, ids=str)
def test_a_technique_trains_as_plain_training_does_and_is_taken_off_again(name, config, model):
    if name == "compile":
        pytest.skip("compiled in a test of its own")
    techniques = find(name, config)
    module, objective, batch = made(model)
    before = look(module)
    state = make_state(module, objective, techniques)
    found, wanted = losses(state, batch), plain(model)
    if all(technique.exact for technique in techniques.values()):
        assert found == pytest.approx(wanted, abs=1e-5)
    else:
        assert found[0] == pytest.approx(wanted[0], rel=0.02)
        assert found[-1] < found[0]
    if techniques[name].slot != "weights":
        assert set(state.weights()) == set(made(model)[0].state_dict())
    finished = state.finish()
    assert finished is module
    assert look(finished) == before
    assert torch.isfinite(objective.loss(finished, batch))


@pytest.mark.parametrize(("name", "config"), CASES, ids=str)
def test_the_simulated_peak_is_the_peak_of_real_tensors(name, config):
    techniques = find(name, config)
    model = "cnn" if name == "inplace-activations" else "bert" if name in ("sdpa", "bf16") else "gpt2"
    if not all(technique.is_simulated for technique in techniques.values()):
        pytest.skip(f"{name} says that a simulation does not tell what it saves")
    module, objective, batch = made(model)
    twin = copy.deepcopy(module)

    states: list[TrainState] = []

    def real() -> tuple[TrainState, Batch]:
        states.append(make_state(module, objective, techniques))
        return states[-1], {name: tensor.clone() for name, tensor in batch.items()}

    def fake() -> tuple[TrainState, Batch]:
        state = make_state(fakify(twin), copy.copy(objective), techniques)
        return state, {name: torch.empty_like(tensor) for name, tensor in batch.items()}

    batch.pop("attention_mask" if model == "gpt2" else "", None)  # it is counted, and an fakify one holds nothing
    imaginary, watched = simulate(fake), trace_memory(real, CPU)
    for state in states:
        state.finish()
    assert imaginary.peak() == pytest.approx(watched.peak(), rel=0.01)
    assert imaginary.host.max(initial=0) == pytest.approx(watched.host.max(initial=0), rel=0.01)


DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.2)


def losses_with_dropout(techniques: dict[str, Technique], seed: int) -> list[float]:
    """As the training loop does: the random numbers of a step depend on the seed and the step alone."""
    module, objective, batch = made("gpt2", **DROPOUT)
    state, found = make_state(module, objective, techniques), []
    for step in range(3):
        torch.manual_seed(1000 * seed + step)
        found.append(float(train_step(state, batch)))
    state.finish()
    return found


@functools.cache
def plain_with_dropout(seed: int) -> list[float]:
    return losses_with_dropout({}, seed)


@pytest.mark.parametrize(("name", "config"), CASES, ids=str)
def test_an_exact_technique_draws_the_dropout_of_plain_training_unless_it_says_otherwise(name, config):
    techniques = find(name, config)
    if name == "compile" or not all(technique.exact for technique in techniques.values()):
        pytest.skip("not exact, or compiled in a test of its own")
    redraws = any(technique.redraws_dropout for technique in techniques.values())
    for seed in range(3):
        found, wanted = losses_with_dropout(techniques, seed), plain_with_dropout(seed)
        assert found == (pytest.approx(wanted, rel=0.1) if redraws else pytest.approx(wanted, abs=1e-5))


def test_checkpoint_of_every_layer_saves_more_than_of_every_second_and_selective_less(monkeypatch):
    peaks = [peak("gpt2", "gradient-checkpointing", config) for config in ({}, {"every": 2}, {"policy": "selective"})]
    assert peaks[0] < min(peaks[1:])
    assert max(peaks) < peak("gpt2")
    stores = []
    monkeypatch.setattr(activation_offload, "FileStore", lambda *given: stores.append(FileStore(*given)) or stores[-1])
    module, objective, batch = made("gpt2")
    state = make_state(module, objective, find("activation-offload", {"min_bytes": 1, "destination": "disk"}))
    sizes = []
    for _ in range(3):
        train_step(state, batch)
        sizes.append(stores[0].end)
    state.finish()
    assert sizes == [0, 0, 0]


def peak(model: str, name: str | None = None, config: dict[str, Any] | None = None, rows: int = 16) -> int:
    """Simulated, without the optimizer's step, at more rows than the other tests have."""
    techniques = find(name, config or {}) if name else {}
    module, objective, batch = made(model)
    del batch["attention_mask"]

    def fake() -> tuple[TrainState, Batch]:
        state = make_state(fakify(module), objective, techniques)
        return state, {name: torch.empty(rows, *one.shape[1:], dtype=one.dtype) for name, one in batch.items()}

    return sum(simulate(fake).phases()["backward"].values())


def test_offload_leaves_weights_alone_and_sends_a_storage_away_once():
    module, objective, batch = made("gpt2")
    state = make_state(module, objective, find("activation-offload", {"min_bytes": 1}))
    sent: list[Tensor] = []
    put = state.host.copy_to_host
    state.host.copy_to_host = lambda tensor: (sent.append(tensor), put(tensor))[1]
    with state.forward_context():
        loss = state.loss_module(batch)
    weights = {one.untyped_storage().data_ptr() for one in module.parameters()}
    places = [one.untyped_storage().data_ptr() for one in sent]
    assert places
    assert not weights & set(places)
    loss.backward()


def test_an_offload_folder_or_a_compiler_that_is_not_there_says_so(tmp_path, monkeypatch):
    module, objective, _ = made("gpt2")
    techniques = find("activation-offload", {"destination": "disk", "folder": str(tmp_path / "none")})
    with pytest.raises(RecipeError, match="Give another folder"):
        make_step_parts(module, objective, TrainingComponents(AdamW(), None, techniques), CPU)
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    module, objective, _ = made("gpt2")
    with pytest.raises(RecipeError, match=r"Install g\+\+"):
        make_step_parts(module, objective, TrainingComponents(AdamW(), None, find("compile", {})), CPU)


def test_fp16_leaves_a_step_out_after_an_overflow_and_halves_the_scale():
    module, objective, batch = made("gpt2")
    state = make_state(module, objective, find("fp16", {"init_scale": 2.0**40, "growth_interval": 2}))
    before = [one.clone() for one in module.parameters()]
    train_step(state, batch, max_grad_norm=1.0)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert state.scaler.get_scale() == 2.0**39
    state.scaler.update(2.0**10)
    state.micro_batch_rows = 2
    for _ in range(2):
        train_step(state, batch, max_grad_norm=1.0)
    assert not all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))
    assert state.scaler.get_scale() == 2.0**11


def test_pure_bf16_keeps_statistics_and_buffers_in_fp32():
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 4))
    _, objective, batch = made("cnn")
    state = make_state(module, objective, find("pure-bf16", {}))
    kinds = {name: one.dtype for name, one in module.state_dict().items()}
    assert kinds["0.weight"] is kinds["4.weight"] is torch.bfloat16
    assert kinds["1.weight"] is kinds["1.running_mean"] is torch.float32
    found = losses(state, batch, 10)
    assert found[-1] < found[0]
    state.finish()
    assert all(one.dtype is torch.float32 for one in module.parameters())


def test_in_place_takes_only_what_is_safe_and_attention_comes_back_as_it_was():
    techniques = find("pure-bf16", {})
    assert "stochastic_rounding: true" in str(find_conflict(techniques, AdamW()))
    assert find_conflict(techniques, AdamW(stochastic_rounding=True)) is None
    module = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.SiLU(), nn.Sigmoid(), nn.ReLU())
    state = make_state(module, CrossEntropy(None), find("inplace-activations", {}))
    assert [getattr(part, "inplace", None) for part in module] == [None, True, None, False, None, False]
    state.finish()
    assert not module[1].inplace
    module, objective, _ = made("gpt2")
    state = make_state(module, objective, find("sdpa", {"backend": "math"}))
    assert module.model.config._attn_implementation == "sdpa"
    state.finish()
    assert module.model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    "around",
    [{}, {"gradient-checkpointing": {}}, pytest.param({"compile": {}}, marks=pytest.mark.filterwarnings("ignore"))],
    ids=str,
)
def test_sdpa_in_float32_keeps_attention_so_beside_products_in_bf16_in_both_passes(around: dict[str, Any]):
    module, objective, batch = made("gpt2")
    techniques = find("sdpa", {"float32": True}) | find("bf16", {})
    for name, config in around.items():
        techniques |= find(name, config)
    state = make_state(module, objective, techniques)
    with Attention() as seen:
        found = losses(state, batch)
    assert found == pytest.approx(plain("gpt2"), abs=0.05)
    if "compile" not in around:  # a compiled layer calls it where nothing can look
        assert {dtype for _, dtype in seen.calls} == {torch.float32}
        assert {"forward", "backward"} <= {way for way, _ in seen.calls}
    state.finish()


class Attention(TorchDispatchMode):
    """Notes the precision of attention's queries, in the forward pass and in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if "scaled_dot_product" in str(func):
            tensors = [each for each in args if isinstance(each, torch.Tensor)]
            self.calls.append(("backward" if "backward" in str(func) else "forward", tensors[0].dtype))
        return func(*args, **(kwargs or {}))


def test_what_works_alone_works_together():
    names = {
        "sdpa": {"backend": "flash"},
        "chunked-cross-entropy": {"defer": True, "chunk": 5},
        "gradient-checkpointing": {},
    }
    names |= {"activation-offload": {"min_bytes": 64}, "optimizer-in-backward": {}}
    techniques = {
        name: NamedSettings(name=name, config=config).configure("technique") for name, config in names.items()
    }
    assert find_conflict(techniques, AdamW()) is None
    module, objective, batch = made("gpt2")
    before = look(module)
    state = make_state(module, objective, techniques)
    del batch["attention_mask"]  # the fast kernels take no mask
    batch = {name: tensor[:, :5] for name, tensor in batch.items()}
    twin, same, _ = made("gpt2")
    assert losses(state, batch) == pytest.approx(losses(make_state(twin, same, {}), batch), abs=1e-5)
    assert look(state.finish()) == before


@pytest.mark.parametrize(
    ("name", "config", "message"),
    [
        ("gradient-checkpointing", {}, "no repeated layers"),
        ("compile", {}, "no repeated layers"),
        ("chunked-cross-entropy", {}, "no logits over a vocabulary"),
        ("sdpa", {}, "no model of transformers"),
        ("inplace-activations", {}, "within a Sequential"),
    ],
)
def test_a_model_that_gives_nothing_to_work_on_is_refused_with_what_to_do(name, config, message):
    module = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid())
    with pytest.raises(RecipeError, match=message):
        make_step_parts(module, CrossEntropy(None), TrainingComponents(AdamW(), None, find(name, config)), CPU)


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.sweep)])
def test_compiled_layers_train_as_the_others_do(monkeypatch, tmp_path, backend):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path))
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))

    def state(techniques: dict[str, Technique]) -> TrainState:
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        return make_state(nn.Sequential(nn.Sequential(*layers)), CrossEntropy(None), techniques)

    batch = {"input": torch.randn(6, 4), TARGETS: torch.arange(6) % 4}
    compiled = state(find("compile", {}))
    assert losses(compiled, batch) == pytest.approx(losses(state({}), batch), abs=1e-5)
    assert look(compiled.finish()) == look(state({}).module)
    assert Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).is_relative_to(tmp_path)
    if backend == "inductor":
        assert list((tmp_path / "torch-compile").rglob("*.so")), "no other process finds what was compiled"


@pytest.mark.gpu
@pytest.mark.parametrize("where", ["host", "disk"])
def test_offload_from_a_gpu_trains_as_plain_training_does(where):
    def run(techniques: dict[str, Technique]) -> list[float]:
        module, objective, batch = made("gpt2")
        parts = make_step_parts(
            module, objective, TrainingComponents(optimizer(techniques), None, techniques), torch.device("cuda")
        )
        state = parts.assemble()
        found = losses(state, {name: tensor.cuda() for name, tensor in batch.items()})
        state.finish()
        return found

    assert run(find("activation-offload", {"min_bytes": 64, "destination": where})) == pytest.approx(run({}), abs=1e-5)
