"""The memory of a rank, predicted by one process: against two ranks that are there, and for a thousand that are not."""

import json
import time
import weakref

import pytest
import torch
import transformers
from rank_processes import by_two_ranks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from laconic.errors import RecipeError
from train.parallel.mesh import Mesh
from train.parallel.ranks import Ranks, open_ranks
from train.planner.device_rates import DeviceRates, RateCurve
from train.planner.memory_prediction import sum_categories
from train.planner.meta_model import open_meta_model
from train.planner.prediction import predict_rank
from train.planner.simulate import trace_memory
from train.settings import Training
from train.step_assembly import distribute_step, make_step_parts

CPU = torch.device("cpu")
LENGTH, ROWS = 24, 6
CURVE = RateCurve(amounts=(1.0, 1e12), seconds=(1e-9, 1.0))
RATES = DeviceRates(name="any", kind="cpu", products={"float32": CURVE, "bfloat16": CURVE}, passes=CURVE, copies=CURVE)
RUNS = {
    "replicas": ({}, ()),
    "replicas, parts": ({}, ({"gradient-accumulation": {"rows": 1}},)),
    "shards": ({"shard": None}, ()),
    "shards, parts": (
        {"shard": None},
        ({"gradient-accumulation": {"rows": 1}}, "gradient-checkpointing", "chunked-cross-entropy"),
    ),
    "shards, bf16 on the host": ({"shard": None, "precision": "bf16", "offload": True}, ("gradient-checkpointing",)),
}


def settings(name, batch=ROWS):
    mesh, techniques = RUNS[name]
    return Training(batch_size=batch, mesh=mesh, techniques=techniques)


def save_config(folder, layers):
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 100, "num_hidden_layers": layers}
    config = transformers.LlamaConfig(vocab_size=301, max_position_embeddings=LENGTH, pad_token_id=0, **sizes)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    return folder


class Births(TorchDispatchMode):
    """The storages that operations make."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.storages += [weakref.ref(storage) for storage in storages(out)]
        return out


def storages(values):
    return [value.untyped_storage() for value in tree_iter(values) if isinstance(value, torch.Tensor)]


def holders(storage):
    return torch._C._storage_Use_Count(storage._cdata)


def let_go(collective):
    """The collective, until gloo's thread has let go of its buffers and of the copies that it made. It does so a moment
    after it says that it is done: in one step of ten as late as in the optimizer's."""

    def call(*args, **kwargs):
        given = storages((args, kwargs))
        before = [holders(storage) for storage in given]
        with Births() as births:
            result = collective(*args, **kwargs)
        if kwargs.get("async_op"):
            return result  # which holds them until somebody waits for it
        known = {storage.data_ptr() for storage in given}

        def held():
            made = [storage for born in births.storages if (storage := born()) is not None]
            more = any(holders(storage) > count for storage, count in zip(given, before, strict=True))
            return more or any(storage.data_ptr() not in known for storage in made)

        while held():
            time.sleep(0)
        return result

    return call


def measure_each(rank, folder):
    """What each run takes on this rank, on real tensors."""
    found = {}
    subject = open_meta_model(folder)
    for name in ("all_gather_single", "reduce_scatter_single"):
        setattr(torch.distributed, name, let_go(getattr(torch.distributed, name)))  # in a process of the test's own
    with open_ranks(CPU, Mesh()):
        for name in RUNS:
            training = settings(name)
            ranks, module = Ranks.of(rank, 2, CPU, training.mesh), subject.copy().to_empty(device=CPU)
            for weight in (*module.parameters(), *module.buffers()):
                weight.data.normal_(0, 0.02)

            def prepare(training=training, ranks=ranks, module=module):
                objective = subject.objective()
                parts = make_step_parts(module, objective, training.components(), CPU)
                distribute_step(parts, training, ranks)
                state = parts.assemble()
                return state, objective.make_example(ROWS // 2, LENGTH)

            course = trace_memory(prepare, CPU, clip=training.max_grad_norm)
            found[name] = {"peak": course.peak(), "host": int(course.host.max()), "phases": course.phases()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = save_config(tmp_path_factory.mktemp("fleet"), layers=3)
    with pytest.MonkeyPatch.context() as patch:
        assert by_two_ranks(measure_each, folder, patch) == [0, 0]
    return open_meta_model(folder), json.loads((folder / "0.json").read_text())


@pytest.mark.parametrize("name", RUNS)
def test_the_prediction_is_what_two_ranks_measure(name, measured):
    subject, found = measured
    predicted = predict_rank(subject, settings(name), LENGTH, RATES, 2)
    assert predicted.peak == pytest.approx(found[name]["peak"], rel=0.03)
    assert predicted.host == pytest.approx(found[name]["host"], rel=0.03)
    for phase in ("forward", "backward", "optimizer"):
        assert sum_categories(predicted.phases[phase]) == pytest.approx(
            sum_categories(found[name]["phases"][phase]), rel=0.03
        ), phase


@pytest.mark.sweep("*bf16 on the host*")
@pytest.mark.parametrize(("name", "world"), [("shards", 8), ("shards, bf16 on the host", 32)])
def test_a_deep_model_is_predicted_from_shallow_ones(name, world, tmp_path):
    subject = open_meta_model(save_config(tmp_path, layers=9))
    quick = predict_rank(subject, settings(name, world), LENGTH, RATES, world)
    whole = predict_rank(subject, settings(name, world), LENGTH, RATES, world, whole=True)
    assert quick.timeline is None
    assert quick.peak == pytest.approx(whole.peak, rel=0.005)
    assert quick.host == pytest.approx(whole.host, rel=0.005)


@pytest.mark.sweep
def test_more_ranks_have_less_each_until_there_is_no_row_for_each(tmp_path):
    subject = open_meta_model(save_config(tmp_path, layers=2))
    few, more, many = (
        predict_rank(subject, settings("shards", world), LENGTH, RATES, world).peak for world in (4, 64, 256)
    )
    assert more < few
    assert more < many, "weights of 64 rows are gathered as 256"


def test_a_batch_of_fewer_rows_than_ranks_is_refused(tmp_path):
    subject = open_meta_model(save_config(tmp_path, layers=2))
    with pytest.raises(RecipeError, match="Give each rank a row"):
        predict_rank(subject, settings("shards", 1000), LENGTH, RATES, 1024)


def test_copies_of_shards_take_what_the_shards_take(tmp_path):
    subject = open_meta_model(save_config(tmp_path, layers=2))
    both = settings("shards", 8).model_copy(update={"mesh": Mesh(replicate=4, shard=2)})
    assert predict_rank(subject, both, LENGTH, RATES, 8).peak == pytest.approx(
        predict_rank(subject, settings("shards", 2), LENGTH, RATES, 2).peak, rel=0.03
    )
    assert not torch.distributed.is_initialized()
