import base64
import io

import numpy as np
import orjson
import pytest
from artifacts import embedding_task, text_inputs, tiny_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageOps

from laconic.errors import CorruptArtifact, DataError, InputError
from laconic.tasks import image_preprocess
from laconic.tasks.fill_mask import FillMask
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_embedding import ImageEmbedding
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.multi_label_classification import MultiLabelClassification
from laconic.tasks.question_answering import QuestionAnswering
from laconic.tasks.task import open_task
from laconic.tasks.tensors import Tensors
from laconic.tasks.text_classification import TextClassification
from laconic.tasks.text_embedding import TextEmbedding
from laconic.tasks.text_ranking import TextRanking
from laconic.tasks.text_regression import TextRegression
from laconic.tasks.token_classification import TokenClassification
from laconic.tasks.tolerance import Tolerance
from laconic.tensor import TensorSpec, check_inputs

PIXELS = TensorSpec(
    name="pixels", dtype="float32", shape=("batch", 3, "height", "width"), bounds={"height": (4, 64), "width": (4, 64)}
)
TASKS = {
    "text-embedding": embedding_task(),
    "text-classification": TextClassification(
        tiny_tokenizer(), text_inputs(), max_tokens=16, pad_id=0, labels=("no", "yes")
    ),
    "multi-label-classification": MultiLabelClassification(
        tiny_tokenizer(), text_inputs(), max_tokens=16, pad_id=0, labels=("red", "green")
    ),
    "text-regression": TextRegression(tiny_tokenizer(), text_inputs(), max_tokens=16, pad_id=0, labels=("a", "b")),
    "text-ranking": TextRanking(tiny_tokenizer(), text_inputs(), max_tokens=16, pad_id=0, activation="sigmoid"),
    "token-classification": TokenClassification(
        tiny_tokenizer(), text_inputs(), max_tokens=16, pad_id=0, labels=("O", "B-PER")
    ),
    "question-answering": QuestionAnswering(tiny_tokenizer(), text_inputs(), max_tokens=16, pad_id=0),
    "fill-mask": FillMask(tiny_tokenizer(), text_inputs(), max_tokens=16, pad_id=0, mask_id=3),
    "image-embedding": ImageEmbedding((PIXELS,), preprocess=ImagePreprocess(resize=(8, 8))),
    "image-classification": ImageClassification(
        (PIXELS,), preprocess=ImagePreprocess(resize=(8, 8), mean=(0.5,) * 3, std=(0.5,) * 3), labels=("cat", "dog")
    ),
    "tensors": Tensors(
        (
            TensorSpec(name="x", dtype="float32", shape=("batch", "time"), bounds={"time": (1, 32)}),
            TensorSpec(name="n", dtype="int64", shape=("batch",)),
        )
    ),
}
SHAPES = {"token-classification": (4, 16, 2), "question-answering": (4, 16, 2)}
"""Of outputs that are no [samples, 2]."""
each_task = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())


def png(size=(8, 6), colour=(255, 0, 0), mode="RGB"):
    buffer = io.BytesIO()
    Image.new(mode, size, colour).save(buffer, "PNG")
    return buffer.getvalue()


@each_task
def test_a_task_comes_back_from_its_assets(task, tmp_path):
    for name, content in task.assets().items():
        (tmp_path / name).write_bytes(content)
    again = type(task).from_assets(tmp_path, task.inputs)
    assert again.assets() == task.assets()
    samples = task.examples(3)
    assert {name: array.tolist() for name, array in again.encode(samples).items()} == {
        name: array.tolist() for name, array in task.encode(samples).items()
    }


@each_task
def test_examples_and_typical_batches_fit_the_signature(task):
    check_inputs(task.inputs, task.encode([task.parse(sample) for sample in task.examples(5)]))
    check_inputs(task.inputs, task.typical(3, 12))
    assert all(len(array) == 3 for array in task.typical(3, 12).values())


@each_task
def test_examples_are_the_same_for_the_same_seed(task):
    first, again, other = (task.encode(task.examples(4, seed)) for seed in (1, 1, 2))
    assert all(np.array_equal(first[name], again[name]) for name in first)
    assert any(not np.array_equal(first[name], other[name]) for name in first)


@each_task
def test_the_same_answers_are_wholly_faithful_and_every_answer_decodes_to_json(task):
    outputs = {"y": np.random.default_rng(0).normal(size=SHAPES.get(task.name, (4, 2))).astype(np.float32)}
    assert task.fidelity(outputs, outputs) == pytest.approx(np.ones(4))
    assert all(agreement.value == pytest.approx(1) for agreement in task.agreements(outputs, outputs))
    assert task.tolerance.met_by(task.fidelity(outputs, outputs))
    answers = task.decode(outputs, [task.parse(sample) for sample in task.examples(4)])
    assert len(answers) == 4
    orjson.dumps(answers, option=orjson.OPT_SERIALIZE_NUMPY)


