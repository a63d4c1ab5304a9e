import multiprocessing
import os
import signal
import sys
import threading
import time

import numpy as np
import pytest
import torch
from artifacts import embedding_task
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch import nn

from laconic.cache import Cache
from laconic.data.reader import make_dataset, read
from laconic.errors import DataError, InputError, LaconicError, RecipeError, UsageError
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tensor import TensorSpec
from train.data import sample_store as store
from train.data.batch_builder import START, check_main, init_worker
from train.data.batch_loader import BatchLoader
from train.data.batch_sampler import BatchSampler, row_lengths
from train.data.loader_settings import LoaderSettings
from train.data.prefetch import run_ahead
from train.data.worker_count_search import WARM_UP, WorkerCountSearch

TEXT = embedding_task()
PIXELS = TensorSpec(name="pixels", dtype="float32", shape=("batch", 1, 6, 6))
IMAGES = ImageClassification((PIXELS,), preprocess=ImagePreprocess(channels=1), labels=("cat", "dog"))

counts = st.integers(1, 60)
sizes = st.integers(1, 17)
quick = settings(max_examples=40)


pytestmark = pytest.mark.usefixtures("all_cores")  # torch warns of more workers than cores


def collate(samples, labels):
    """Images, labels, and a number that says which rows these are."""
    batch = {name: torch.from_numpy(array) for name, array in IMAGES.encode(samples).items()}
    return batch | {"labels": torch.tensor(labels)}


def words(samples, labels):
    """Lengths of texts; a text may be wrong, or deadly."""
    for sample in samples:
        if sample == "wrong":
            raise InputError("this text is wrong")
        if sample == "empty":
            raise DataError("this text is empty")
        if sample == "bug":
            raise KeyError("a bug")
        if sample == "deadly":
            signal.raise_signal(signal.SIGKILL)
    return {"lengths": torch.tensor([len(sample) for sample in samples])}


def slow(samples, labels):
    time.sleep(0.002)
    return words(samples, labels)


def pairs(samples, labels):
    return {"left": torch.tensor([len(text) for text in samples[::2]]), "score": torch.tensor(labels[::2])}


def one_length(samples, labels):
    if len(set(map(len, samples))) > 1:
        raise InputError("texts of unlike length")
    return words(samples, labels)


class Teaching:
    """Makes batches beside a model."""

    def __init__(self):
        self.teacher = nn.Linear(2, 2)

    def collate(self, samples, labels):
        return words(samples, labels)


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for number in range(10):
        path = folder / ("cat" if number % 2 else "dog") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (6, 6), np.uint8)).save(path)
    return folder


def texts(count):
    return make_dataset(["x" * number for number in range(1, count + 1)], TEXT, name="texts")


def same(one, other):
    assert len(one) == len(other)
    for (step, batch), (other_step, other_batch) in zip(one, other, strict=True):
        assert step == other_step
        assert batch.keys() == other_batch.keys()
        assert all(torch.equal(batch[name], other_batch[name]) for name in batch)


def feed(dataset, collate, *, rows=3, start=0, stop=8, order=None, folder=None, **options):
    """folder: of the cache; the other options are settings."""
    return BatchLoader(
        dataset,
        collate,
        order or BatchSampler(len(dataset.keys), rows, seed=5),
        device="cpu",
        settings=LoaderSettings(**{"workers": 0, **options}),
        start=start,
        stop=stop,
        decoder=store.decoder_key(IMAGES),
        cache=Cache(folder),
    )


# BatchSampler


@quick
@given(counts, sizes, st.integers(0, 5), st.booleans())
def test_every_row_comes_once_per_epoch(count, rows, seed, grouped):
    lengths = [7 * row % 11 for row in range(count)] if grouped else None
    order = BatchSampler(count, rows, seed, lengths=lengths)
    for epoch in range(3):
        steps = range(epoch * order.steps, (epoch + 1) * order.steps)
        batches = [order.batch(step) for step in steps]
        assert sorted(row for batch in batches for row in batch) == list(range(count))
        assert all(len(batch) == rows for batch in batches[:-1])


