"""The training loop: the same for a seed, stopped at the end of a step, gone on with where it stood."""

import gc
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from laconic.cache import VARIABLE, Cache
from laconic.cli import INTERRUPTED, main
from laconic.data.dataset import Dataset
from laconic.data.reader import make_dataset
from laconic.errors import OutOfMemory, TrainingFailure
from laconic.models.checkpoint import Checkpoint
from laconic.models.processors import plain_task
from laconic.models.signature import probe_module
from laconic.tensor import TensorSpec
from train.callbacks.callback import RunLog, StepReport
from train.callbacks.journal import read_lines
from train.data.batch_loader import BatchLoader
from train.data.batch_sampler import BatchSampler
from train.data.loader_settings import LoaderSettings
from train.loop import LoopSettings, catch_signals, run_steps, step_seed, translate_memory_errors
from train.objectives.array_targets import Targets
from train.observers import LOG, ObserverSettings
from train.optimizers.schedule import Linear
from train.parallel.ranks import Ranks
from train.settings import Training
from train.step.step_parts import StepParts
from train.step.train_state import TrainState
from train.step.trained_modules import trainable_parameters
from train.trainer import SNAPSHOTS, Evaluate, TrainResult, train

CPU = torch.device("cpu")
X = TensorSpec(name="x", dtype="float32", shape=("batch", 8))
STOP = "STOP_AT_PASS"
"""The variable that says in which pass a `Stopping` module asks its process to stop."""
ROWS = 30


