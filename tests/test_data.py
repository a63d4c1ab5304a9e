import contextlib
import copy
import csv
import gc
import hashlib
import itertools
import json
import tracemalloc

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from artifacts import embedding_task
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from laconic.data.batches import batches
from laconic.data.dataset import shuffle_groups, shuffle_key, sort_digests, split
from laconic.data.reader import make_dataset, read
from laconic.errors import DataError
from laconic.hashing import MANY, hash_of
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import LABELLED, MOST, WHERE_ASKED, check_labels, describe_uncertainty, split_samples
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.tensors import Tensors
from laconic.tensor import TensorSpec

TEXT = embedding_task()
PIXELS = TensorSpec(name="pixels", dtype="float32", shape=("batch", 3, "height", "width"))
IMAGES = ImageClassification((PIXELS,), preprocess=ImagePreprocess(), labels=("cat", "dog"))
ARRAYS = Tensors(
    (
        TensorSpec(name="x", dtype="float32", shape=("batch", "time")),
        TensorSpec(name="n", dtype="int64", shape=("batch",)),
    )
)
ROLES = {"calibrate": 0.4, "choose": 0.2, "holdout": 0.4}

texts = st.text(st.characters(codec="utf-8", exclude_characters="\r\n\x00\x85\u2028\u2029"), min_size=1).filter(
    str.strip
)
fast = settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path, rows):
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return path


def write_parquet(path, rows):
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


WRITERS = {".jsonl": write_jsonl, ".csv": write_csv, ".parquet": write_parquet}


def save_image(path, size=(8, 6), colour=0, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (colour, colour, colour)).save(path, **options)
    return path


@pytest.mark.parametrize("suffix", WRITERS)
@fast
@given(rows=st.lists(st.tuples(texts, st.sampled_from(["a", "b"])), min_size=1, max_size=8))
def test_texts_come_back_as_they_were_written(suffix, rows, tmp_path):
    path = WRITERS[suffix](tmp_path / f"t{suffix}", [{"text": text, "label": label} for text, label in rows])
    dataset = read(path, TEXT)
    assert list(dataset.samples) == [text for text, _ in rows]
    assert dataset.labels == [label for _, label in rows]


@pytest.mark.parametrize("delimiter", [";", "\t", "|"])
@fast
@given(rows=st.lists(st.tuples(texts, st.sampled_from(["a", "b"])), min_size=1, max_size=8))
def test_columns_of_a_csv_may_stand_between_other_delimiters(delimiter, rows, tmp_path):
    path = tmp_path / "t.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, delimiter=delimiter).writerows([("text", "label"), *rows])
    dataset = read(path, TEXT)
    assert list(dataset.samples) == [text for text, _ in rows]
    assert dataset.labels == [label for _, label in rows]


@pytest.mark.parametrize(
    "content", [b"\xef\xbb\xbftext,label\r\na,1\r\n\r\nb,0\r\n,\r\n \r\n", b"\r\n\ntext;label\na;1\n\nb;0\n;\n"]
)
def test_byte_order_marks_line_ends_and_blank_rows_of_a_csv_do_not_matter(content, tmp_path):
    (tmp_path / "t.csv").write_bytes(content)
    dataset = read(tmp_path / "t.csv", TEXT)
    assert list(dataset.samples) == ["a", "b"]
    assert dataset.labels == ["1", "0"]


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_values_of_nested_columns_have_a_dot_in_their_names(suffix, tmp_path):
    path = tmp_path / f"t{suffix}"
    WRITERS[suffix](path, [{"review": {"body": "good", "stars": 5}}, {"review": {"body": "bad", "stars": 1}}])
    dataset = read(path, TEXT, {"text": "review.body", "label": "review.stars"})
    assert list(dataset.samples) == ["good", "bad"]
    assert dataset.labels == [5, 1]
    with pytest.raises(DataError, match=r"no column 'review\.title' for 'text'\. The columns are 'review'"):
        read(path, TEXT, {"text": "review.title"})