@quick
@given(counts, sizes, st.integers(1, 5))
def test_ranks_together_have_the_batches_that_one_has(count, rows, world):
    rows = max(rows, world)
    alone = BatchSampler(count, rows, seed=1)
    ranks = [BatchSampler(count, rows, seed=1, rank=rank, world=world) for rank in range(world)]
    for step in range(2 * alone.steps):
        shares = [order.batch(step) for order in ranks]
        assert [row for share in shares for row in share] == alone.batch(step)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize(("count", "rows", "sizes"), [(33, 16, [16, 15, 2]), (32, 16, [16, 16]), (5, 2, [2, 2, 2])])
def test_the_last_batch_of_an_epoch_has_as_many_rows_as_are_needed(count, rows, sizes):
    order = BatchSampler(count, rows, seed=0, fewest=2)
    for epoch in range(2):
        batches = [order.batch(epoch * order.steps + step) for step in range(order.steps)]
        assert list(map(len, batches)) == sizes
        assert sorted({row for batch in batches for row in batch}) == list(range(count))
    shares = [BatchSampler(33, 16, seed=0, rank=rank, world=2, fewest=2).batch(2) for rank in range(2)]
    assert list(map(len, shares)) == [2, 2]
    assert list(map(len, map(BatchSampler(1, 4, seed=0, fewest=2).batch, range(2)))) == [1, 1]


def test_an_epoch_is_in_an_order_of_its_own_and_another_seed_gives_another():
    order = BatchSampler(100, 10, seed=0)
    first, second = ([order.batch(step) for step in range(start, start + 10)] for start in (0, 10))
    assert first != second
    assert BatchSampler(100, 10, seed=1).batch(0) != first[0]
    assert BatchSampler(100, 10, seed=0).batch(13) == second[3]


def test_rows_of_like_length_share_batches_that_are_shuffled():
    lengths = np.random.default_rng(0).integers(1, 100, 500)
    order = BatchSampler(500, 10, seed=0, lengths=lengths)
    plain = BatchSampler(500, 10, seed=0)

    def padding(order):
        return sum(max(lengths[order.batch(step)]) * 10 for step in range(50)) / lengths.sum()

    assert padding(order) < 1.05 < 1.5 < padding(plain)
    firsts = [lengths[order.batch(step)].max() for step in range(50)]
    assert firsts != sorted(firsts)


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((0, 4, 0), DataError, "no rows to train with"),
        ((9, 2, 0, 0, 4), RecipeError, "a batch of 2 rows cannot be shared by 4 ranks"),
    ],
)
def test_an_order_without_a_batch_is_refused(arguments, kind, message):
    with pytest.raises(kind, match=message):
        BatchSampler(*arguments)


def test_the_length_of_a_row_of_two_samples_is_that_of_the_longer(tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '{"text1": "a", "text2": "bbb", "score": 1}\n{"text1": "cc", "text2": "d", "score": 0}\n'
    )
    dataset = read(tmp_path / "p.jsonl", TEXT)
    assert row_lengths(dataset) == (3, 2)
    batches = [batch for _, batch in feed(dataset, pairs, rows=1, stop=2)]
    assert sorted((int(batch["left"]), float(batch["score"])) for batch in batches) == [(1, 1.0), (2, 0.0)]


# BatchLoader


@pytest.mark.parametrize("cache", ["none", "memory", "disk"])
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_are_the_same_with_any_workers_and_any_cache(workers, cache, images, tmp_path):
    dataset = read(images, IMAGES)
    plain = list(feed(dataset, collate))
    one = feed(dataset, collate, workers=workers, cache=cache, folder=tmp_path)
    same(list(one), plain)
    assert not multiprocessing.active_children(), "no worker is left"
    assert ("kept" in one.report()) == (cache != "none")


@pytest.mark.parametrize("start", [1, 4, 7])
def test_a_run_that_resumes_has_the_batches_of_the_one_that_went_on(start):
    whole = list(feed(texts(11), words, stop=9))
    same(list(feed(texts(11), words, start=start, stop=9)), whole[start:])


def test_what_training_draws_does_not_depend_on_the_feed():
    torch.manual_seed(0)
    expected = torch.rand(3)
    torch.manual_seed(0)
    assert len(list(feed(texts(9), words))) == 8
    assert torch.equal(torch.rand(3), expected)


def test_a_rank_without_a_row_has_a_batch_without_rows():
    order = BatchSampler(5, 4, seed=0, rank=0, world=2)
    assert order.batch(1) == []
    batches = list(feed(texts(5), words, order=order, stop=2))
    assert [batch["lengths"].shape for _, batch in batches] == [(2,), (0,)]
    assert batches[1][1]["lengths"].dtype == torch.int64


