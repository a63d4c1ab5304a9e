"""Samples that stay in Parquet files and tar archives are those of any other dataset, in any order, on any ranks."""

import copy
import io
import json
import os
import pickle
import tarfile
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from artifacts import embedding_task
from PIL import Image

from laconic.data import json_lines, parquet, row_index, webdataset
from laconic.data.dataset import split
from laconic.data.reader import read, read_few
from laconic.data.shards import expand_braces, list_shards
from laconic.errors import DataError
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tensor import TensorSpec
from train.data.batch_loader import BatchLoader
from train.data.batch_sampler import BatchSampler
from train.data.loader_settings import LoaderSettings

TEXT = embedding_task()
PIXELS = TensorSpec(name="pixels", dtype="float32", shape=("batch", 1, 6, 6))
IMAGES = ImageClassification((PIXELS,), preprocess=ImagePreprocess(channels=1), labels=("cat", "dog"))
ROWS, SHARDS = 24, 3


def encode_image(number):
    file = io.BytesIO()
    Image.fromarray(np.random.default_rng(number).integers(0, 256, (6, 6), np.uint8)).save(file, "png")
    return file.getvalue()


def add_file(archive, name, content):
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))


def write_tar(path, files):
    with tarfile.open(path, "w") as archive:
        for name, content in files.items():
            add_file(archive, name, content)
    return path


def write_images(folder, kind):
    """Write the same images with their labels, in the same order, as shards of a format."""
    folder.mkdir()
    for shard in range(SHARDS):
        rows = [(number, encode_image(number), number % 2) for number in range(shard, ROWS, SHARDS)]
        if kind == "tar":
            files = [
                (f"a.b/{number:03}.{extension}", value)
                for number, content, label in rows
                for extension, value in (
                    ("PNG", content),
                    ("cls", str(label).encode()),
                    ("extra.pyd", pickle.dumps(os.getcwd)),
                )
            ]
            write_tar(folder / f"s-{shard}.tar", dict(files))
        elif kind == "parquet":
            columns = {
                "image": [{"bytes": content, "path": None} for _, content, _ in rows],
                "label": [label for *_, label in rows],
                "unused": ["x" * 1000] * len(rows),
            }
            pq.write_table(pa.table(columns), folder / f"s-{shard}.parquet", row_group_size=3)
        else:
            lines = []
            for number, content, label in rows:
                (folder / f"{number}.png").write_bytes(content)
                lines.append(json.dumps({"image": f"{number}.png", "label": label}) + "\n")
            (folder / f"s-{shard}.jsonl").write_text("".join(lines))
    return folder


def collate(samples, labels):
    return {"pixels": torch.from_numpy(np.stack(samples)), "labels": torch.tensor(labels)}


def load(dataset, start, stop, rank=0, world=1, workers=0):
    sampler = BatchSampler(len(dataset), 6, seed=3, rank=rank, world=world)
    with BatchLoader(
        dataset, collate, sampler, device="cpu", settings=LoaderSettings(workers=workers), start=start, stop=stop
    ) as loader:
        return [batch for _, batch in loader]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    folder = tmp_path_factory.mktemp("images")
    return {kind: read(write_images(folder / kind, kind), IMAGES) for kind in ("jsonl", "parquet", "tar")}


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_a_dataset_is_the_same_in_every_format(images, kind):
    stored, plain = images[kind], images["jsonl"]
    assert (stored.keys, stored.labels, stored.numbers) == (plain.keys, plain.labels, plain.numbers)
    assert (stored.lengths, stored.shapes) == (plain.lengths, plain.shapes)
    parts = [split(dataset, {"learn": 0.7, "held": 0.3}, seed=1) for dataset in (stored, plain)]
    for name in ("learn", "held"):
        assert parts[0][name].fingerprint == parts[1][name].fingerprint
        assert all(map(np.array_equal, parts[0][name].samples, parts[1][name].samples))