@pytest.mark.parametrize("declaration", ["sep=;", '"sep=;"', "sep=\t", "sep=|"])
def test_the_line_by_which_excel_is_told_the_delimiter_is_followed(tmp_path, declaration):
    path, delimiter = tmp_path / "rows.csv", declaration.strip('"')[-1]
    rows = [delimiter.join(row) for row in (("text", "label"), ("good, really", "yes"), ("bad", "no"))]
    path.write_bytes(b"\xef\xbb\xbf" + "\r\n".join([declaration, *rows]).encode())
    assert list(read(path, TEXT).samples) == ["good, really", "bad"]
    path.write_text("\r\n".join([declaration, *rows, delimiter.join("abc")]))
    with pytest.raises(DataError, match="row 5: 3 fields, the first line names 2"):
        read(path, TEXT)


def test_a_column_of_a_csv_may_be_called_anything_and_hold_semicolons_or_a_long_document(tmp_path):
    (tmp_path / "t.csv").write_text("notes; of a kind\none\ntwo; and more\n")
    assert list(read(tmp_path / "t.csv", TEXT).samples) == ["one", "two; and more"]
    text = "good film " * 20_000
    (tmp_path / "t.csv").write_text(f"text,label\n{text},a\nbad,b\n")
    assert list(map(len, read(tmp_path / "t.csv", TEXT).samples)) == [len(text), 3]
    (tmp_path / "t.csv").write_text('sentence\na cat\n"two\nlines"\n')
    assert list(read(tmp_path / "t.csv", TEXT).samples) == ["a cat", "two\nlines"]
    (tmp_path / "t.txt").write_text("a cat\n", encoding="utf-8-sig")
    assert list(read(tmp_path / "t.txt", TEXT).samples) == ["a cat"]


