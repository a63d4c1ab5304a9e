"""Snapshots of a training run: whole or not there, not written twice, read on any number of ranks."""

import copy
import json
import os
import resource
import shutil
import subprocess
import sys
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from rank_processes import by_two_ranks
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from laconic.errors import SourceError, TrainingFailure, UnknownFormat, UsageError
from laconic.hashing import seal, unseal
from train.snapshots.snapshot import Snapshots
from train.snapshots.snapshot_manifest import PACKS, manifest_path

KILLS = Path(__file__).parents[1] / "benchmarks" / "kills.py"


@pytest.fixture
def snapshots(tmp_path):
    with Snapshots(tmp_path / "snapshots") as opened:
        yield opened


def state_of(value=1.0):
    return {
        "model": {"block.weight": torch.full((4, 3), value), "block.bias": torch.full((4,), value)},
        "loop": {"step": int(value)},
    }


def network(wide=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, wide), nn.Tanh(), nn.Linear(wide, 3))


def train(model, optimizer, steps, seed=0):
    losses = []
    for number in range(steps):
        generator = torch.Generator().manual_seed(seed + number)
        loss = model(torch.randn(4, 6, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().item())
    return losses


def whole_state(model, optimizer, **loop):
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "loop": loop,
    }


def assert_same(one, other):
    """Bit for bit, types and all."""
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key in one:
            assert_same(one[key], other[key])
    elif isinstance(one, (list, tuple)):
        assert len(one) == len(other)
        for left, right in zip(one, other, strict=True):
            assert_same(left, right)
    else:
        assert one == other


def blank(state):
    """A state of the same form, with nothing in it."""
    emptied = copy.deepcopy(state)
    for tensor in (tensor for part in emptied.values() for tensor in part.values() if isinstance(tensor, torch.Tensor)):
        tensor.zero_()
    return emptied


def packs(snapshots):
    return {path.name: path.stat().st_mtime_ns for path in (snapshots.folder / PACKS).iterdir()}


# What comes back


def test_every_dtype_and_shape_comes_back_bit_for_bit(snapshots):
    bits = torch.arange(-60, 60)
    dtypes = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.uint8)
    state = {
        "tensors": {str(dtype): bits.to(dtype).reshape(4, 30) for dtype in dtypes}
        | {
            "float8": bits.float().to(torch.float8_e4m3fn),
            "bool": bits > 0,
            "scalar": torch.tensor(3.5),
            "empty": torch.empty(0, 3),
            "transposed": torch.randn(5, 7).T,
            "view": torch.randn(10, 4)[2:5],
            "nan": torch.tensor([float("nan"), -0.0, float("inf")]),
        }
    }
    snapshots.save(7, state)
    loaded = blank(state)
    assert snapshots.load(loaded) == 7
    assert_same(loaded, state)


def test_plain_values_come_back_as_they_were_with_their_tuples(snapshots):
    state = {"loop": {"step": 3, "rate": 1e-4, "betas": (0.9, (0.95, 1)), "done": False, "name": None, "seen": [1, 2]}}
    snapshots.save(3, state)
    loaded = {"loop": {"betas": (0.0, (0.0, 0)), "step": 0}}
    snapshots.load(loaded)
    assert_same(loaded, state)


def test_training_goes_on_to_the_same_losses(snapshots):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer, 3)
    snapshots.save(3, whole_state(model, optimizer, step=3))
    expected = train(model, optimizer, 3, seed=3)

    fresh = network()
    again = torch.optim.AdamW(fresh.parameters(), lr=0.5)
    state = whole_state(fresh, again, step=0)
    snapshots.load(state)
    set_model_state_dict(fresh, state["model"])
    set_optimizer_state_dict(fresh, again, state["optimizer"])
    assert again.param_groups[0]["lr"] == 0.01
    assert train(fresh, again, 3, seed=3) == expected


@pytest.mark.parametrize("bits", [8, 4])
def test_the_quantized_state_of_an_optimizer_comes_back(snapshots, bits):
    optim = pytest.importorskip("torchao.optim")
    make = {8: optim.AdamW8bit, 4: optim.AdamW4bit}[bits]

    def trained(steps):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 6))
        optimizer = make(model.parameters(), lr=0.01)
        return model, optimizer, more(model, optimizer, steps)

    def more(model, optimizer, steps):
        with torch.compiler.set_stance("force_eager"):
            losses = []
            for number in range(steps):
                generator = torch.Generator().manual_seed(number)
                loss = model(torch.randn(4, 64, generator=generator)).square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses

    model, optimizer, _ = trained(3)
    assert hasattr(optimizer.state[model[0].weight]["exp_avg"], "__tensor_flatten__")
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    snapshots.save(3, state, wait=True)
    expected = more(model, optimizer, 3)

    model, optimizer, _ = trained(1)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    snapshots.load(state)
    optimizer.load_state_dict(state["optimizer"])
    assert more(model, optimizer, 3) == expected