@pytest.mark.usefixtures("all_cores")  # torch warns of more workers than cores
@pytest.mark.parametrize(("kind", "workers"), [("parquet", 0), ("tar", 0), ("parquet", 1), ("tar", 1)])
def test_a_run_goes_on_with_the_rows_that_were_next_on_another_number_of_ranks(images, kind, workers):
    whole = load(images["jsonl"], 0, 10)
    begun = load(images[kind], 0, 3, workers=workers)
    ranks = [load(images[kind], 3, 10, rank, world=4) for rank in range(4)]
    resumed = [
        {name: torch.cat([part[name] for part in parts]) for name in parts[0]} for parts in zip(*ranks, strict=True)
    ]
    for one, other in zip(whole, [*begun, *resumed], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_many_lines_stay_in_their_file_and_are_known_again(tmp_path, monkeypatch):
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    path, parsed, task = tmp_path / "t.jsonl", [], copy.copy(TEXT)
    lines = [
        json.dumps({"text": f"é {number}", "label": f"{number % 3}", "kind": "ab"[number % 2]})
        for number in range(ROWS)
    ]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n\n".join(lines).encode())
    plain = read(path, task)
    for module in (json_lines, row_index):
        monkeypatch.setattr(module, "FEWEST", 1)
        monkeypatch.setattr(module, "LEAST", 1)
    monkeypatch.setattr(json_lines, "BLOCK", 7)
    monkeypatch.setattr(task, "parse", lambda value: parsed.append(value) or TEXT.parse(value))
    for expected in (ROWS, 0):
        del parsed[:]
        stored = read(path, task)
        assert len(parsed) == expected
        for name in ("keys", "labels", "numbers", "lengths", "shapes", "kinds", "fingerprint"):
            assert getattr(stored, name) == getattr(plain, name)
    parts = [split(dataset, {"learn": 0.7, "held": 0.3}, seed=1)["learn"] for dataset in (plain, stored)]
    for world in (1, 4):
        for rank in range(world):
            rows = BatchSampler(len(parts[0]), 6, seed=3, rank=rank, world=world).batch(5)
            assert [list(part.samples.pick(rows)) for part in parts[1:]] == [list(parts[0].samples.pick(rows))]
    assert stored.samples[2:5][-1] == plain.samples[4]
    path.write_text("{}\n[1]")
    with pytest.raises(DataError, match="has changed since it was read"):
        _ = stored.samples[1]
    with pytest.raises(DataError, match=r"t\.jsonl, row 2: expected an object as {'text': ...}, got list"):
        json_lines.JsonRows(path, "text").read(2)


def test_large_row_groups_are_copied_into_the_cache_once_in_small_ones(tmp_path, monkeypatch):
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(parquet, "LARGEST_GROUP", 2**12)
    monkeypatch.setattr(parquet, "COPIED_GROUP", 2**11)
    path, texts = tmp_path / "t.parquet", [f"{number} " * 40 for number in range(200)]
    table = pa.table({"text": texts, "label": [number % 3 for number in range(200)], "other": texts})
    pq.write_table(table, path, row_group_size=150)
    dataset = read(path, TEXT)
    order = np.random.default_rng(0).permutation(200)
    assert [dataset.samples[index] for index in order] == [texts[index] for index in order]
    (copy,) = (tmp_path / "cache").glob("parquet-*/*")
    written, groups = copy.stat().st_mtime_ns, pq.read_metadata(copy)
    assert groups.num_row_groups >= 8
    assert pq.read_schema(copy).names == ["text", "label"]
    assert read(path, TEXT).keys == dataset.keys
    assert copy.stat().st_mtime_ns == written


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_rows_that_were_checked_are_known_again_until_their_file_is_another(tmp_path, monkeypatch, kind):
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(row_index, "FEWEST", ROWS // SHARDS)
    monkeypatch.setattr(webdataset, "LEAST", 1)
    indexed, index = [], webdataset.index_archive
    monkeypatch.setattr(webdataset, "index_archive", lambda path: indexed.append(path) or index(path))
    folder, parsed = write_images(tmp_path / "images", kind), []
    task = copy.copy(IMAGES)
    monkeypatch.setattr(task, "parse", lambda value: parsed.append(value) or IMAGES.parse(value))
    first, checked = read(folder, task), len(parsed)
    again = read(folder, task)
    assert (checked, len(parsed), len(indexed)) == (ROWS, ROWS, SHARDS if kind == "tar" else 0)
    for name in ("keys", "labels", "numbers", "lengths", "shapes", "kinds", "fingerprint"):
        assert getattr(again, name) == getattr(first, name)
    assert all(map(np.array_equal, again.samples, first.samples))
    del parsed[:]
    shard = folder / f"s-1.{kind}"
    os.utime(shard, ns=(0, 0))
    assert (read(folder, task).keys, len(parsed)) == (first.keys, ROWS // SHARDS)


def test_rows_that_name_files_are_read_each_time_and_labels_are_kept(tmp_path, monkeypatch):
    monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(row_index, "FEWEST", 1)
    monkeypatch.setattr(row_index, "LEAST", 1)
    (tmp_path / "one.png").write_bytes(encode_image(1))
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"image": ["one.png"] * 2, "label": ["cat", "dog"]}), path)
    before = read(path, IMAGES).keys
    (tmp_path / "one.png").write_bytes(encode_image(2))
    assert read(path, IMAGES).keys != before
    reads = []
    labels = [row_index.keep_labels(path, IMAGES, {}, lambda: reads.append(0) or ["dog", 1, True, "dog"]) for _ in "ab"]
    assert labels == [["dog", 1, True]] * 2
    assert len(reads) == 1
    for cache in ("cache", "cache", "one.png"):  # the last one is no folder
        monkeypatch.setenv("LACONIC_CACHE", str(tmp_path / cache))
        assert len(row_index.keep_labels(path, IMAGES, {"label": "x"}, lambda: [np.zeros(2)] * 3)) == 3


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_memory_does_not_grow_with_the_contents(tmp_path, monkeypatch, kind):
    monkeypatch.setattr(parquet, "LARGEST_GROUP", 2**20)

    def peak(count):
        texts = [f"{number:4} " * 20_000 for number in range(count)]
        path, allocated, task = tmp_path / f"{count}.{kind}", [], copy.copy(TEXT)
        if kind == "tar":
            write_tar(path, {f"{number}.txt": text.encode() for number, text in enumerate(texts)})
        else:
            pq.write_table(pa.table({"text": texts}), path, row_group_size=4)

        def parse(value):
            allocated.append(pa.total_allocated_bytes())
            return TEXT.parse(value)

        monkeypatch.setattr(task, "parse", parse)
        tracemalloc.start()
        dataset = read(path, task)
        for index in np.random.default_rng(0).permutation(count):
            assert dataset.samples[index] == texts[index]
        highest = tracemalloc.get_traced_memory()[1] + max(allocated)
        tracemalloc.stop()
        return highest

    few, many = peak(20), peak(200)
    assert many < few + 2**22, "the texts of 180 more rows are 18 MB"