@each_task
def test_answers_turned_round_are_not_faithful(task):
    outputs = {"y": np.random.default_rng(0).normal(size=SHAPES.get(task.name, (4, 2))).astype(np.float32)}
    assert not task.tolerance.met_by(task.fidelity(outputs, {"y": -outputs["y"]}))


@each_task
@pytest.mark.parametrize("value", [None, 3.5, {"no such input": [1]}, object()])
def test_what_is_no_sample_is_refused(task, value):
    with pytest.raises(InputError):
        task.parse(value)


def test_a_damaged_or_missing_asset_is_named(tmp_path):
    task = TASKS["text-embedding"]
    for name, content in task.assets().items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "tokenizer.json").write_bytes(b"{")
    with pytest.raises(CorruptArtifact, match=r"tokenizer\.json does not read"):
        TextEmbedding.from_assets(tmp_path, task.inputs)
    (tmp_path / "preprocess.json").unlink()
    with pytest.raises(CorruptArtifact, match=r"preprocess\.json is missing"):
        TextEmbedding.from_assets(tmp_path, task.inputs)


def test_texts_are_padded_to_the_longest_and_cut_at_the_limit():
    task = embedding_task(longest=4)
    batch = task.encode(["red", "the cat sat on a mat"])
    assert batch["input_ids"].shape == (2, 4)
    assert batch["input_ids"][0].tolist()[1:] == [0, 0, 0]
    assert batch["attention_mask"].tolist() == [[1, 0, 0, 0], [1, 1, 1, 1]]


@given(st.lists(st.text(max_size=30), min_size=1, max_size=5))
def test_any_text_at_all_can_be_encoded_beside_any_other(texts):
    task = TASKS["text-embedding"]
    together = task.encode(texts)
    for row, text in enumerate(texts):
        alone = task.encode([text])
        width = alone["input_ids"].shape[1]
        assert np.array_equal(together["input_ids"][row, :width], alone["input_ids"][0])
        assert not together["attention_mask"][row, width:].any()


def test_embeddings_are_scored_by_class_or_by_pair():
    task, everything = TASKS["text-embedding"], np.arange(4)
    vectors = {"y": np.array([[1, 0], [0.9, 0.1], [0, 1], [0.1, 0.9]])}
    assert task.scorer(vectors, ["a", "a", "b", "b"])(everything) == 1
    assert task.scorer(vectors, ["a", "b", "a", "b"])(everything) == 0
    six = {"y": np.array([[1, 0], [1, 0], [1, 0], [1, 1], [1, 0], [0, 1]])}
    assert task.scorer(six, [1.0, 1.0, 0.5, 0.5, 0.0, 0.0])(np.arange(6)) == pytest.approx(1)
    with pytest.raises(InputError, match=r"scores are for pairs"):
        TASKS["text-embedding"].parse_label(0.5, "")


@pytest.mark.parametrize(("label", "index"), [("yes", 1), (1, 1), ("1", 1), (np.int64(0), 0)])
def test_a_class_goes_by_its_name_or_its_number(label, index):
    assert TASKS["text-classification"].parse_label(label, "") == index


@pytest.mark.parametrize("label", ["maybe", 2, -1, "7", True, 0.5])
def test_an_unknown_class_is_refused_with_the_known_ones(label):
    with pytest.raises(DataError, match="none of the model's classes: no, yes"):
        TASKS["text-classification"].parse_label(label, "")


def test_numbers_are_names_wherever_the_names_are_numbers():
    stars = TASKS["text-classification"].with_labels(["1", "2", "3", "4", "5"])
    assert [stars.parse_label(label, "") for label in (1, "1", 5, "5", np.int64(2))] == [0, 0, 4, 4, 1]
    for label in (0, "0", 6, "01"):
        with pytest.raises(DataError, match="none of the model's classes: 1, 2, 3, 4, 5"):
            stars.parse_label(label, "")
    signs = stars.with_labels(["-1", "1"])
    assert [signs.parse_label(label, "") for label in (-1, "-1", 1)] == [0, 0, 1]
    zeros = stars.with_labels(["01", "02", "1"])
    assert [zeros.parse_label(label, "") for label in ("01", "1", 1)] == [0, 2, 2]
    with pytest.raises(DataError, match="label '00' is none"):
        TASKS["text-classification"].parse_label("00", "")


