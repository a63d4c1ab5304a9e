"""Several ranks learn as one: the same losses as on one, whatever the mesh."""

import json
import os
import signal
import subprocess
import sys
import threading
from contextlib import nullcontext

import pytest
import torch
import transformers
from rank_processes import SECONDS, by_two_ranks
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.functional import cross_entropy

from laconic.errors import DataError, RecipeError, TrainingFailure, UsageError
from train.data.batch_sampler import BatchSampler
from train.objectives.array_targets import Targets
from train.optimizers.adamw import AdamW
from train.optimizers.parameterwise import local
from train.parallel.mesh import Mesh
from train.parallel.rank_groups import check_backend
from train.parallel.ranks import Ranks, open_ranks
from train.run_snapshot import resume, save_snapshot
from train.settings import Training
from train.snapshots.snapshot import Snapshots
from train.snapshots.snapshot_manifest import list_steps
from train.snapshots.tensor_packs import PackWriter
from train.step.parallel_strategy import ParallelStrategy
from train.step.train_step import train_step
from train.step_assembly import distribute_step, make_step_parts

CPU = torch.device("cpu")
COUNT, BATCH, STEPS, KEPT = 21, 5, 7, 3
"""Ranks have 2 and 3 rows of a batch, and of an epoch's last none and 1."""
PARTS = {"gradient-accumulation": {"rows": 1}}
LESS = {"freeze": ["embedding"], "layer_decay": 0.5, "ema": 0.4}
LEAST = LESS | {"freeze": ["embedding", "layers.0", "bias"]}
RUNS = {
    "replicas": ({}, ()),
    "replicas, parts": ({"replicate": 2}, (PARTS, "gradient-checkpointing")),
    "replicas, fp16": ({"compress": "fp16"}, ()),
    "shards": ({"shard": None}, ()),
    "shards, parts": ({"shard": 2}, (PARTS, "gradient-checkpointing")),
    "shards, bf16 on the host": ({"shard": None, "precision": "bf16", "offload": True}, ()),
    "replicas, all three": ({}, (), LEAST),
    "shards, all three": ({"shard": None}, (), LEAST),
    "replicas, all three in parts": ({}, (PARTS, "gradient-checkpointing"), LESS),
    "shards, all three in parts": ({"shard": None}, (PARTS, "gradient-checkpointing"), LESS),
    "shards, all three in bf16 on the host": ({"shard": None, "precision": "bf16", "offload": True}, (), LESS),
}
KILLED = {"replicas": {}, "shards": {"shard": None}, "shards on the host": {"shard": None, "offload": True}}
"""Meshes of runs that are killed, with all of LESS."""