@fast
@given(lines=st.lists(texts, min_size=1, max_size=8))
def test_lines_come_back_as_they_were_written(lines, tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("\n\n".join(lines), encoding="utf-8")
    assert list(read(path, TEXT).samples) == lines


@pytest.mark.parametrize("suffix", WRITERS)
def test_scored_pairs_become_two_samples_that_share_their_score(suffix, tmp_path):
    rows = [{"text1": "a cat", "text2": "a dog", "score": 0.5}, {"text1": "red", "text2": "blue", "score": 1}]
    rows = [row | {"score": float(row["score"])} for row in rows]
    dataset = read(WRITERS[suffix](tmp_path / f"p{suffix}", rows), TEXT)
    assert list(dataset.samples) == ["a cat", "a dog", "red", "blue"]
    assert dataset.labels == [0.5, 0.5, 1.0, 1.0]
    assert dataset.per_row == 2


def test_arrays_come_back_as_they_were_written_and_may_be_json(tmp_path):
    x, n = np.random.default_rng(0).normal(size=(5, 4)).astype(np.float32), np.arange(5)
    np.savez(tmp_path / "a.npz", x=x, n=n, label=np.arange(5) % 2)
    dataset = read(tmp_path / "a.npz", ARRAYS)
    assert all(np.array_equal(sample["x"], row) and sample["n"] == k for sample, row, k in zip(dataset.samples, x, n))  # noqa: B905
    assert dataset.labels == [0, 1, 0, 1, 0]
    path = write_jsonl(tmp_path / "a.jsonl", [{"inputs": {"x": [1, 2], "n": 3}}, {"inputs": {"x": [1, 2, 3], "n": 4}}])
    dataset = read(path, ARRAYS)
    assert dataset.samples[1]["x"].tolist() == [1, 2, 3]
    assert dataset.samples[0]["n"] == 3


def test_labels_of_unlike_shape_are_refused(tmp_path):
    rows = [{"inputs": {"x": [1], "n": 3}, "label": 1}, {"inputs": {"x": [1], "n": 3}, "label": [1, 2]}]
    with pytest.raises(DataError, match="labels must be of one shape"):
        read(write_jsonl(tmp_path / "a.jsonl", rows), ARRAYS)


def test_images_come_from_folders_with_or_without_classes_and_from_files(tmp_path):
    for number in range(3):
        save_image(tmp_path / f"{number}.png", colour=number)
    assert read(tmp_path, IMAGES).labels is None
    for name, colour in (("cat/1.png", 10), ("dog/1.jpg", 20), ("dog/2.png", 30)):
        save_image(tmp_path / "pets" / name, colour=colour)
    (tmp_path / "pets" / "notes.txt").write_text("not an image")
    dataset = read(tmp_path / "pets", IMAGES)
    assert dataset.labels == [0, 1, 1]
    assert dataset.samples[0].shape == (3, 6, 8)
    save_image(tmp_path / "images" / "1.png", colour=255)
    path = write_jsonl(tmp_path / "i.jsonl", [{"image": "images/1.png", "label": "dog"}])
    assert read(path, IMAGES).samples[0].max() == 1
    content = save_image(tmp_path / "1.png", colour=255).read_bytes()
    path = write_parquet(
        tmp_path / "i.parquet",
        [{"image": {"bytes": content, "path": "1.png"}}, {"image": {"bytes": content, "path": None}}],
    )
    assert read(path, IMAGES).samples[1].shape == (3, 6, 8)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "t.jsonl",
            b'{"text": "a"}\n{"text": 4}\n',
            r"t\.jsonl, row 2: expected a string under 'text', got int\. Fix or",
        ),
        ("t.jsonl", b'{"text": "a"}\n\n{"tekst": "b"}\n', r"row 3: there is no 'text'\. Known: tekst|row 3: .*'tekst'"),
        ("t.jsonl", b'{"text": "a"}\n{"text": "b"\n', r"row 2: not JSON"),
        ("t.jsonl", b'["a"]\n', r"row 1: expected an object .* got list"),
        ("t.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"row 2: byte 0xff is not UTF-8"),
        ("t.jsonl", b'{"text": "\\ud800"}\n', r"row 1: the text is not valid Unicode"),
        ("t.jsonl", b'{"text": null}\n', r"row 1: expected a string under 'text', got NoneType"),
        ("t.jsonl", b'{"text": "a", "label": 0.5}\n', r"row 1: a label must be"),
        ("t.jsonl", b'{"text": "a", "label": 1}\n{"text": "b"}\n', r"1 of 2 samples have no label, .* sample 2"),
        ("t.jsonl", b'{"text1": "a", "text2": "b", "score": "high"}\n', r"row 1: expected a number under 'score'"),
        ("t.jsonl", b'{"text1": "a", "text2": 2, "score": 1}\n', r"row 1: expected a string under 'text2', got int"),
        ("t.jsonl", b'{"text1": "a", "text2": "b"}\n{"text": "c"}\n', r"both pairs of texts and single texts"),
        ("t.jsonl", b'{"text1": "a", "text2": "b", "score": NaN}\n', r"row 1: expected a number under 'score'"),
        ("t.jsonl", b"", r"t\.jsonl holds no samples"),
        ("t.csv", b"text,label\n", r"t\.csv holds no samples"),
        ("t.csv", b"text,label\na,1\nb\n", r"row 3: 1 fields, the first line names 2"),
        ("t.csv", b'text,label\n"a\nb",1\nc,d,e\n', r"row 4: 3 fields"),
        ("t.csv", b'text,label\n"a"b,1\n', r"row 2: not CSV"),
        ("t.csv", b"film;kind\na;b;neg\n", r"';' parts the first line and the next one into different numbers"),
        ("t.csv", b"sentence,label\na,1\n", r"row 2: there is no 'text'"),
        ("t.txt", b"good\n\xe4\xf6\n", r"t\.txt, row 2: byte 0xe4 is not UTF-8"),
        ("t.parquet", b"PAR1 no", r"t\.parquet does not read as Parquet"),
        ("t.npz", b"PK", r"t\.npz holds arrays, task 'text-embedding' reads text"),
        ("t.json", b"{}", r"unknown format '\.json'. Did you mean '\.jsonl'\?"),
    ],
)
def test_a_bad_file_of_texts_is_refused_by_row(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read(tmp_path / name, TEXT)
    assert gc.isenabled(), "it is paused while texts are read"


@pytest.mark.parametrize("suffix", [*WRITERS, ".npz", ".txt"])
@settings(fast, max_examples=150)
@given(
    damage=st.lists(st.tuples(st.integers(0, 2**16), st.binary(max_size=5), st.integers(0, 5)), min_size=1, max_size=4)
)
def test_a_damaged_file_is_read_or_refused_and_never_crashes(suffix, damage, tmp_path):
    path, task = tmp_path / f"f{suffix}", TEXT
    if suffix in WRITERS:
        WRITERS[suffix](path, [{"text": f"caf\u00e9 {number}, x", "label": "a"} for number in range(3)])
    elif suffix == ".txt":
        path.write_text("a\nb\nc")
    else:
        task = ARRAYS
        np.savez_compressed(path, **GOOD)
    content = bytearray(path.read_bytes())
    for position, insert, removed in damage:
        start = position % (len(content) + 1)
        content[start : start + removed] = insert
    path.write_bytes(content)
    with contextlib.suppress(DataError):
        list(batches(read(path, task), task, 2))


GOOD = {"x": np.ones((3, 2), np.float32), "n": np.ones(3, np.int64)}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": GOOD["x"]}, "lacks input 'n'"),
        (GOOD | {"m": GOOD["n"]}, "'m', which is no input of the model"),
        (GOOD | {"x": np.ones((3, 2))}, r"'x' is float64, expected float32\. Save it with \.astype\('float32'\)"),
        (GOOD | {"x": np.ones(3, np.float32)}, r"'x' has shape"),
        (GOOD | {"n": np.ones(2, np.int64)}, r"'n' holds 2 samples along axis 0, expected 3"),
        (GOOD | {"label": np.ones(2, np.int64)}, r"'label' holds 2 samples along axis 0, expected 3"),
        (GOOD | {"label": np.int64(2)}, r"'label' holds no samples along its first axis"),
        ({"x": np.ones((0, 2), np.float32), "n": np.ones(0, np.int64)}, "holds no samples"),
        (GOOD | {"x": np.array([[1, 2], [np.nan, 1], [1, 2]], np.float32)}, r"row 2: 'x' holds NaN"),
        (GOOD | {"n": np.array([None, 1, 2])}, "does not read as .npz"),
    ],
)
def test_arrays_that_do_not_fit_the_signature_are_refused_by_name(arrays, message, tmp_path):
    np.savez(tmp_path / "a.npz", **arrays)
    with pytest.raises(DataError, match=message):
        read(tmp_path / "a.npz", ARRAYS)