# In the background


def test_what_changes_after_the_call_is_not_in_the_snapshot(snapshots):
    state = {"model": {"w": torch.ones(2_000_000)}, "loop": {"step": 1, "seen": [1]}}
    expected = copy.deepcopy(state)
    snapshots.save(1, state)
    state["model"]["w"].fill_(2)
    state["loop"]["step"] = 2
    state["loop"]["seen"].append(2)
    snapshots.load(state)
    assert_same(state, expected)
    snapshots.save(10, state_of())
    with pytest.raises(UsageError, match=r"holds a snapshot of step 10, and step 2 would come after it"):
        snapshots.save(2, state_of(2.0))
    snapshots.save(10, state_of(3.0))
    loaded = blank(state_of())
    assert snapshots.load(loaded) == 10
    assert_same(loaded, state_of(3.0))


def test_a_write_that_fails_is_told_at_the_next_call_and_the_one_before_is_kept(snapshots):
    state = {"model": {"w": torch.randn(500_000)}}
    snapshots.save(1, state, wait=True)
    expected = copy.deepcopy(state)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, limit[1]))  # as a full disk does, a write ends half-way
    try:
        state["model"]["w"].add_(1)
        snapshots.save(2, state)
        with pytest.raises(TrainingFailure, match=r"step 2 could not be written .* step 1 is kept.*Make room"):
            snapshots.save(3, state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert len(list(snapshots.folder.rglob("*"))) == 3, "one manifest, the folder of packs, one pack"
    assert snapshots.load(state) == 1
    assert_same(state, expected)


# What is not written again


def test_frozen_weights_are_written_once(snapshots):
    state = {
        "model": {"base.weight": torch.randn(1000, 1000), "lora.weight": torch.randn(8, 1000)},
        "optimizer": {"state": {"lora.weight": {"exp_avg": torch.randn(8, 1000)}}},
    }
    snapshots.save(1, state, wait=True)
    (base,) = first = packs(snapshots)
    for step in range(2, 6):
        state["model"]["lora.weight"].add_(1)
        state["optimizer"]["state"]["lora.weight"]["exp_avg"].add_(1)
        snapshots.save(step, state, wait=True)
        now = packs(snapshots)
        assert now[base] == first[base], "the pack with the base was touched"
        new = [(snapshots.folder / PACKS / name).stat().st_size for name in now if name != base]
        assert sum(new) < 3 * 70_000, "what changed, of two snapshots"


def test_an_unchanged_state_costs_a_card_and_only_the_newest_are_kept(snapshots):
    snapshots.save(1, state_of(), wait=True)
    before = packs(snapshots)
    snapshots.save(2, state_of(), wait=True)
    assert packs(snapshots) == before
    assert snapshots.latest() == 2
    for step in range(3, 8):
        snapshots.save(step, {"model": {"w": torch.full((10,), float(step))}})
    snapshots.close()
    assert sorted(path.name for path in snapshots.folder.glob("step-*")) == [
        "step-000000006.json",
        "step-000000007.json",
    ]
    assert len(packs(snapshots)) == 2


def test_what_is_equal_is_kept_once_and_large_states_are_cut_into_packs(snapshots, monkeypatch):
    weight = torch.randn(300, 300)
    state = {"model": {"embed": weight, "head": weight}}
    snapshots.save(1, state, wait=True)
    (pack,) = packs(snapshots)
    assert len(load_file(snapshots.folder / PACKS / pack)) == 1
    loaded = {"model": {"embed": torch.zeros(300, 300), "head": torch.zeros(300, 300)}}
    snapshots.load(loaded)
    assert_same(loaded, state)
    monkeypatch.setattr("train.snapshots.tensor_packs.PACK_SIZE", 4000)
    state = {"model": {str(number): torch.randn(300) for number in range(10)}}
    snapshots.save(1, state)
    loaded = blank(state)
    snapshots.load(loaded)
    assert_same(loaded, state)
    assert len(packs(snapshots)) == 3


def test_the_same_states_give_the_same_bytes(tmp_path):
    contents = []
    for name in ("one", "other"):
        with Snapshots(tmp_path / name) as snapshots:
            for step in (1, 2):
                snapshots.save(step, state_of(float(step)))
        files = sorted(path for path in (tmp_path / name).rglob("*") if path.is_file())
        contents.append({path.name: path.read_bytes() for path in files})
    assert contents[0] == contents[1]
    assert len(contents[0]) == 4


# Damage


def flip(path):
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-20])