def test_classifiers_answer_with_the_likeliest_class_first():
    (answer,) = TASKS["text-classification"].decode({"logits": np.log(np.array([[0.2, 0.8]]))}, [""])
    assert answer["label"] == "yes"
    assert [round(each["score"], 6) for each in answer["scores"]] == [0.8, 0.2]
    assert TASKS["text-classification"].scorer({"logits": np.array([[0, 1], [0, 1]])}, [1, 0])(np.arange(2)) == 0.5
    (several,) = TASKS["multi-label-classification"].decode({"y": np.array([[0.5, 2.0]])}, ["a"])
    assert several["labels"] == [score["label"] for score in several["scores"]] == ["green", "red"]


def test_an_image_comes_as_bytes_base64_path_or_array(tmp_path):
    task, content = TASKS["image-classification"], png()
    (tmp_path / "1.png").write_bytes(content)
    encoded = base64.b64encode(content).decode()
    forms = [content, tmp_path / "1.png", encoded, f"data:image/png;base64,{encoded}"]
    pixels = [task.parse(form) for form in forms]
    assert all(np.array_equal(pixels[0], other) for other in pixels)
    assert pixels[0].shape == (3, 8, 8)
    assert pixels[0][:, 0, 0].tolist() == [1, -1, -1]
    assert np.array_equal(task.parse(pixels[0]), pixels[0])


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "1", "CMYK", "I;16"])
def test_images_of_every_kind_become_three_channels(mode, tmp_path):
    Image.new(mode, (9, 5)).save(tmp_path / "i.tiff")
    assert TASKS["image-classification"].parse(tmp_path / "i.tiff").shape == (3, 8, 8)


def test_the_centre_is_cut_out_and_the_range_of_deep_images_is_kept_or_refused():
    preprocess = ImagePreprocess(shortest_edge=10, crop=(8, 6))
    assert preprocess.apply(Image.new("RGB", (40, 20))).shape == (3, 8, 6)
    grey = (np.arange(256, dtype=np.uint16) * 256 + 77).reshape(16, 16)
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG")
    pixels = ImagePreprocess(channels=1, scale=1).apply(image_preprocess.open_image(file.getvalue()))
    assert np.array_equal(pixels[0], np.arange(256).reshape(16, 16))
    apply = ImagePreprocess(scale=1).apply
    assert apply(Image.fromarray(np.full((4, 4), 200, np.int32))).max() == 200
    for values in (np.full((4, 4), 70_000, np.int32), np.full((4, 4), -1.0, np.float32), np.full((4, 4), np.nan)):
        with pytest.raises(InputError, match="32 bits"):
            apply(Image.fromarray(values.astype(np.float32) if values.dtype == np.float64 else values))


@pytest.mark.parametrize("content", [b"", b"GIF89a", png()[:40], b"\x89PNG" + bytes(100)])
def test_bytes_that_are_no_image_are_refused(content):
    with pytest.raises(InputError, match="is not an image that can be read"):
        TASKS["image-classification"].parse(content)


@pytest.mark.parametrize("text", ["not base64!", "é", "日本", "\x00"])
def test_text_that_is_no_base64_is_refused(text):
    with pytest.raises(InputError, match="base64"):
        TASKS["image-classification"].parse(text)


def test_an_image_of_too_many_pixels_is_refused_before_it_is_decoded(monkeypatch):
    monkeypatch.setattr(image_preprocess, "MAX_PIXELS", 40)
    with pytest.raises(InputError, match="8 x 6 pixels, more than 40"):
        TASKS["image-classification"].parse(png())


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photograph_is_turned_as_its_exif_says_and_as_transformers_does(orientation):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (6, 8, 3), np.uint8))
    exif = image.getexif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, "PNG", exif=exif)
    upright = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(file.getvalue()))))
    assert np.array_equal(np.asarray(image_preprocess.open_image(file.getvalue())), upright)


@pytest.mark.parametrize(
    "value", [{"x": [1.0], "n": 1.5}, {"x": [1e39], "n": 1}, {"x": ["1"], "n": 1}, {"x": [1.0], "n": "1"}]
)
def test_numbers_are_neither_cut_nor_rounded_to_infinity_nor_read_from_text(value):
    with pytest.raises(InputError):
        TASKS["tensors"].parse(value)


def test_ids_beyond_the_vocabulary_are_refused():
    task = TASKS["text-embedding"]
    good = task.encode([task.parse("the cat")])
    task.check_values(good)
    for name, value in (
        ("input_ids", task.vocabulary),
        ("input_ids", -1),
        ("attention_mask", 2),
        ("attention_mask", -1),
    ):
        bad = {key: array.copy() for key, array in good.items()}
        bad[name][0, 0] = value
        with pytest.raises(InputError, match=f"input '{name}' runs from"):
            task.check_values(bad)