def test_the_wait_is_counted_and_never_more_than_the_time_that_passed():
    one = feed(texts(9), slow)
    for _ in one:
        time.sleep(0.001)
    assert 0 < one.waited < one.elapsed
    share = 100 * one.waited / one.elapsed
    assert one.report() == f"waited for data {one.waited:.1f} s of {one.elapsed:.1f} s ({share:.1f} %), no workers"
    one = feed(texts(9), slow)
    for _ in one:
        break
    assert 0 < one.waited <= one.elapsed


def test_a_short_run_starts_no_worker_by_itself(monkeypatch):
    monkeypatch.setattr("train.data.worker_count_search.SECONDS", 0.0)
    one = feed(texts(9), slow, workers="auto", stop=30)
    assert len(list(one)) == 30
    assert one.workers == 0
    assert one.report().endswith(" ms a step with 0)")


def test_batches_are_the_same_while_the_count_of_workers_changes(monkeypatch):
    monkeypatch.setattr("train.data.worker_count_search.WORTH", 0.0)
    monkeypatch.setattr("train.data.worker_count_search.SECONDS", 0.0)
    one = feed(texts(50), slow, workers="auto", stop=60)
    same(list(one), list(feed(texts(50), slow, stop=60)))
    assert 1 in one._search.seconds
    assert "with 1" in one.report()


# Failures


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize(("bad", "reason"), [("wrong", "this text is wrong"), ("empty", "this text is empty")])
def test_an_error_names_its_row_wherever_it_arose(workers, bad, reason):
    dataset = make_dataset(["a", "b", "c", bad, "d"], TEXT, name="t.jsonl")
    with pytest.raises(DataError, match=rf"^t\.jsonl, row 4: {reason}\. Fix or remove the row$"):
        list(feed(dataset, words, workers=workers))
    assert not multiprocessing.active_children()


def test_rows_that_only_clash_are_named_together():
    dataset = make_dataset(["a", "bb"], TEXT, name="t.jsonl")
    with pytest.raises(DataError, match=r"rows 1, 2 do not fit into one batch: texts of unlike length"):
        list(feed(dataset, one_length))


def test_a_bug_in_a_worker_keeps_its_traceback():
    with pytest.raises(KeyError, match="in words"):
        list(feed(make_dataset(["a", "bug"], TEXT), words, workers=1))
    assert not multiprocessing.active_children()


def test_a_worker_that_dies_is_an_error_that_says_what_to_try():
    with pytest.raises(LaconicError, match=r"has died.*Try workers: 0"):
        list(feed(make_dataset(["deadly"] * 2, TEXT), words, workers=1))
    assert not multiprocessing.active_children()


def train_and_fail(one):
    with one:
        for _ in one:
            raise RuntimeError("training")


@pytest.mark.parametrize("leave", ["close", "break", "raise"])
def test_workers_end_when_the_loop_is_left(leave):
    one = feed(texts(9), words, workers=1, stop=1000)
    if leave == "close":
        iterator = iter(one)
        next(iterator)
        one.close()
    elif leave == "break":
        for _ in one:
            break
    else:
        with pytest.raises(RuntimeError, match="training"):
            train_and_fail(one)
    assert not multiprocessing.active_children()


def test_what_cannot_be_sent_to_a_worker_is_collated_here():
    def local(samples, labels):
        return words(samples, labels)

    assert feed(texts(9), local, workers="auto")._search.settled
    for collate in (local, Teaching().collate):
        with pytest.raises(UsageError, match="cannot be sent to a worker process"):
            feed(texts(9), collate, workers=1)


def test_a_worker_that_still_loads_the_script_refuses_to_train(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    with pytest.raises(UsageError, match="if __name__ == '__main__'"):
        check_main()


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_a_worker_outlives_what_is_meant_for_the_training():
    context = multiprocessing.get_context(START)
    ready = context.Event()
    worker = context.Process(target=wait_for_ever, args=(ready,))
    worker.start()
    assert ready.wait(30)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(worker.pid, number)
    worker.join(0.3)
    assert worker.is_alive()
    worker.terminate()
    worker.join(30)
    assert worker.exitcode == -signal.SIGTERM


def wait_for_ever(ready):
    init_worker(0)
    ready.set()
    while True:
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"workers": -1}, "workers"),
        ({"prefetch": 0}, "prefetch"),
        ({"cache": "tape"}, "cache"),
        ({"worker": 1}, "Did you mean 'workers'"),
    ],
)
def test_settings_that_make_no_sense_are_refused(values, key):
    with pytest.raises(ValueError, match=key):
        LoaderSettings(**values)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to pin memory for")