@pytest.mark.parametrize("harm", [flip, cut_short, Path.unlink], ids=["flipped", "cut short", "missing"])
@pytest.mark.parametrize("part", ["manifest", "pack"])
def test_a_damaged_snapshot_is_told_of_and_the_one_before_is_taken(snapshots, caplog, harm, part):
    snapshots.save(1, state_of(1.0), wait=True)
    old = packs(snapshots)
    snapshots.save(2, state_of(2.0), wait=True)
    (new,) = packs(snapshots).keys() - old.keys()
    harm(manifest_path(snapshots.folder, 2) if part == "manifest" else snapshots.folder / PACKS / new)

    loaded = blank(state_of())
    assert snapshots.load(loaded) == 1
    assert_same(loaded, state_of(1.0))
    if (harm, part) != (Path.unlink, "manifest"):
        assert "step 2 is damaged, the one before is taken" in caplog.text
    assert snapshots.latest() == 1

    # The damaged tensors are not taken for written.
    snapshots.save(2, state_of(2.0))
    assert snapshots.load(loaded) == 2
    assert_same(loaded, state_of(2.0))


def test_half_a_file_is_never_taken_for_a_whole_one_and_files_of_somebody_else_stay(snapshots):
    snapshots.save(1, state_of(), wait=True)
    for path in (snapshots.folder / ".step-000000002.json.1.half", snapshots.folder / PACKS / ".0.safetensors.1.half"):
        path.write_bytes(b"half")
    assert snapshots.latest() == 1
    snapshots.save(2, state_of(2.0), wait=True)
    assert not [path for path in snapshots.folder.rglob("*") if path.name.endswith(".half")]
    for path in (snapshots.folder / "notes.txt", snapshots.folder / PACKS / "model.safetensors"):
        path.write_text("mine")
    snapshots.save(3, state_of(), wait=True)
    assert (snapshots.folder / "notes.txt").read_text() == "mine"
    assert (snapshots.folder / PACKS / "model.safetensors").read_text() == "mine"


def test_where_no_snapshot_is_whole_or_the_folder_went_away_it_says_so(snapshots):
    assert snapshots.latest() is None
    with pytest.raises(SourceError, match="holds no intact snapshot"):
        snapshots.load(state_of())
    shutil.rmtree(snapshots.folder)
    with pytest.raises(TrainingFailure, match="Check that it still exists"):
        snapshots.save(1, state_of())


def test_killed_at_any_moment_nothing_is_lost():
    command = [sys.executable, str(KILLS), "--kills", "10"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "nothing lost" in done.stdout


# Refusals


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda model: model.pop("block.bias"), r"1 unexpected \(model.block.bias\)"),
        (lambda model: model.update(more=torch.zeros(1)), r"1 missing \(model.more\)"),
        (
            lambda model: model.update({"block.bias": torch.zeros(5)}),
            r"1 of another shape or dtype \(model.block.bias is float32 \[4\], expected float32 \[5\]\)",
        ),
        (lambda model: model.update({"block.bias": torch.zeros(4).bfloat16()}), r"expected bfloat16 \[4\]"),
        (lambda model: model.update({"block.bias": 3}), r"model.block.bias is float32 \[4\], expected a plain value"),
    ],
)
def test_the_snapshot_of_another_model_is_refused_by_the_names(snapshots, change, sentence):
    snapshots.save(1, state_of(), wait=True)
    other = blank(state_of())
    change(other["model"])
    before = copy.deepcopy(other)
    with pytest.raises(SourceError, match=sentence):
        snapshots.load(other)
    assert_same(other, before)


@pytest.mark.parametrize("value", [object(), {1, 2}, [torch.Size, 1], {"a": {3: print}}, (torch.ones(1), 1)])
def test_what_is_neither_tensor_nor_plain_and_two_things_of_one_name_are_refused(snapshots, value):
    with pytest.raises(UsageError, match=r"^loop\.thing.* of the state is a \w+\. A snapshot keeps tensors"):
        snapshots.save(1, {"loop": {"thing": value}})
    assert snapshots.latest() is None
    for state in ({"a.b": torch.ones(1), "a": {"b": torch.ones(2)}}, {"a.b": 1, "a": {"b": torch.ones(2)}}):
        with pytest.raises(UsageError, match=r"two things called 'a\.b'"):
            snapshots.save(1, state)