def test_a_damaged_or_lone_array_is_refused(tmp_path):
    (tmp_path / "a.npz").write_bytes(b"PK\x03\x04 cut short")
    with pytest.raises(DataError, match=r"does not read as \.npz"):
        read(tmp_path / "a.npz", ARRAYS)
    np.save(tmp_path / "b.npy", GOOD["x"])
    (tmp_path / "b.npy").rename(tmp_path / "b.npz")
    with pytest.raises(DataError, match="single array"):
        read(tmp_path / "b.npz", ARRAYS)


def test_a_broken_or_missing_image_is_named(tmp_path):
    save_image(tmp_path / "cat" / "1.png")
    whole = save_image(tmp_path / "cat" / "2.png").read_bytes()
    (tmp_path / "cat" / "2.png").write_bytes(whole[:40])
    with pytest.raises(DataError, match=r"row 2: .*2\.png is not an image"):
        read(tmp_path, IMAGES)
    path = write_jsonl(tmp_path / "i.jsonl", [{"image": "1.png"}])
    with pytest.raises(DataError, match=r"row 1: there is no image '1\.png'"):
        read(path, IMAGES)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["cat/1.png", "2.png"], r"both class folders \(cat\) and images \(2\.png\)"),
        (["bird/1.png"], "label 'bird' is none of the model's classes: cat, dog"),
        ([], "holds no samples"),
    ],
)
def test_a_folder_that_makes_no_sense_is_refused(names, message, tmp_path):
    for name in names:
        save_image(tmp_path / name)
    with pytest.raises(DataError, match=message):
        read(tmp_path, IMAGES)