def test_pinned_memory_without_a_gpu_is_refused():
    with pytest.raises(RecipeError, match="no CUDA device"):
        feed(texts(9), words, pin_memory=True)


# What is kept


def kept(dataset, place, folder, **options):
    return store.store_samples(dataset, place, decoder="d", cache=Cache(folder), **options)


@pytest.mark.parametrize("place", ["memory", "disk"])
def test_what_is_beyond_the_limit_is_decoded_each_time(place, images, tmp_path):
    dataset = read(images, IMAGES)
    one = kept(dataset, place, tmp_path, limit=4 * 36 * 4 + 100)
    assert one.kept == 4
    assert one.describe() == f"4 of 10 samples kept {'on disk' if place == 'disk' else 'in memory'}"
    assert all(np.array_equal(a, b) for a, b in zip(one, dataset.samples, strict=True))
    assert kept(dataset, place, tmp_path, limit=1).kept == 0


def test_images_of_unlike_size_are_kept_too_and_one_that_has_changed_is_named(tmp_path):
    sides = (3, 5, 4)
    for number, side in enumerate(sides):
        Image.new("L", (side, 2), number).save(tmp_path / f"{number}.png")
    dataset = read(tmp_path, IMAGES_OF_ANY_SIZE)
    one = kept(dataset, "memory", tmp_path)
    assert [sample.shape for sample in one] == [(1, 2, side) for side in sides]
    for number in range(2):
        Image.new("L", (6, 6), number).save(tmp_path / f"{number}.png")
    dataset = read(tmp_path, IMAGES_OF_ANY_SIZE)
    Image.new("L", (5, 5)).save(tmp_path / "1.png")
    with pytest.raises(DataError, match="row 2 has changed since it was read"):
        kept(dataset, "memory", tmp_path)


IMAGES_OF_ANY_SIZE = ImageClassification(
    (TensorSpec(name="pixels", dtype="float32", shape=("batch", 1, "height", "width")),),
    preprocess=ImagePreprocess(channels=1),
)


def test_what_is_on_disk_is_used_by_the_next_run_and_by_no_other_decoder(images, tmp_path, monkeypatch):
    dataset = read(images, IMAGES)
    kept(dataset, "disk", tmp_path)
    filled = []
    monkeypatch.setattr(store, "decode_samples", lambda flat, *_: filled.append(flat.shape))
    again = kept(dataset, "disk", tmp_path)
    assert not filled
    assert np.array_equal(again[3], dataset.samples[3])
    store.store_samples(dataset, "disk", decoder="another", cache=Cache(tmp_path))
    assert filled == [(360,)]


def test_a_store_that_was_interrupted_is_not_seen_and_one_on_disk_needs_the_name_of_what_decodes(
    images, tmp_path, monkeypatch
):
    def interrupted(*_):
        raise KeyboardInterrupt

    dataset = read(images, IMAGES)
    with monkeypatch.context() as patch:
        patch.setattr(store, "decode_samples", interrupted)
        with pytest.raises(KeyboardInterrupt):
            kept(dataset, "disk", tmp_path)
    assert not list(tmp_path.iterdir())
    assert np.array_equal(kept(dataset, "disk", tmp_path)[3], dataset.samples[3])
    with pytest.raises(ValueError, match="decoder"):
        store.store_samples(read(images, IMAGES), "disk", cache=Cache(tmp_path))


