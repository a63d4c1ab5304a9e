"""Copies and near copies are found whatever they are of, stay together in a split, and count as one observation."""

import io
import json

import numpy as np
import pytest
import tokenizers
from artifacts import text_inputs
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from tokenizers import Regex, Tokenizer, pre_tokenizers

from laconic.data.dataset import split
from laconic.data.near_copies import group_near_copies
from laconic.data.reader import read
from laconic.data.rows import reduce_array
from laconic.recipes.recipe import Recipe
from laconic.recipes.splits import split_samples
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.question_answering import QuestionAnswering
from laconic.tasks.tensors import Tensors
from laconic.tasks.text_embedding import TextEmbedding
from laconic.tensor import TensorSpec


def spell() -> Tokenizer:
    """A tokenizer whose tokens are letters."""
    letters = {"?": 0} | {chr(code): code - 31 for code in range(32, 127)}
    tokenizer = Tokenizer(tokenizers.models.WordLevel(letters, "?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return tokenizer


TASK = TextEmbedding(spell(), text_inputs(64), max_tokens=64, pad_id=0)
"""Reads the first 64 letters of a text."""
QUESTIONS = QuestionAnswering(spell(), text_inputs(400), max_tokens=400, pad_id=0)


def write_texts(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def sentences(count, seed=0):
    """Sentences of different words, so many that hardly two share most of them."""
    rng = np.random.default_rng(seed)
    syllables = [first + second for first in "bdfgklmnprst" for second in "aeiou"]
    return [" ".join("".join(rng.choice(syllables, 3)) for _ in range(15)) for _ in range(count)]


def grouped(path, task=TASK):
    (dataset,) = group_near_copies(read(path, task, sketched=True))
    return dataset


def test_texts_that_differ_by_case_or_a_space_are_never_on_both_sides_of_a_split(tmp_path):
    """Of 400 such rows, 160 of 180 judging rows were in calibration too."""
    texts = sentences(40)
    ways = [str.upper, str.title, "{} ".format, " {}".format, "{}.".format, "{}!".format, str.capitalize, "'{}'".format]
    rows = [way(text) for text in texts for way in (str, *ways, lambda text: text.replace(" ", "  "))]
    data = write_texts(tmp_path / "t.jsonl", rows)
    assert len(rows) == 400
    dataset = grouped(data)
    assert len(set(dataset.copies)) == 40
    splits = split_samples(Recipe.parse({"source": "m", "data": str(data)}), TASK)
    assert splits.copies == 360
    assert len(splits.judge) == 18, "a group counts once"
    normal = [
        {" ".join(str(text).strip(" .!'").casefold().split()) for text in part.samples}
        for part in (splits.calibrate, splits.choose, splits.judge)
    ]
    assert not normal[0] & normal[1]
    assert not (normal[0] | normal[1]) & normal[2]


def test_a_letter_that_is_changed_or_not_read_makes_no_other_text_and_a_word_does(tmp_path):
    (text,) = sentences(1)
    words = text.split()
    other = " ".join([*words[:5], "zzzzzz", *words[6:]])
    typo = text[:40] + ("x" if text[40] != "x" else "y") + text[41:]
    dataset = grouped(write_texts(tmp_path / "t.jsonl", [text, typo, other, *sentences(5, seed=1)]))
    assert dataset.copies[0] == dataset.copies[1]
    assert len(set(dataset.copies)) == 7
    (start,) = sentences(1)
    dataset = grouped(write_texts(tmp_path / "t.jsonl", [start + tail for tail in (" alpha", " omega" * 40, "")]))
    assert len(set(dataset.copies)) == 1, "only the first 64 letters are read"


def test_questions_about_one_passage_are_no_copies(tmp_path):
    passage = " ".join(sentences(3))
    rows = [{"question": question, "context": passage} for question in sentences(3, seed=9)]
    rows.append(rows[0] | {"question": rows[0]["question"].upper()})
    path = tmp_path / "q.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    dataset = grouped(path, QUESTIONS)
    assert dataset.copies[0] == dataset.copies[3]
    assert len(set(dataset.copies)) == 3


def picture(seed):
    rng = np.random.default_rng(seed)
    coarse = rng.integers(0, 255, (6, 6, 3), np.uint8)
    return Image.fromarray(coarse).resize((48, 48), Image.Resampling.BICUBIC)


def test_images_that_were_compressed_again_are_copies_and_others_are_not(tmp_path):
    task = ImageClassification(
        (TensorSpec(name="pixels", dtype="float32", shape=("batch", 3, 32, 32)),),
        preprocess=ImagePreprocess(resize=(32, 32)),
        labels=("a", "b"),
    )
    for seed in range(30):
        image = picture(seed)
        image.save(tmp_path / f"{seed}.png")
        if seed < 10:
            again = io.BytesIO()
            image.save(again, "JPEG", quality=85)
            (tmp_path / f"{seed}-again.jpg").write_bytes(again.getvalue())
    dataset = grouped(tmp_path, task)
    assert len(dataset) == 40
    assert len(set(dataset.copies)) == 30


def test_arrays_with_a_little_noise_are_copies_and_whole_numbers_must_be_equal(tmp_path):
    rng = np.random.default_rng(0)
    task = Tensors(
        (
            TensorSpec(name="x", dtype="float32", shape=("batch", 20)),
            TensorSpec(name="id", dtype="int64", shape=("batch",)),
        )
    )
    x = rng.normal(size=(50, 20)).astype(np.float32)
    noisy = x[:20] + rng.normal(scale=0.005, size=(20, 20)).astype(np.float32)
    np.savez(tmp_path / "a.npz", x=np.concatenate([x, noisy]), id=np.concatenate([np.arange(50), np.arange(20)]))
    assert len(set(grouped(tmp_path / "a.npz", task).copies)) == 50
    np.savez(tmp_path / "b.npz", x=np.concatenate([x, noisy]), id=np.arange(70))
    assert len(set(grouped(tmp_path / "b.npz", task).copies)) == 70


def test_handwritten_digits_are_hardly_ever_copies_of_one_another(tmp_path):
    import digits

    images, labels = digits.samples()
    np.savez(tmp_path / "d.npz", image=images, label=labels)
    dataset = grouped(tmp_path / "d.npz", Tensors((digits.IMAGE,)))
    assert len(set(dataset.copies)) > 0.99 * len(dataset)


def test_copies_in_another_file_are_not_judged_by(tmp_path):
    texts = sentences(60)
    calibrate = write_texts(tmp_path / "c.jsonl", texts[:40])
    evaluate = write_texts(tmp_path / "e.jsonl", [text.upper() for text in texts[30:]])
    train = write_texts(tmp_path / "t.jsonl", [f"{text}?" for text in texts[50:]] + sentences(5, seed=3))
    data = {"calibrate": str(calibrate), "evaluate": str(evaluate), "train": str(train)}
    splits = split_samples(Recipe.parse({"source": "m", "data": data}), TASK)
    assert sorted(splits.judge.samples) == sorted(text.upper() for text in texts[40:])
    assert len(splits.train) == 5


@given(st.permutations(range(12)))
def test_groups_do_not_depend_on_the_order_of_rows(order):
    import tempfile
    from pathlib import Path

    texts = [way(text) for text in sentences(6) for way in (str, str.upper)]
    with tempfile.TemporaryDirectory() as folder:
        plain = grouped(write_texts(Path(folder) / "a.jsonl", texts))
        mixed = grouped(write_texts(Path(folder) / "b.jsonl", [texts[place] for place in order]))
    assert dict(zip(plain.keys, plain.copies, strict=True)) == dict(zip(mixed.keys, mixed.copies, strict=True))
    parts = split(plain, {"one": 0.5, "other": 0.5})
    assert not set(parts["one"].copies) & set(parts["other"].copies)


@pytest.mark.parametrize(
    ("shape", "numbers"),
    [((), 1), ((5,), 5), ((64,), 64), ((65,), 128), ((3, 4), 12), ((3, 100, 90), 192), ((9, 8, 8), 512)],
)
def test_few_numbers_stand_for_an_array_of_any_shape(shape, numbers):
    array = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    reduced = reduce_array(array)
    assert reduced.shape == (numbers,)
    assert reduced.dtype == np.float32
    if array.size == numbers:
        assert reduced == pytest.approx(array.ravel())


@pytest.mark.parametrize("value", [0.0, 0.5])
def test_rows_of_whole_numbers_and_of_one_array_alone_are_copies_where_they_are_equal(tmp_path, value):
    tokens = Tensors((TensorSpec(name="x", dtype="int64", shape=("batch", 8)),))
    rows = np.random.default_rng(0).integers(0, 9, (20, 8))
    np.savez(tmp_path / "a.npz", x=np.concatenate([rows, rows[:5]]))
    assert len(set(grouped(tmp_path / "a.npz", tokens).copies)) == 20
    task = Tensors((TensorSpec(name="x", dtype="float32", shape=("batch", 30)),))
    np.savez(tmp_path / "b.npz", x=np.full((5, 30), value, np.float32))
    assert len(set(grouped(tmp_path / "b.npz", task).copies)) == 1