def test_images_are_known_by_their_content_and_what_is_left_out_is_said(tmp_path):
    for name in ("cat/1.png", "cat/2.jpg", "dog/3.webp", "dog/4.gif", "dog/5.bmp", "dog/6.tif"):
        file = save_image(tmp_path / name, colour=int(name[4]))
        file.rename(file.with_suffix(".jfif" if name.startswith("cat") else ""))
    assert read(tmp_path, IMAGES).left_out == ""
    (tmp_path / "notes.txt").write_text("of cats")
    (tmp_path / ".hidden").write_text("")
    save_image(tmp_path / "dog" / "more" / "6.png")
    dataset = read(tmp_path, IMAGES)
    assert dataset.labels == [0, 0, 1, 1, 1, 1]
    assert "2 of 8 files" in dataset.left_out
    assert dataset.left_out.endswith("are no samples and are left out: dog/more/6.png, notes.txt")
    recipe = Recipe.parse({"source": "m", "data": str(tmp_path)})
    assert split_samples(recipe, IMAGES).left_out == (dataset.left_out,)
    (tmp_path / "dog" / "7.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"7\.png is not an image"):
        read(tmp_path, IMAGES)


def test_a_missing_file_is_answered_with_the_nearest_name(tmp_path):
    with pytest.raises(DataError, match="no file holds rows, and task 'text-embedding' reads no folders of images"):
        read(tmp_path, TEXT)
    (tmp_path / "texts.jsonl").touch()
    with pytest.raises(DataError, match=r"there is no .*text\.jsonl. Did you mean 'texts\.jsonl'\?"):
        read(tmp_path / "text.jsonl", TEXT)
    with pytest.raises(DataError, match="there is no"):
        read(tmp_path / "nowhere" / "text.jsonl", TEXT)


def test_the_fingerprint_follows_the_content_and_the_images_behind_a_file(tmp_path):
    first = read(write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}, {"text": "b"}]), TEXT)
    again = read(write_jsonl(tmp_path / "b.jsonl", [{"text": "a"}, {"text": "b"}]), TEXT)
    other = read(write_jsonl(tmp_path / "c.jsonl", [{"text": "a"}, {"text": "c"}]), TEXT)
    assert first.fingerprint == again.fingerprint != other.fingerprint
    path = write_jsonl(tmp_path / "i.jsonl", [{"image": "1.png"}])
    save_image(tmp_path / "1.png", colour=1)
    before = read(path, IMAGES).fingerprint
    save_image(tmp_path / "1.png", colour=2)
    assert read(path, IMAGES).fingerprint != before


def parts(values, **options):
    return split(make_dataset(values, TEXT), ROLES, **options)


many = st.lists(st.integers(0, 40).map(str), min_size=3).filter(lambda values: len(set(values)) >= 3)


@fast
@given(many, st.randoms())
def test_a_split_shares_nothing_loses_nothing_and_ignores_the_order(values, random):
    first = parts(values)
    held = {name: set(part.samples) for name, part in first.items()}
    assert all(held.values()), "no part is empty"
    assert sum(map(len, held.values())) == len(set(values)), "no content is in two parts"
    assert sorted(text for part in first.values() for text in part.samples) == sorted(values)
    random.shuffle(values)
    assert {name: part.fingerprint for name, part in parts(values).items()} == {
        name: part.fingerprint for name, part in first.items()
    }


@pytest.mark.parametrize("copies", [1, 3])
def test_many_rows_are_shuffled_and_hashed_as_few_are(copies):
    names = [f"{number // copies * 7 % 40:02}" for number in range(40)]
    order, edges = shuffle_groups(names, 5)
    groups = [order[start:stop].tolist() for start, stop in itertools.pairwise(edges)]
    different = sorted(set(names), key=lambda name: shuffle_key(name, 5))
    assert groups == [[row for row, name in enumerate(names) if name == group] for group in different]
    digests = [bytes([1] * 16 + [last] * 16) for last in (3, 1, 2)]
    assert sort_digests(b"".join(digests)).tolist() == [1, 2, 0]
    for extra in ("", "é", '"', "\\", "\n", 7):
        many = [*map(str, range(MANY)), extra]
        text = json.dumps([many, 1], sort_keys=True, separators=(",", ":"))
        assert hash_of(many, 1) == hashlib.sha256(text.encode()).hexdigest()[:32]


def test_a_split_keeps_its_sizes_and_its_labels_and_never_tears_a_pair(tmp_path):
    values = [str(number) for number in range(100)]
    dataset = make_dataset(values, TEXT, labels=values)
    first = split(dataset, ROLES)
    assert [len(part) for part in first.values()] == [40, 20, 40]
    assert all(list(part.samples) == part.labels for part in first.values())
    assert set(split(dataset, ROLES, seed=1)["holdout"].samples) != set(first["holdout"].samples)
    rows = [{"text1": f"a{k}", "text2": f"b{k}", "score": k} for k in range(20)]
    for part in split(read(write_jsonl(tmp_path / "p.jsonl", rows), TEXT), ROLES).values():
        assert [text[1:] for text in part.samples[0::2]] == [text[1:] for text in part.samples[1::2]]
        assert part.labels == [float(text[1:]) for text in part.samples]
    with pytest.raises(DataError, match="holds 2 different samples, at least 3 are needed: one for each of calibrate"):
        parts(["a", "b", "b", "a"])