def test_two_ranks_may_fill_one_store(images, tmp_path, monkeypatch):
    dataset = read(images, IMAGES)
    fill = store.decode_samples

    def late(*arguments):
        with monkeypatch.context() as patch:
            patch.setattr(store, "decode_samples", fill)
            kept(dataset, "disk", tmp_path)
        fill(*arguments)

    monkeypatch.setattr(store, "decode_samples", late)
    assert np.array_equal(kept(dataset, "disk", tmp_path)[3], dataset.samples[3])
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_kept_is_neither_changed_nor_decoded_again_nor_taken_for_that_of_another_task(images, tmp_path):
    one = kept(read(images, IMAGES), "memory", tmp_path)
    one[0][:] = 7
    assert one[0].max() <= 1
    assert not store.is_decoded_on_access(texts(3))
    one = feed(texts(9), words, cache="memory")
    assert "kept" not in one.report()
    other = ImageClassification((PIXELS,), preprocess=ImagePreprocess(channels=1, mean=(0.5,)), labels=IMAGES.labels)
    assert store.decoder_key(IMAGES) == store.decoder_key(IMAGES) != store.decoder_key(other)


def test_an_image_that_is_gone_is_named(tmp_path):
    for number in range(2):
        Image.new("L", (6, 6), number).save(tmp_path / f"{number}.png")
    dataset = read(tmp_path, IMAGES)
    (tmp_path / "1.png").unlink()
    with pytest.raises(DataError, match=r"row 2: 1\.png is not an image that can be read"):
        kept(dataset, "memory", tmp_path)
    with pytest.raises(DataError, match=r"row 2: 1\.png is not an image that can be read"):
        list(feed(dataset, first_pixels, rows=2, stop=1))


def first_pixels(samples, labels):
    return {"pixels": torch.tensor([sample.flat[0] for sample in samples])}


# The search for a count of workers


def searched(cost, most=4, left=10_000):
    """The count that is found. cost: seconds waited and worked in a step, by workers."""
    search = WorkerCountSearch(most, prefetch=2)
    for _ in range(2000):
        waited, worked = cost(search.workers)
        search.observe(waited, waited + worked, left)
        if search.settled:
            break
    assert search.settled
    return search


def test_workers_are_added_while_they_help_and_sent_home_where_they_slow_the_step_down():
    assert searched(lambda workers: (0.5 / max(1, workers), 0.01)).workers == 4
    search = searched(lambda workers: (0.0 if workers >= 2 else 0.05, 0.02), most=8)
    assert search.workers == 2
    assert sorted(search.seconds) == [0, 1, 2]
    search = searched(lambda workers: (0.0, 0.05) if workers else (0.02, 0.02))
    assert search.workers == 0
    assert sorted(search.seconds) == [0, 1]
    search = searched(lambda workers: (0.1 if workers else 0.02, 0.02))
    assert search.workers == 0
    assert sorted(search.seconds) == [0, 1]
    search = WorkerCountSearch(4, prefetch=2)
    for _ in range(WARM_UP):
        search.observe(100.0, 100.0, 10)
    for _ in range(200):
        search.observe(0.0, 0.125, 10)
    assert search.seconds == {0: 0.125}


@pytest.mark.parametrize(("waited", "left"), [(0.1, 50), (0.0001, 10_000)])
def test_no_process_starts_for_a_wait_that_does_not_matter(waited, left):
    assert searched(lambda workers: (waited, 0.1), left=left).seconds.keys() == {0}


# The thread that runs ahead


def counting(closed, until=5):
    try:
        yield from range(until)
    finally:
        closed.append(threading.current_thread().name)


def test_a_thread_runs_ahead_until_nobody_takes_its_items_and_raises_its_errors_where_they_are_taken():
    closed = []
    assert list(run_ahead(counting(closed))) == list(range(5))
    assert closed == ["laconic-prefetch_0"]
    closed = []
    ahead = run_ahead(counting(closed, until=10**9))
    assert next(ahead) == 0
    ahead.close()
    assert closed == ["laconic-prefetch_0"]
    assert closed[0] not in {thread.name for thread in threading.enumerate()}

    def failing():
        yield 1
        raise DataError("row 3")

    ahead = run_ahead(failing())
    assert next(ahead) == 1
    with pytest.raises(DataError, match="row 3"):
        next(ahead)


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_on_a_gpu_are_those_on_the_host(workers, images):
    dataset = read(images, IMAGES)
    order = BatchSampler(len(dataset.keys), 3, seed=5)
    chosen = LoaderSettings(workers=workers)
    with BatchLoader(dataset, collate, order, device="cuda", settings=chosen, stop=8) as one:
        found = [(step, {name: tensor.cpu() for name, tensor in batch.items()}) for step, batch in one]
    same(found, list(feed(dataset, collate)))