class Dropping(nn.Module):
    """[batch, 8] to [batch, 3], with dropout, and statistics that each batch moves."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs = (X,)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


class Stopping(Dropping):
    """The same, and in one of its passes a polite request to stop arrives."""

    def __init__(self, stop: int | None = None) -> None:
        super().__init__()
        self.stop = int(os.environ.get(STOP, "-1")) if stop is None else stop
        self.passes = 0

    def forward(self, x: Tensor) -> Tensor:
        self.passes += self.training
        if self.passes == self.stop and self.training:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().forward(x)


def samples() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    values = rng.normal(size=(ROWS, 8)).astype(np.float32)
    return values, values[:, :3].argmax(axis=1)


def dataset() -> Dataset:
    values, labels = samples()
    return make_dataset(list(values), plain_task("tensors", (X,), Path()), labels=labels.tolist(), name="x")


def checkpoint(make: Callable[[], nn.Module] = Dropping) -> Checkpoint:
    torch.manual_seed(0)
    made = make().eval()
    source = {"kind": "builder", "builder": "test_loop:Dropping", "arguments": {}}
    return Checkpoint.of(
        made, plain_task("tensors", (X,), Path()), outputs=probe_module(made, (X,)), source=source, size=0
    )


def settings(**changes) -> Training:
    given = {"batch_size": 8, "steps": 6, "optimizer": {"adamw": {"lr": 0.02}}, "loader": {"workers": 0}, **changes}
    return Training.model_validate(given)


def taught(
    folder: Path, evaluate: Evaluate | None = None, make: Callable[[], nn.Module] = Dropping, **changes
) -> TrainResult:
    given = {name: changes.pop(name) for name in ("conclude", "eval_every") if name in changes}
    given |= {} if evaluate is None else {"evaluate": evaluate}
    return train(
        checkpoint(make), dataset(), settings(**changes), folder, ranks=Ranks(), observers=ObserverSettings(quiet=True),
        cache=Cache(folder / "cache"), **given,
    )  # fmt: skip


def weights(result: TrainResult) -> dict[str, Tensor]:
    return result.module.state_dict()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class Listener:
    """Hears what the loop says."""

    def __init__(self) -> None:
        self.reports: list[StepReport] = []

    def step(self, report: StepReport) -> None:
        self.reports.append(report)

    def close(self) -> None: ...


def looped(
    steps: int = 5, seed: int = 0, rate: float = 0.02, observers: Sequence[RunLog] = (), **given
) -> tuple[list[float], TrainState]:
    """The losses of the bare loop."""
    data, task = dataset(), plain_task("tensors", (X,), Path())
    objective = Targets.of(task, data)
    torch.manual_seed(0)
    state = StepParts(
        module=Dropping().train(),
        objective=objective,
        make_optimizer=lambda groups: torch.optim.SGD(groups, lr=rate),
        group_parameters=lambda module: [{"params": trainable_parameters(module)}],
    ).assemble()
    state.scheduler = Linear().build(state.optimizer, steps)
    losses: list[float] = []
    loader = BatchLoader(
        data, objective.collate, BatchSampler(ROWS, 8, seed), device=CPU, settings=LoaderSettings(workers=0), stop=steps
    )
    with loader:
        run_steps(state, loader, LoopSettings(steps=steps, seed=seed, **given), losses, observers)
    return losses, state


def test_a_seed_decides_every_loss_to_the_bit_whatever_was_drawn_before():
    first, kit = looped()
    again, twin = looped()
    assert first == again
    assert same(kit.module.state_dict(), twin.module.state_dict())
    assert looped(seed=1)[0] != first
    assert len(first) == 5
    first = looped()[0]
    torch.rand(77)
    assert looped()[0] == first
    assert len({step_seed(seed, step) for seed in range(20) for step in range(200)}) == 20 * 200


def test_everybody_is_told_of_each_step_once_and_in_order():
    listener, after = Listener(), []
    losses, _ = looped(observers=[listener], callbacks=[after.append])
    assert [report.step for report in listener.reports] == after == [1, 2, 3, 4, 5]
    assert [report.loss for report in listener.reports] == losses
    assert [report.rows for report in listener.reports] == [8, 8, 8, 6, 8]
    assert listener.reports[0].lr > listener.reports[-1].lr
    assert all(0 <= report.waited <= report.seconds for report in listener.reports)


def test_snapshots_come_every_so_many_steps_when_their_losses_are_known():
    kept = []
    found, _ = looped(steps=5, snapshot_every=2, save=lambda steps, wait: kept.append((steps, wait)))
    assert kept == [(2, False), (4, False), (5, False)]
    assert len(found) == 5


def test_a_loss_that_is_no_number_ends_the_run_with_its_step_and_advice():
    listener = Listener()
    with pytest.raises(TrainingFailure, match=r"the loss is nan at step \d; expected a number\. Try a lower learning"):
        looped(rate=1e38, observers=[listener])
    assert not np.isfinite(listener.reports[-1].loss)


def test_a_failing_run_writes_no_snapshot_of_a_loss_that_is_no_number_and_lets_go_of_what_watches(tmp_path):
    with pytest.raises(TrainingFailure, match="the loss is"):
        taught(tmp_path, optimizer={"sgd": {"lr": 1e38}}, max_grad_norm=None, snapshot_every=1)
    found = [json.loads(path.read_text()) for path in (tmp_path / SNAPSHOTS).glob("step-*.json")]
    assert all("nan" not in json.dumps(card).lower() for card in found)
    with pytest.raises(TrainingFailure):
        taught(tmp_path, optimizer={"sgd": {"lr": 1e38}}, max_grad_norm=None)
    assert [line["step"] for line in read_lines(tmp_path / LOG)] == list(range(1, len(read_lines(tmp_path / LOG)) + 1))
    assert held(tmp_path / LOG) == 0


def test_whoever_watches_is_let_go_when_somebody_after_him_cannot_begin(tmp_path):
    (tmp_path / "tensorboard").write_text("in the way")
    with pytest.raises(OSError, match="tensorboard"):
        train(
            checkpoint(), dataset(), settings(), tmp_path, ranks=Ranks(),
            observers=ObserverSettings(quiet=True, tensorboard=True), cache=Cache(tmp_path / "cache"),
        )  # fmt: skip
    assert held(tmp_path / LOG) == 0


def held(path: Path) -> int:
    """How many times this process has a file open."""
    gc.collect()
    return sum(os.path.realpath(entry) == str(path) for entry in Path("/proc/self/fd").iterdir())


def test_the_model_is_judged_before_and_after_each_epoch_and_at_the_end_when_the_steps_are_told(tmp_path):
    asked = []
    taught(tmp_path, evaluate=lambda state, done: bool(asked.append((done, state.module.training))), steps=9,
           conclude=lambda state, done: asked.append((done, state.module.training)))  # fmt: skip
    assert asked == [(0, True), (4, True), (8, True), (9, True)]
    seen = {}
    again = tmp_path / "again"
    taught(again, evaluate=lambda state, done: bool(seen.update({done: written(again / LOG)})), steps=9)
    assert seen == {0: 0, 4: 4, 8: 8}


def test_an_evaluation_may_end_the_run_which_is_then_over_when_it_is_resumed(tmp_path):
    asked = []

    def evaluate(state: TrainState, done: int) -> bool:
        asked.append(done)
        return done == 3

    given = {"evaluate": evaluate, "eval_every": 3, "snapshot_every": 3, "steps": 9}
    first = taught(tmp_path, **given)
    assert len(first.losses) == 3
    again = taught(tmp_path, **given)
    assert again.losses == first.losses
    assert same(weights(again), weights(first))
    assert asked == [0, 3, 0, 3]


def written(log: Path) -> int:
    """Steps that a log tells of."""
    return len(log.read_text().splitlines()) if log.exists() else 0


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"techniques": ["fp16"], "optimizer": {"adamw": {"lr": 0.02}}},
        {"techniques": [{"fp16": {"init_scale": 1e38}}]},
        {"optimizer": {"sgd": {"lr": 0.1}}},
        {"optimizer": "adamw-8bit"},
        {
            "max_grad_norm": None,
            "techniques": ["optimizer-in-backward"],
            "optimizer": {"adamw": {"implementation": "loop"}},
        },
        {"ema": 0.5},
        {"ema": 0.5, "optimizer": {"sgd": {"lr": 0.1}}},
        {"freeze": ["bias"], "ema": 0.5, "optimizer": "adamw-8bit"},
        {"techniques": [{"gradient-accumulation": {"rows": 4}}], "schedule": {"onecycle": {"warmup": 0.5}}},
    ],
    ids=str,
)
def test_an_interrupted_run_goes_on_to_the_same_losses_and_weights(tmp_path, changes):
    pytest.importorskip("torchao") if changes.get("optimizer") == "adamw-8bit" else None
    whole = taught(tmp_path / "whole", **changes)
    for stop in (1, 3):
        with pytest.raises(KeyboardInterrupt):
            taught(tmp_path / "part", make=partial(Stopping, stop), **changes)
    part = taught(tmp_path / "part", **changes)
    assert part.losses == whole.losses
    assert len(part.losses) == 6
    assert same(weights(part), weights(whole))
    assert [line["step"] for line in read_lines(tmp_path / "part" / LOG)] == [1, 2, 3, 4, 5, 6]


def test_a_request_to_stop_is_heard_at_the_end_of_a_step_and_a_second_one_at_once():
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with catch_signals() as stop:
        assert not stop.is_set()
        signal.raise_signal(signal.SIGTERM)
        assert stop.is_set()
        signal.raise_signal(signal.SIGTERM)  # the same request, by another way
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


class Stalling(BatchLoader):
    """Its third batch never comes: a request to stop does."""

    def __iter__(self):
        yield from islice(super().__iter__(), 2)
        signal.raise_signal(signal.SIGTERM)
        time.sleep(60)


def stop_in_evaluation(state: TrainState, done: int) -> bool:
    signal.raise_signal(signal.SIGTERM)
    state.stop_if_asked()
    pytest.fail("the evaluation went on")


@pytest.mark.parametrize("moment", ["a wait for data", "an evaluation"])
def test_a_request_to_stop_is_heard_between_two_steps_and_leaves_a_snapshot(moment, tmp_path, monkeypatch):
    whole = taught(tmp_path / "whole")
    stopping = {"eval_every": 2, "evaluate": lambda state, done: bool(done and stop_in_evaluation(state, done))}
    with monkeypatch.context() as patch:
        if moment == "a wait for data":
            patch.setattr("train.trainer.BatchLoader", Stalling)
        with pytest.raises(KeyboardInterrupt):
            taught(tmp_path / "part", **stopping if moment == "an evaluation" else {})
    assert [path.name for path in (tmp_path / "part" / SNAPSHOTS).glob("*.json")] == ["step-000000002.json"]
    assert taught(tmp_path / "part").losses == whole.losses


@pytest.mark.parametrize(
    ("raised", "kind", "said"),
    [
        (MemoryError(), OutOfMemory, "the machine ran out of memory: MemoryError"),
        (
            RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
                         "you tried to allocate 8 bytes. Error code 12 (Cannot allocate memory)\nframe #0: stack"),
            OutOfMemory, "the machine ran out of memory: .*Cannot allocate memory.$",
        ),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), OutOfMemory, "the device ran out of"),
        (RuntimeError("shapes do not fit"), RuntimeError, "^shapes do not fit$"),
    ],
)  # fmt: skip
def test_what_torch_says_without_memory_is_known_from_other_failures(raised, kind, said):
    with pytest.raises(kind, match=said), translate_memory_errors():
        raise raised


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """A recipe, and `laconic finetune` over it, which may be asked to stop in a pass."""
    values, labels = samples()
    np.savez(tmp_path / "data.npz", x=values, label=labels)
    torch.manual_seed(0)
    torch.save(Stopping().state_dict(), tmp_path / "weights.pt")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "source: weights.pt\nbuilder: test_loop:Stopping\ndata: data.npz\nbatch_size: 8\nsteps: 7\n"
        "snapshot_every: 100\noptimizer: {adamw: {lr: 0.02}}\nloader: {workers: 0}\n"
    )
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    given = ["finetune", "--trust", "--recipe", str(recipe), "--json", "-o"]

    def run(output: str, stop: int = -1) -> tuple[int, str, str]:
        monkeypatch.setenv(STOP, str(stop))
        monkeypatch.setattr(sys, "argv", ["laconic", *given, str(tmp_path / output)])
        with pytest.raises(SystemExit) as stopped:
            main()
        shown = capsys.readouterr()
        return stopped.value.code, shown.out, shown.err

    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


def test_the_command_stops_when_it_is_asked_to_and_the_same_command_goes_on(command, tmp_path):
    code, out, err = command("tuned", stop=3)
    assert (code, out) == (INTERRUPTED, "")
    assert err.splitlines()[-1].startswith("laconic: interrupted. No partial output was left")
    assert "Traceback" not in err
    assert not (tmp_path / "tuned").exists()
    assert [path.name for path in (tmp_path / "tuned.training" / SNAPSHOTS).glob("*.json")] == ["step-000000003.json"]
    assert len(read_lines(tmp_path / "tuned.training" / LOG)) == 3

    code, out, _ = command("tuned")
    assert code == 0
    assert not (tmp_path / "tuned.training").exists()
    code, whole, _ = command("whole")
    assert code == 0
    assert json.loads(out)["losses"] == json.loads(whole)["losses"]
    assert len(json.loads(out)["losses"]) == 7
    assert json.loads(out)["before"] == json.loads(whole)["before"]
    for name in ("model.safetensors", "model.json"):
        assert (tmp_path / "tuned" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    steps = [line["step"] for line in read_lines(tmp_path / "tuned" / "training" / LOG)]
    assert steps == [1, 2, 3, 4, 5, 6, 7]