@fast
@given(many, st.integers(1, 30))
def test_what_is_taken_is_varied_and_no_more_than_asked(values, count):
    dataset = make_dataset(values, TEXT)
    taken = dataset.take(count)
    assert len(taken) == min(count, len(set(values)))
    assert len(set(taken.samples)) == len(taken)
    assert set(taken.samples) <= set(values)
    assert taken.fingerprint == make_dataset(values[::-1], TEXT).take(count).fingerprint


def test_what_is_taken_holds_short_and_long_samples_and_what_another_dataset_holds_is_left_out():
    lengths = make_dataset(["x" * length for length in range(1, 101)], TEXT).take(10).lengths
    assert [(length - 1) // 10 for length in lengths] == list(range(10))
    first, second = make_dataset(["a", "b", "c", "c"], TEXT, labels=list("abcc")), make_dataset(["c", "d"], TEXT)
    rest = first.without(second)
    assert list(rest.samples) == rest.labels == ["a", "b"]
    assert second.without(rest) is second
    with pytest.raises(DataError, match="nothing that is not in"):
        rest.without(first)
    with pytest.raises(DataError, match="1 labels for 2 samples"):
        make_dataset(["a", "b"], TEXT, labels=["x"])


@fast
@given(many, st.integers(1, 7))
def test_batches_hold_every_sample_once_sorted_by_length(values, rows):
    dataset = make_dataset(values, TEXT)
    seen = [indices for indices, _ in batches(dataset, TEXT, rows)]
    assert sorted(index for indices in seen for index in indices) == list(range(len(values)))
    assert max(map(len, seen)) <= rows
    lengths = [dataset.lengths[index] for indices in seen for index in indices]
    assert lengths == sorted(lengths)


def test_a_batch_holds_what_its_indices_say_and_no_samples_of_unlike_shape(tmp_path):
    texts = ["a cat sat on a mat", "red", "a cat", "blue"]
    dataset = make_dataset(texts, TEXT)
    for indices, batch in batches(dataset, TEXT, 2):
        expected = TEXT.encode([texts[index] for index in indices])
        assert all(np.array_equal(batch[name], expected[name]) for name in expected)
    for number, size in enumerate([(4, 4), (5, 4), (4, 4), (5, 4), (4, 4)]):
        save_image(tmp_path / f"{number}.png", size=size, colour=number)
    found = [(indices.tolist(), batch["pixels"].shape) for indices, batch in batches(read(tmp_path, IMAGES), IMAGES, 2)]
    assert sorted(found) == [([0, 2], (2, 3, 4, 4)), ([1, 3], (2, 3, 4, 5)), ([4], (1, 3, 4, 4))]


def test_memory_does_not_grow_with_the_number_of_images(tmp_path):
    def peak(count):
        for number in range(count):
            save_image(tmp_path / str(count) / f"{number}.png", size=(64, 64), colour=number % 256)
        dataset = read(tmp_path / str(count), IMAGES)
        tracemalloc.start()
        for _ in batches(dataset, IMAGES, 4):
            pass
        highest = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return highest

    assert peak(120) < 2 * peak(12), "one image is 49 kB"


@pytest.mark.sweep("False-*", "True-goal2-*", "True-goal3-*")
@pytest.mark.parametrize(
    ("labelled", "goal", "limit", "expected"),
    [
        (False, {}, None, MOST),
        (True, {}, None, LABELLED),
        (True, {"max_drop": "1%"}, None, WHERE_ASKED),
        (True, {"max_drop": "1%"}, 300, {"choose": 300, "judge": 300}),
    ],
)
def test_more_samples_choose_and_judge_where_answers_are_counted(tmp_path, labelled, goal, limit, expected):
    path = tmp_path / "d.npz"
    labels = {"label": np.zeros(10_000, np.int64)} if labelled else {}
    np.savez(path, x=np.random.default_rng(0).normal(size=(10_000, 2)).astype(np.float32), **labels)
    task = Tensors((TensorSpec(name="x", dtype="float32", shape=("batch", 2)),))
    recipe = Recipe.parse({"source": "m", "data": {"calibrate": str(path), "limit": limit}, "goal": goal})
    found = split_samples(recipe, task)
    assert {"choose": len(found.choose.keys), "judge": len(found.judge.keys)} == expected


@pytest.mark.parametrize("suffix", WRITERS)
def test_the_kind_of_a_sample_is_read_from_every_format_with_columns(suffix, tmp_path):
    rows = [{"text": "one", "kind": "licence"}, {"text": "two", "kind": "manual"}]
    assert read(WRITERS[suffix](tmp_path / f"k{suffix}", rows), TEXT).kinds == ("licence", "manual")


def test_the_kinds_of_samples_follow_them_through_splits(tmp_path):
    rows = [{"text": f"text {number}", "kind": "even" if number % 2 == 0 else 7} for number in range(40)]
    found = read(write_jsonl(tmp_path / "k.jsonl", [*rows, {"text": "none"}]), TEXT)
    assert found.kinds[:2] == ("even", "7")
    assert found.kinds[-1] == ""
    kinds = dict(zip(found.samples, found.kinds, strict=True))
    for part in (*split(found, {"a": 0.5, "b": 0.5}).values(), found.take(9)):
        assert part.kinds == tuple(kinds[sample] for sample in part.samples)
    plain = read(write_jsonl(tmp_path / "p.jsonl", [{"text": row["text"]} for row in rows]), TEXT)
    assert plain.kinds == ()
    with pytest.raises(DataError, match=r"row 1: expected a string under 'kind', got list"):
        read(write_jsonl(tmp_path / "l.jsonl", [{"text": "a", "kind": ["b"]}]), TEXT)


def test_columns_may_have_other_names_in_every_format(tmp_path):
    (tmp_path / "t.csv").write_text("sentence,category\none,a\ntwo,b\n")
    found = read(tmp_path / "t.csv", TEXT, {"text": "sentence", "label": "category"})
    assert list(found.samples) == ["one", "two"]
    with pytest.raises(DataError, match=r"no column 'body' for 'text'\. The columns are 'sentence', 'category'"):
        read(tmp_path / "t.csv", TEXT, {"text": "body"})
    with pytest.raises(DataError, match=r"among the columns 'sentence', 'category'.*--column text=NAME"):
        read(tmp_path / "t.csv", TEXT)
    pq.write_table(pa.table({"sentence": ["one", "two"], "other": [1, 2]}), tmp_path / "t.parquet")
    assert list(read(tmp_path / "t.parquet", TEXT, {"text": "sentence"}).samples) == ["one", "two"]


def test_a_dataset_may_lie_in_several_files_of_a_folder(tmp_path):
    for number in range(3):
        (tmp_path / f"part-{number}.jsonl").write_text(json.dumps({"text": f"text {number}"}) + "\n")
    assert list(read(tmp_path, TEXT).samples) == ["text 0", "text 1", "text 2"]
    (tmp_path / "part-2.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"part-2\.jsonl, row 1"):
        read(tmp_path, TEXT)
    (tmp_path / "more.csv").write_text("text\na\n")
    with pytest.raises(DataError, match=r"several formats: \.csv, \.jsonl"):
        read(tmp_path, TEXT)


def test_a_limited_drop_needs_labels_of_several_classes_and_few_samples_to_judge_by_are_reported():
    labelled = make_dataset(["a", "b", "c"], TEXT, labels=["x", "x", "x"])
    kind = copy.copy(TEXT)
    kind.has_class_head = True
    with pytest.raises(DataError, match=r"all labels of .* are of one class"):
        check_labels(labelled, kind, 0.01)
    with pytest.raises(DataError, match="has no labels"):
        check_labels(make_dataset(["a", "b"], TEXT), kind, 0.01)
    check_labels(make_dataset(["a", "b"], TEXT, labels=["x", "y"]), kind, 0.01)
    check_labels(labelled, kind, None)
    assert "4 samples judge the result: the verdict will be inconclusive at best" in str(
        describe_uncertainty(make_dataset(["a", "b", "c", "d"], TEXT))
    )
    assert describe_uncertainty(make_dataset([str(each) for each in range(30)], TEXT)) is None
