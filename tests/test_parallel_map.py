"""Predictions in worker processes: the same as in this one, whatever becomes of the workers."""

import multiprocessing
import os
import time
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import pytest
from test_fleet import RATES
from transformers import BertConfig, BertForSequenceClassification

from train.data.fork_server import START, preload_workers
from train.planner import parallel_map
from train.planner.memory_plan import PredictionJob
from train.planner.meta_model import open_meta_model
from train.planner.parallel_map import is_sendable, map_in_pool, map_parallel
from train.settings import Training

TRAININGS = [
    Training.model_validate({"batch_size": 4, "techniques": choice, "optimizer": "sgd"})
    for choice in ([], ["gradient-checkpointing"], [{"gradient-accumulation": {"rows": 1}}])
]


@pytest.fixture
def job(tmp_path, monkeypatch):
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=99)
    config.architectures = [BertForSequenceClassification.__name__]
    config.save_pretrained(tmp_path)
    return PredictionJob(open_meta_model(Path(tmp_path), task="text-classification"), 8, RATES, 1, TRAININGS[0])


def test_workers_that_fork_from_a_server_predict_what_this_process_predicts(job, monkeypatch):
    for workers in (1, 2, 2):
        preload_workers(PredictionJob.__module__, workers)
    alone = dict(map_parallel(job.predict, TRAININGS, workers=1))
    monkeypatch.setattr(parallel_map, "WORTH", 0.0)
    used: list[int] = []
    pooled = parallel_map.map_in_pool
    monkeypatch.setattr(parallel_map, "map_in_pool", lambda *given, **more: used.append(1) or pooled(*given, **more))
    together = dict(map_parallel(job.predict, TRAININGS, workers=2))
    assert used
    assert together.keys() == alone.keys() == {0, 1, 2}
    for index, found in alone.items():
        assert (together[index].peak, together[index].host) == (found.peak, found.host)
        assert together[index].cost.flops == found.cost.flops
        assert found.timeline is None


def test_short_plans_and_models_that_cannot_be_sent_are_predicted_here(job, monkeypatch):
    monkeypatch.setattr(parallel_map, "WORTH", 1e9)
    monkeypatch.setattr(parallel_map, "map_in_pool", lambda *_, **__: pytest.fail("started"))
    assert len(dict(map_parallel(job.predict, TRAININGS, workers=8))) == 3
    job.model.module.register_forward_hook(lambda *_: None)
    assert not is_sendable(job.predict)
    monkeypatch.setattr(parallel_map, "WORTH", 0.0)
    assert len(dict(map_parallel(job.predict, TRAININGS, workers=2))) == 3


def test_what_dead_workers_leave_is_predicted_here(job, monkeypatch):
    class Dying:
        def __init__(self, *_, **__):
            pass

        def submit(self, *_):
            raise BrokenProcessPool

        def shutdown(self, **_):
            pass

    monkeypatch.setattr(parallel_map, "WORTH", 0.0)
    monkeypatch.setattr(parallel_map, "ProcessPoolExecutor", Dying)
    assert len(dict(map_parallel(job.predict, TRAININGS, workers=2))) == 3


def place(index):
    """Return the process that an item was worked on in. The first item is the shortest, as those of plans are."""
    time.sleep(0.3 * (index > 0))
    return os.getpid()


def test_this_process_works_beside_the_others_however_short_the_first_item_is(monkeypatch):
    monkeypatch.setattr(parallel_map, "WORTH", 0.25)
    places = dict(map_parallel(place, range(6), workers=2))
    assert sorted(places) == list(range(6))
    assert len(set(places.values())) == 2
    assert places[2] == os.getpid() != places[5]


def count_alone():
    """Use a pool for one item, and end."""
    assert list(map_in_pool(abs, [-1], [0], 1)) == [(0, 1)]


def test_a_process_that_multiprocessing_started_ends_after_it_had_workers():
    process = multiprocessing.get_context(START).Process(target=count_alone)
    process.start()
    process.join(60)
    process.kill()
    process.join()
    assert process.exitcode == 0