GOOD = {"0.txt": b"zero", "0.json": b'{"label": "a", "kind": "letters"}', "1.txt": b"one", "1.json": b'{"label": "b"}'}


def test_objects_give_columns_and_columns_may_be_named(tmp_path):
    path = write_tar(tmp_path / "t.tar", GOOD | {"1.caption": b"uno", "0.caption": b"null"} | {"2.txt": b"two"})
    with pytest.raises(DataError, match=r"t\.tar, row 3: there is no 'text'"):
        read(path, TEXT)
    path = write_tar(tmp_path / "u.tar", GOOD)
    dataset = read(path, TEXT)
    assert (list(dataset.samples), dataset.labels, dataset.kinds) == (["zero", "one"], ["a", "b"], ("letters", ""))
    assert read_few(path, TEXT, count=1) == ["zero"]
    path = write_tar(tmp_path / "v.tar", {"0.caption": b"null", "0.cls": b"3\n", "1.caption": b"uno", "1.cls": b"tree"})
    dataset = read(path, TEXT, {"text": "caption"})
    assert (list(dataset.samples), dataset.labels) == (["null", "uno"], [3, "tree"])


@pytest.mark.parametrize(
    ("files", "task", "message"),
    [
        ({}, TEXT, r"t\.tar holds no samples"),
        ({"README": b"x", ".hidden.txt": b"x"}, TEXT, r"t\.tar holds no samples"),
        ({"0.txt": b"a", "1.jpg": b"x"}, TEXT, r"t\.tar, row 2: there is no 'text' among the columns '__key__', 'jpg'"),
        ({"0.cls": b"1"}, IMAGES, r"row 1: there is no 'image' among the columns '__key__', 'label'"),
        ({"0.png": b"no image", "0.cls": b"1"}, IMAGES, r"t\.tar, row 1: .* not an image"),
        ({"0.png": encode_image(0), "0.cls": b"7"}, IMAGES, r"t\.tar, row 1: label 7"),
        ({"0.txt": b"a", "0.TXT": b"b"}, TEXT, r"sample '0' has two files of the extension 'txt'"),
        ({"0.txt": b"\xff"}, TEXT, r"t\.tar, row 1: 0\.txt is not text in UTF-8"),
        ({"0.txt": b"a", "0.json": b"{"}, TEXT, r"t\.tar, row 1: 0\.json is not JSON"),
        ({"0.txt": b"a", "0.json": b"[1]"}, TEXT, r"t\.tar, row 1: 0\.json holds list"),
    ],
)
def test_a_bad_archive_is_refused_by_file_and_row(tmp_path, files, task, message):
    with pytest.raises(DataError, match=message):
        read(write_tar(tmp_path / "t.tar", files), task)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:700], "unexpected end of data"),
        (lambda content: content[: 4 * 512], "cut short or damaged at byte 2048"),  # between two files
        (lambda content: content[: 4 * 512 + 100], "cut short or damaged at byte 2048"),
        (lambda content: content * 2, r"something follows its end at byte \d+, as where archives are joined"),
        (lambda content: content[:2048] + b"\xff" * 512 + content[2560:], "cut short or damaged at byte 2048"),
        (lambda content: b"\x1f\x8b" + content[2:], "does not read as a tar archive"),
        (lambda content: b"", "does not read as a tar archive: empty file"),
    ],
)
def test_an_archive_that_is_cut_short_or_damaged_is_refused(tmp_path, damage, message):
    path = write_tar(tmp_path / "t.tar", GOOD)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataError, match=message):
        read(path, TEXT)