class Classifier(nn.Module):
    """A transformer: [rows, tokens] int64 to [rows, 3]. `spare` is never used."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(17, 8)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 15, dropout=0.0, batch_first=True) for _ in "abc")
        self.spare = nn.Linear(8, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean(dim=1))


def rows_of(numbers):
    torch.manual_seed(1)
    ids, targets = torch.randint(17, (COUNT, 6)), torch.randint(3, (COUNT,))
    return {"ids": ids[numbers], "targets": targets[numbers]}


def settings(mesh, techniques=(), changes=(), optimizer="adamw", clip=0.5):
    given = {"batch_size": BATCH, "optimizer": {optimizer: {"lr": 1e-2}}, "max_grad_norm": clip}
    return Training(mesh=mesh, techniques=techniques, **given | dict(changes))


def assembled(training, ranks, model=None):
    torch.manual_seed(2)
    parts = make_step_parts(model or Classifier(), Targets(None), training.components(), CPU)
    distribute_step(parts, training, ranks)
    return parts.assemble()


def learn(state, training, ranks, start=0, stop=STEPS):
    order = BatchSampler(COUNT, training.batch_size, seed=0, rank=ranks.rank, world=ranks.world)
    return [
        float(train_step(state, rows_of(order.batch(number)), max_grad_norm=training.max_grad_norm))
        for number in range(start, stop)
    ]


def answers(module):
    with torch.no_grad():
        return module(rows_of([0, 1, 2])["ids"]).float()


def content_of(state):
    return {"model": state.weights(), "optimizer": state.optimizer.state_dict()}


# What the ranks do


def run_each(rank, folder):
    """Every run, its losses and its module's answers at the end."""
    found = {}
    with open_ranks(CPU, Mesh()):
        for name, run in RUNS.items():
            training = settings(*run)
            ranks = Ranks.of(rank, 2, CPU, training.mesh)
            state = assembled(training, ranks)
            losses = learn(state, training, ranks)
            if training.mesh.precision == "bf16":
                moments = [value for values in state.optimizer.state.values() for value in values.values()]
                held = [value for value in (*state.weights().values(), *moments) if isinstance(value, torch.Tensor)]
                assert {value.dtype for value in held} == {torch.float32}, "BF16 is computed in, and not kept"
            state.keep_averages()
            found[name] = {"losses": losses, "answers": answers(state.finish()).tolist()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def shard_and_keep(rank, folder):
    """A sharded run that ends after a snapshot, and what can be seen of it on the way."""
    training = settings({"shard": None})
    with open_ranks(CPU, training.mesh) as ranks:
        assert ranks.any(rank == 1)
        assert not ranks.any(False)
        state = assembled(training, ranks)
        with state.strategy.gather_weights():
            assert torch.equal(answers(state.module), answers(Classifier()))
        losses = learn(state, training, ranks, 0, KEPT)
        assert all(isinstance(weight, DTensor) for weight in state.weights().values())
        held = sum(weight.to_local().numel() for weight in state.weights().values())
        assert 0.45 < held / sum(weight.numel() for weight in Classifier().parameters()) < 0.55
        with Snapshots(folder / "snapshots") as snapshots:
            snapshots.save(KEPT, content_of(state), wait=True)
        with state.strategy.gather_weights():
            during = answers(state.module)
        losses += learn(state, training, ranks, KEPT)
        (folder / "losses.json").write_text(json.dumps(losses))
        state = assembled(training, ranks)
        with Snapshots(folder / "snapshots") as snapshots:
            learn(state, training, ranks, 0, 1)
            assert snapshots.load(content_of(state)) == KEPT
        module = state.finish()
        assert torch.equal(answers(module), during)
        assert [type(layer) for layer in module.layers] == [nn.TransformerEncoderLayer] * 3
        assert list(vars(module.layers[0])) == list(vars(Classifier().layers[0]))
        module(rows_of([0])["ids"]).sum().backward()
        module.load_state_dict(Classifier().state_dict())
        assert torch.equal(answers(module), answers(Classifier()))


def begin(name, ranks):
    """A run of KILLED before its first step, with all that a snapshot keeps."""
    training = settings(KILLED[name] if ranks.world > 1 else {}, (), LESS)
    state = assembled(training, ranks)
    state.scheduler = training.components().schedule.build(state.optimizer, STEPS)
    return state, training


def step_on(state, training, ranks, losses, stop):
    """Steps at the rates of the schedule, up to `stop`."""
    for number in range(len(losses), stop):
        losses += learn(state, training, ranks, number, number + 1)
        state.scheduler.step()


def averaged_answers(state):
    """What an evaluation during the run sees."""
    with state.averaged_weights(), state.strategy.gather_weights():
        return answers(state.module).tolist()


def train_until_killed(rank, folder):
    """A snapshot of each run after some steps, one more step before one of the ranks has written its part, and then the
    end of the process."""
    may_write, write = threading.Event(), PackWriter.write_data
    if rank == 1:
        PackWriter.write_data = lambda *args: may_write.wait(SECONDS) and write(*args)
    with open_ranks(CPU, Mesh()):
        for name in KILLED:
            ranks = Ranks.of(rank, 2, CPU, Mesh(**KILLED[name]))
            state, training = begin(name, ranks)
            losses = []
            step_on(state, training, ranks, losses, KEPT)
            averaged_answers(state)
            may_write.clear()
            with Snapshots(folder / name) as snapshots:
                save_snapshot(snapshots, state, losses, wait=False)
                step_on(state, training, ranks, losses, KEPT + 1)
                assert not list_steps(folder / name)
                may_write.set()
        ranks.any(False)  # a barrier: both are done
        os.kill(os.getpid(), signal.SIGKILL)


def go_on(rank, folder):
    """The runs that were killed, from their snapshots to the end."""
    found = {}
    with open_ranks(CPU, Mesh()):
        for name in KILLED:
            ranks = Ranks.of(rank, 2, CPU, Mesh(**KILLED[name]))
            state, training = begin(name, ranks)
            rows = BatchSampler(COUNT, BATCH, seed=0, rank=rank, world=2).batch(0)
            with Snapshots(folder / name) as snapshots:
                losses = resume(state, snapshots, rows_of(rows))
            resumed = len(losses), averaged_answers(state)
            step_on(state, training, ranks, losses, STEPS)
            state.keep_averages()
            found[name] = {"resumed": resumed, "losses": losses, "answers": answers(state.finish()).tolist()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


class IgnoringTargets(Targets):
    """Classes, of which one below 0 is ignored: a term for each of the others."""

    def count_terms(self, batch):
        return int((batch["targets"] >= 0).sum())

    def loss(self, module, batch):
        return cross_entropy(module(batch["ids"]), batch["targets"], ignore_index=-1, reduction="sum")


UNLABELLED = {1: {1}, 2: {0, 1}, 4: {0}}
"""By the number of a batch, the ranks whose rows have no labels."""


def learn_without_terms(training, ranks):
    """The losses of some batches, None for one that was skipped, and the answers of the trained module."""
    parts = make_step_parts(Classifier(), IgnoringTargets(None), training.components(), CPU)
    distribute_step(parts, training, ranks)
    state, losses = parts.assemble(), []
    for number in range(STEPS):
        batches = []
        for rank in [ranks.rank] if ranks.world == 2 else range(2):
            order = BatchSampler(COUNT, BATCH, seed=0, rank=rank, world=2)
            batches.append(rows_of(order.batch(number)))
            batches[-1]["targets"] -= 10 * (rank in UNLABELLED.get(number, ()))
        batch = {name: torch.cat([each[name] for each in batches]) for name in batches[0]}
        batch["targets"] = batch["targets"].clamp(min=-1)
        loss = train_step(state, batch, max_grad_norm=training.max_grad_norm)
        losses.append(None if loss is None else float(loss))
    return {"losses": losses, "answers": answers(state.finish()).tolist()}


WITHOUT_TERMS = {
    "replicas": ({}, ()),
    "replicas, parts": ({}, (PARTS,)),
    "shards": ({"shard": None}, ()),
    "shards, parts": ({"shard": None}, (PARTS,)),
}


def step_without_terms(rank, folder):
    with open_ranks(CPU, Mesh()):
        found = {
            name: learn_without_terms(settings(*run), Ranks.of(rank, 2, CPU, Mesh(**run[0])))
            for name, run in WITHOUT_TERMS.items()
        }
    (folder / f"{rank}.json").write_text(json.dumps(found))


def round_weights(rank, folder):
    """A step of equal weights, which each rank holds whole, and of which each holds a shard."""
    with open_ranks(CPU, Mesh()):
        mesh = Ranks.of(rank, 2, CPU, Mesh(shard=None)).axes
        torch.manual_seed(3)
        weights = {
            "whole": nn.Parameter(torch.ones(16, 64, dtype=torch.bfloat16)),
            "sharded": nn.Parameter(distribute_tensor(torch.ones(16, 64, dtype=torch.bfloat16), mesh, [Shard(0)])),
        }
        optimizer = AdamW(lr=1e-3, stochastic_rounding=True).build([{"params": list(weights.values())}])
        for weight in weights.values():
            weight.grad = torch.ones_like(weight)
        optimizer.step()
        found = {name: local(weight).tolist() for name, weight in weights.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def fail_on_one(rank, folder):
    training = settings({})
    try:
        with open_ranks(CPU, Mesh(timeout=SECONDS)) as ranks:
            state = assembled(training, ranks)
            learn(state, training, ranks, 0, 1)
            if rank == 1:
                raise DataError("row 7 does not fit")
            learn(state, training, ranks, 1, 2)
    except (DataError, TrainingFailure) as error:
        (folder / f"{rank}.txt").write_text(f"{type(error).__name__}: {error}")
        sys.exit(error.exit_code)


# What comes of it


@pytest.fixture(scope="module")
def together(tmp_path_factory):
    folder = tmp_path_factory.mktemp("together")
    with pytest.MonkeyPatch.context() as patch:
        assert by_two_ranks(run_each, folder, patch) == [0, 0]
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="module")
def alone():
    """The same on one rank."""
    found = {}
    for name, (_, *more) in RUNS.items():
        training = settings({}, *more)
        state = assembled(training, Ranks())
        losses = learn(state, training, Ranks())
        state.keep_averages()
        found[name] = {"losses": losses, "answers": answers(state.finish()).tolist()}
    return found


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_have_the_losses_of_one_and_both_the_whole_model_at_the_end(name, together, alone):
    first, second = (rank[name] for rank in together)
    assert first == second
    exact = "16" not in name
    assert first["losses"] == pytest.approx(alone[name]["losses"], abs=1e-5 if exact else 5e-3)
    assert torch.tensor(first["answers"]).allclose(torch.tensor(alone[name]["answers"]), atol=1e-3 if exact else 5e-2)
    assert exact or first["losses"] != together[0]["replicas"]["losses"]


@pytest.mark.sweep
def test_a_run_of_two_ranks_goes_on_alone(tmp_path, monkeypatch, alone):
    assert by_two_ranks(shard_and_keep, tmp_path, monkeypatch) == [0, 0]
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(alone["replicas"]["losses"], abs=1e-5)
    training = settings({})
    state = assembled(training, Ranks())
    learn(state, training, Ranks(), 0, 1)  # so that there is room for the optimizer's state
    with Snapshots(tmp_path / "snapshots") as snapshots:
        assert snapshots.load(content_of(state)) == KEPT
    losses = learn(state, training, Ranks(), KEPT, STEPS)
    assert losses == pytest.approx(alone["replicas"]["losses"][KEPT:], abs=1e-5)


def test_ranks_wait_for_none_that_writes_slowly_and_a_killed_run_keeps_what_is_frozen_and_averaged(
    tmp_path, monkeypatch
):
    assert by_two_ranks(train_until_killed, tmp_path, monkeypatch) == [-signal.SIGKILL] * 2
    assert by_two_ranks(go_on, tmp_path, monkeypatch) == [0, 0]
    state, training = begin("replicas", Ranks())
    expected = []
    step_on(state, training, Ranks(), expected, KEPT)
    kept = averaged_answers(state)
    step_on(state, training, Ranks(), expected, STEPS)
    state.keep_averages()
    module = state.finish()
    assert torch.equal(module.embedding.weight, Classifier().embedding.weight)
    for rank in range(2):
        for found in json.loads((tmp_path / f"{rank}.json").read_text()).values():
            steps, resumed = found["resumed"]
            assert steps == KEPT
            assert torch.tensor(resumed).allclose(torch.tensor(kept), atol=1e-3)
            assert found["losses"] == pytest.approx(expected, abs=1e-5)
            assert torch.tensor(found["answers"]).allclose(answers(module), atol=1e-3)


def read_ranks(folder):
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_ranks_without_loss_terms_learn_as_one_process_and_skip_a_batch_together(tmp_path, monkeypatch):
    assert by_two_ranks(step_without_terms, tmp_path, monkeypatch) == [0, 0]
    first, second = read_ranks(tmp_path)
    assert first == second
    expected = learn_without_terms(settings({}), Ranks())
    assert [loss is None for loss in expected["losses"]] == [number == 2 for number in range(STEPS)]
    for name, (_, techniques) in WITHOUT_TERMS.items():
        assert learn_without_terms(settings({}, techniques), Ranks())["losses"] == pytest.approx(
            expected["losses"], abs=1e-5
        )
        assert first[name]["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        assert torch.tensor(first[name]["answers"]).allclose(torch.tensor(expected["answers"]), atol=1e-3)


def test_stochastic_rounding_is_the_same_on_replicas_and_another_on_each_shard(tmp_path, monkeypatch):
    assert by_two_ranks(round_weights, tmp_path, monkeypatch) == [0, 0]
    first, second = read_ranks(tmp_path)
    assert first["whole"] == second["whole"]
    assert first["sharded"] != second["sharded"]
    assert first["sharded"] != first["whole"][:8]
    shards = [torch.tensor(rank["sharded"]) < 1 for rank in (first, second)]
    assert 0 < (shards[0] == shards[1]).float().mean() < 0.9


def test_a_rank_that_fails_ends_the_other_and_says_why(tmp_path, monkeypatch):
    assert by_two_ranks(fail_on_one, tmp_path, monkeypatch) == [1, 2]
    assert (tmp_path / "1.txt").read_text() == "DataError: row 7 does not fit"
    assert (tmp_path / "0.txt").read_text().startswith("TrainingFailure: rank 0 stopped, since another rank has")


class TermsOfAnotherRank(ParallelStrategy):
    """All rows of the batch are another rank's."""

    def reduce_terms(self, terms):
        return 4.0


@pytest.mark.parametrize("kind", ["Bert", "Llama", "ViT"])
def test_a_rank_without_rows_has_no_loss_and_gradients_of_zero(kind):
    sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    text = {"vocab_size": 17, "pad_token_id": 0, "use_cache": False}
    config = getattr(transformers, f"{kind}Config")(**sizes, **({"image_size": 32} if kind == "ViT" else text))
    name = f"{kind}For{'Image' if kind == 'ViT' else 'Sequence'}Classification"
    parts = make_step_parts(getattr(transformers, name)(config), Targets(None), settings({}).components(), CPU)
    parts.parallelize(TermsOfAnotherRank())
    state = parts.assemble()
    state.optimizer = torch.optim.SGD(state.module.parameters(), lr=1.0)
    before = {name: weight.clone() for name, weight in state.module.named_parameters()}
    ids = torch.zeros(0, 5, dtype=torch.int64)
    inputs = {"pixel_values": torch.zeros(0, 3, 32, 32)} if kind == "ViT" else {"input_ids": ids, "attention_mask": ids}
    assert train_step(state, {**inputs, "targets": torch.zeros(0, dtype=torch.int64)}) == 0
    assert all(torch.equal(weight, before[name]) for name, weight in state.module.named_parameters())


@pytest.mark.parametrize("techniques", [(), ("lora",)])
def test_one_rank_with_shards_learns_as_one_without(techniques):
    expected = learn(assembled(settings({}, techniques), Ranks()), settings({}), Ranks())
    training = settings({"shard": None}, techniques)
    with open_ranks(CPU, training.mesh) as ranks:
        assert (ranks.world, ranks.is_first) == (1, True)
        state = assembled(training, ranks)
        assert isinstance(next(state.module.parameters()), DTensor)
        assert learn(state, training, ranks) == pytest.approx(expected, abs=1e-5)
        state.finish()
    assert not torch.distributed.is_initialized()


def test_a_process_group_that_is_open_is_used_and_stays_open():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        with open_ranks(CPU, Mesh(shard=None)) as ranks:
            assert ranks.axes is not None
            with pytest.raises(UsageError, match="open with the backend cpu:gloo,cuda:gloo, and cpu:gloo,cuda:nccl is"):
                check_backend("cpu:gloo,cuda:nccl")
        assert torch.distributed.is_initialized()
    finally:
        torch.distributed.destroy_process_group()


def test_python_m_laconic_is_the_command():
    run = subprocess.run([sys.executable, "-m", "laconic", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.strip()


# What cannot be


@pytest.mark.parametrize(
    ("mesh", "world", "expected"),
    [
        ({}, 1, (1, 1, 1, 1, 1)),
        ({}, 8, (1, 8, 1, 1, 1)),
        ({"shard": None}, 8, (1, 1, 8, 1, 1)),
        ({"shard": 4}, 8, (1, 2, 4, 1, 1)),
        ({"replicate": 2, "shard": None}, 8, (1, 2, 4, 1, 1)),
        ({"tensor": 2}, 8, (1, 4, 1, 1, 2)),
        ({"tensor": 2, "shard": None}, 8, (1, 1, 4, 1, 2)),
        ({"context": 2, "shard": None}, 8, (1, 1, 4, 2, 1)),
        ({"replicate": 2}, 8, None),
        ({"shard": 3}, 8, None),
        ({"tensor": 3}, 8, None),
        ({"tensor": 16}, 8, None),
    ],
)
def test_what_is_left_open_takes_the_ranks_that_are_left_or_is_refused(mesh, world, expected):
    refused = pytest.raises(RecipeError, match=r"ranks \(.*\) were expected, and 8 were started")
    with nullcontext() if expected else refused:
        assert Mesh(**mesh).resolve(world) == expected


@pytest.mark.parametrize(
    ("mesh", "message"),
    [
        ({"tensor": 2, "compress": "fp16"}, "compress is for replicas"),
        ({"tensor": 2, "pipeline": 2, "schedule": "zbv"}, "tensor takes one stage on a rank, and zbv has two"),
        ({"sequence": True}, "sequence spreads positions over the ranks of tensor: 2 or more"),
        ({"tensor": 2, "pipeline": 2, "sequence": True}, "2 or more, without pipeline"),
        ({"context": 2, "tensor": 2}, "context is for ranks that have whole layers"),
        ({"context": 2, "pipeline": 2}, "context is for ranks that have whole layers"),
        ({"context": 2, "zero": 2, "shard": None}, "context is for other meshes"),
        ({"pipeline": 4, "compress": "fp16"}, "compress is for replicas"),
        ({"compress": "fp16", "shard": None}, "compress is for replicas"),
        ({"precision": "bf16"}, "precision is for shards"),
        ({"offload": True}, "offload is for shards"),
        ({"replicas": 2}, "Did you mean 'replicate'"),
    ],
)
def test_settings_without_a_place_are_refused(mesh, message):
    with pytest.raises(ValueError, match=message):
        Mesh(**mesh)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        (
            settings({"shard": None}, ("optimizer-in-backward",), clip=None),
            r"optimizer-in-backward and mesh \(shard\) cannot be combined",
        ),
        (settings({"shard": None}, ("layerwise",)), r"layerwise and mesh \(shard\) cannot be combined"),
        (
            settings({"shard": None}, ("activation-offload",)),
            r"activation-offload and mesh \(shard\) cannot be combined",
        ),
        (settings({"shard": None}, ("fp16",)), r"fp16 and mesh \(shard\) cannot be combined"),
        (settings({"shard": None}, optimizer="adafactor"), "Adafactor needs whole weights"),
    ],
)
def test_what_cannot_be_sharded_is_refused_with_the_reason(training, message):
    with open_ranks(CPU, training.mesh) as ranks, pytest.raises(RecipeError, match=message):
        assembled(training, ranks)


def test_gradients_in_bf16_between_processors_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RecipeError, match="between GPUs alone"), open_ranks(CPU, Mesh(compress="bf16")):
        pass


def test_a_task_that_compares_rows_and_a_single_number_are_refused():
    parts = make_step_parts(Classifier(), Targets(None), settings({}).components(), CPU)
    parts.objective.splittable = False
    with pytest.raises(RecipeError, match="each rank sees its own alone"):
        distribute_step(parts, settings({}), Ranks.of(0, 2, CPU, Mesh()))
    model = Classifier()
    model.scale = nn.Parameter(torch.tensor(1.0))
    training = settings({"shard": None})
    with open_ranks(CPU, training.mesh) as ranks, pytest.raises(RecipeError, match="scale is a single number"):
        assembled(training, ranks, model)