def test_arrays_of_unlike_shape_do_not_share_a_batch():
    task = TASKS["tensors"]
    samples = [task.parse({"x": [1.0] * length, "n": 1}) for length in (2, 3)]
    with pytest.raises(InputError, match="'x' must be of one shape in a batch"):
        task.encode(samples)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"x": ["a"], "n": 1}, "'x' is not an array of float32"),
        ({"x": [[1.0], [1.0, 2.0]], "n": 1}, "'x' is not an array of float32"),
        ({"x": [1.0], "n": 2**70}, "'n' is not an array of int64"),
        ({"x": [1.0]}, r"missing \['n'\]"),
        ({"x": [1.0], "n": 1, "z": 1}, r"unknown \['z'\]"),
        ({"x": [1.0] * 33, "n": 1}, "33 along axis 'time', expected 1 to 32"),
        ([1.0], r"an object with the arrays \['x', 'n'\], not list"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(value, message):
    with pytest.raises(InputError, match=message):
        TASKS["tensors"].parse(value)


def test_a_tolerance_counts_the_worst_where_it_says_so():
    fidelity = np.array([1, 1, 0.9])
    assert Tolerance(mean=0.95).met_by(fidelity)
    assert not Tolerance(mean=0.95, worst=0.95).met_by(fidelity)
    assert not Tolerance(mean=0.95).met_by(np.array([1, np.nan]))
    assert Tolerance(mean=0.95, worst=0.9).describe() == "mean >= 0.95, worst >= 0.9"


def test_arrays_are_scored_by_class_or_by_distance_and_their_fidelity_is_in_standard_deviations():
    task, both = TASKS["tensors"], np.arange(2)
    answers = {"y": np.array([[0.0, 1.0], [2.0, 0.0]])}
    assert task.scorer(answers, [1, 1])(both) == 0.5
    assert task.scorer(answers, [[0.0, 1.0], [2.0, 0.0]])(both) == 1
    assert task.scorer(answers, [[0.0, 1.0], [1.0, 0.0]])(both) == pytest.approx((-1 + 1) / 2)
    with pytest.raises(InputError, match="a label holds 1 numbers, an answer 2"):
        task.scorer(answers, [0.5, 0.5])
    task = Tensors((TensorSpec(name="x", dtype="float32", shape=("batch", 2)),))
    wanted, found = np.array([[1003.0], [1005.0]], np.float32), np.array([[1003.0], [1004.9]], np.float32)
    assert task.fidelity({"y": wanted}, {"y": found}) == pytest.approx([1, 1 / 1.005], abs=1e-4)


@pytest.mark.parametrize("label", ["cat", True, [1, [2]], {"a": 1}])
def test_a_label_of_arrays_is_a_number_or_several(label):
    with pytest.raises(InputError, match="a label must be a number"):
        TASKS["tensors"].parse_label(label, "")


def test_fragments_are_short_pieces_of_the_samples_and_texts_that_are_cut_are_counted():
    task = embedding_task()
    samples = ["one two three four five six seven eight nine ten", ("a b c d e f g h", "i j")]
    pieces = task.fragments(samples, 40, seed=3)
    assert pieces == task.fragments(samples, 40, seed=3)
    assert len(pieces) == 40
    assert "" not in pieces, "this tokenizer adds no special tokens, so that an empty text has none"
    assert all(piece in samples[0] or piece in samples[1][0] for piece in pieces)
    assert max(len(piece.split()) for piece in pieces) <= 5
    assert Tensors(()).fragments([{}], 5) == []
    task = embedding_task()
    with task.truncated(6):
        assert task.count_cut(["the model", "the model answers every question about its weights", ""]) == 1


def test_a_token_that_the_model_has_no_embedding_for_is_named_when_the_texts_are_read(tmp_path):
    task = embedding_task()
    texts = ["the model answers", "every request waits"]
    task.check_samples(texts)
    highest = max(task.encode(texts)["input_ids"].flat)
    task.limit_ids(int(highest))
    with pytest.raises(InputError, match=rf"the id {highest}, .* ids 0 to {highest - 1}.* another model"):
        task.check_samples(texts)
    for name, content in task.assets().items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match="another model"):
        open_task("text-embedding", tmp_path, task.inputs).encode(texts)
    assert task.typical(4, 8)["input_ids"].max() < highest


@pytest.mark.parametrize("value", [[1, "two", []], None, {"a": {}}, [[1], [2, 3]]])
def test_an_unknown_input_is_named_whatever_it_holds(value):
    task = Tensors((TensorSpec(name="x", dtype="float32", shape=("batch", 2)),))
    with pytest.raises(InputError, match=r"unknown \['y'\]"):
        task.parse({"x": [1, 2], "y": value})


@pytest.mark.parametrize("label", ["hello world", "", 99, -1, True, 0.5, None])
def test_what_is_not_one_token_is_no_label(label):
    with pytest.raises(DataError, match="label"):
        TASKS["fill-mask"].parse_label(label, "")