def test_a_table_with_two_columns_of_one_name_is_refused(tmp_path):
    pq.write_table(pa.table([["a"], ["b"]], names=["text", "text"]), tmp_path / "t.parquet")
    with pytest.raises(DataError, match=r"t\.parquet has several columns 'text'\. Rename all but one"):
        read(tmp_path / "t.parquet", TEXT)


@pytest.mark.parametrize("name", ["t.parquet", "t.tar"])
def test_a_file_that_has_changed_and_a_column_that_is_missing_are_named(tmp_path, name):
    path = tmp_path / name

    def write(texts):
        if name == "t.tar":
            write_tar(path, {f"{number}.txt": text.encode() for number, text in enumerate(texts)})
        else:
            pq.write_table(pa.table({"text": texts}), path)

    write(["one", "two"])
    dataset = read(path, TEXT)
    with pytest.raises(DataError, match=rf"{name}, row 1: there is no column 'class' for 'label'"):
        read(path, TEXT, {"label": "class"})
    write(["three", "four", "five"])
    os.utime(path, ns=(0, 1))
    with pytest.raises(DataError, match="has changed since it was read"):
        _ = dataset.samples[1]


def test_patterns_name_shards_as_users_of_webdataset_write_them(tmp_path):
    assert list(expand_braces("s-{008..011}.tar")) == ["s-008.tar", "s-009.tar", "s-010.tar", "s-011.tar"]
    assert set(expand_braces("{a,b{1..2}}/{1..0}")) == {"a/1", "a/0", "b1/1", "b1/0", "b2/1", "b2/0"}
    assert list(expand_braces("{a}-{0..2..1}")) == ["{a}-{0..2..1}"]
    for name in ("a-0.tar", "a-1.tar", "b-0.tar"):
        write_tar(tmp_path / name, {"0.txt": name.encode()})
    for pattern in ("{a-{0..1},b-0}.tar", "{a,?}-*.tar", "*.tar", "?-[01].tar", "."):
        assert list(read(tmp_path / pattern, TEXT).samples) == ["a-0.tar", "a-1.tar", "b-0.tar"], pattern
    (tmp_path / "{0..1}.tar").write_bytes((tmp_path / "b-0.tar").read_bytes())
    assert list(read(tmp_path / "{0..1}.tar", TEXT).samples) == ["b-0.tar"]
    with pytest.raises(DataError, match=r"there is no .*a-2\.tar"):
        read(tmp_path / "a-{0..2}.tar", TEXT)
    with pytest.raises(DataError, match=r"no file is named as .*c-\*\.tar"):
        read(tmp_path / "c-*.tar", TEXT)
    with pytest.raises(DataError, match="names more than 1,000,000 files"):
        list_shards(tmp_path / "{0..9999999}.tar")