def test_a_newer_format_is_refused_and_a_card_cannot_name_files_elsewhere(snapshots):
    snapshots.save(1, state_of(), wait=True)
    path = manifest_path(snapshots.folder, 1)
    path.write_bytes(seal(unseal(path) | {"format": 2}))
    with pytest.raises(UnknownFormat, match="is of format 2"):
        snapshots.latest()
    with pytest.raises(UnknownFormat, match="is of format 2"):
        snapshots.save(2, state_of(), wait=True)
    assert path.is_file()
    path.unlink()
    snapshots.save(1, state_of(), wait=True)
    save_file({"a": torch.ones(1)}, snapshots.folder / "own.safetensors")
    path = manifest_path(snapshots.folder, 1)
    manifest = unseal(path)
    manifest["packs"] = {f"../{name}": pack for name, pack in manifest["packs"].items()}
    path.write_bytes(seal(manifest))
    assert snapshots.latest() is None


def test_nothing_on_disk_is_a_pickle(snapshots):
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    snapshots.save(1, whole_state(model, optimizer, step=1), wait=True)
    files = [path for path in snapshots.folder.rglob("*") if path.is_file()]
    assert {path.suffix for path in files} >= {".json", ".safetensors"}
    for path in files:
        json.loads(path.read_bytes()) if path.suffix == ".json" else load_file(path)


def test_a_folder_that_is_a_file_and_a_keep_of_nothing_are_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot hold the snapshots"):
        Snapshots(tmp_path / "file")
    with pytest.raises(UsageError, match="at least 1"):
        Snapshots(tmp_path / "folder", keep=0)


# Several ranks


@contextmanager
def a_group(rank, store):
    """The rank of a gloo group of two."""
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=50)
    )
    yield
    dist.destroy_process_group()


def as_rank(rank, folder):
    with a_group(rank, folder / "first"):
        train_and_save(folder)
    if rank == 0:
        load_alone_and_save(folder)
    with a_group(rank, folder / "second"):
        load_and_look(folder)


def sharded():
    """A model whose rows do not divide by the ranks, and its optimizer."""
    model, mesh = network(wide=9), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def tensors_of(state):
    tensors = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    for name, each in state["optimizer"]["state"].items():
        tensors |= {f"optimizer.{name}.{key}": tensor for key, tensor in each.items()}
    return tensors


def keep_whole(state, path):
    """Every tensor of the state, whole, as plain safetensors."""
    tensors = tensors_of(state)
    full = {name: each.full_tensor() if isinstance(each, DTensor) else each for name, each in tensors.items()}
    if dist.get_rank() == 0:
        save_file({name: tensor.clone() for name, tensor in full.items()}, path)


def train_and_save(folder):
    model, optimizer = sharded()
    train(model, optimizer, 3)
    state = whole_state(model, optimizer, step=3)
    keep_whole(state, folder / "trained.safetensors")
    with Snapshots(folder / "snapshots") as snapshots:
        snapshots.save(3, state)
        train(model, optimizer, 2)  # collectives of both at the same time


def load_alone_and_save(folder):
    model = network(wide=9)
    state = whole_state(model, torch.optim.AdamW(model.parameters()), step=0)
    with Snapshots(folder / "snapshots") as snapshots:
        assert snapshots.load(state) == 3
        save_file(tensors_of(state), folder / "alone.safetensors")
        state["loop"]["step"] = 4
        snapshots.save(4, state)


def load_and_look(folder):
    model, optimizer = sharded()
    state = whole_state(model, optimizer, step=0)
    with Snapshots(folder / "snapshots") as snapshots:
        assert snapshots.load(state) == 4
        assert state["loop"]["step"] == 4
        keep_whole(state, folder / "loaded.safetensors")
        snapshots.save(5, state)

        # Damage that one rank sees is damage for all; and so is another model.
        state["model"]["0.bias"].add_(1)
        snapshots.save(6, state, wait=True)
        if dist.get_rank() == 1:
            flip(max((folder / "snapshots" / PACKS).iterdir(), key=os.path.getmtime))
        dist.barrier()
        assert snapshots.load(state) == 5
        del state["model"]["0.bias"]
        with pytest.raises(SourceError, match=r"1 unexpected \(model\.0\.bias\)"):
            snapshots.load(state)


def test_from_two_ranks_to_one_and_back_to_two_bit_for_bit(tmp_path, monkeypatch):
    assert by_two_ranks(as_rank, tmp_path, monkeypatch) == [0, 0]
    trained = load_file(tmp_path / "trained.safetensors")
    assert len(trained) == 4 + 3 * 4
    assert trained["optimizer.0.weight.exp_avg"].any()
    assert_same(load_file(tmp_path / "alone.safetensors"), trained)
    assert_same(load_file(tmp_path / "loaded.safetensors"), trained)
