"""Outputs that an original might give for each task, hard to judge: a large offset, rare classes, mostly nothing."""

import numpy as np
from artifacts import text_inputs, tiny_tokenizer

from laconic.tasks.audio_classification import AudioClassification
from laconic.tasks.audio_preprocess import AudioPreprocess, LogMelPreprocess
from laconic.tasks.ctc_vocabulary import CtcVocabulary
from laconic.tasks.decoder_tensors import IMAGE_FEATURES, PROBABILITIES, TOKENS
from laconic.tasks.fill_mask import FillMask
from laconic.tasks.generation_settings import GenerationSettings
from laconic.tasks.image_classification import ImageClassification
from laconic.tasks.image_embedding import ImageEmbedding
from laconic.tasks.image_frames import ImageFrames
from laconic.tasks.image_preprocess import ImagePreprocess
from laconic.tasks.image_text_to_text import ImageTextToText
from laconic.tasks.multi_label_classification import MultiLabelClassification
from laconic.tasks.null_answers import NULL
from laconic.tasks.object_detection import ObjectDetection
from laconic.tasks.question_answering import QuestionAnswering
from laconic.tasks.semantic_segmentation import SemanticSegmentation
from laconic.tasks.speech_recognition import SpeechRecognition
from laconic.tasks.speech_to_text import FEATURES, SpeechToText
from laconic.tasks.tensors import Tensors
from laconic.tasks.text2text_generation import Text2TextGeneration
from laconic.tasks.text_classification import TextClassification
from laconic.tasks.text_embedding import TextEmbedding
from laconic.tasks.text_generation import TextGeneration, describe_inputs
from laconic.tasks.text_ranking import TextRanking
from laconic.tasks.text_regression import TextRegression
from laconic.tasks.token_classification import TokenClassification
from laconic.tasks.written_text import describe_target
from laconic.tensor import TensorSpec

SAMPLES = 120
PIXELS = (TensorSpec(name="pixels", dtype="float32", shape=("batch", 3, 8, 8)),)
SOUND = (TensorSpec(name="samples", dtype="float32", shape=("batch", "samples"), bounds={"samples": (400, 16000)}),)
ARRAY = (TensorSpec(name="x", dtype="float32", shape=("batch", 3)),)
TEXT = {"tokenizer": tiny_tokenizer(), "inputs": text_inputs(), "max_tokens": 16, "pad_id": 0}
IMAGE = {"inputs": PIXELS, "preprocess": ImagePreprocess(resize=(8, 8))}
FRAMES = ImageFrames(frame=ImagePreprocess(resize=(8, 8)), patches=4)


def vectors(rng):
    """Vectors whose common mean is twenty times as long as what tells them apart."""
    return {"embedding": (20 * rng.normal(size=(1, 32)) + rng.normal(size=(SAMPLES, 32))).astype(np.float32)}


def logits(rng, classes=4, rare=0.06, offset=1000.0):
    """Logits with an offset that differs between samples; nearly all samples are of the first class."""
    chosen = np.where(rng.random(SAMPLES) < rare, rng.integers(1, classes, SAMPLES), 0)
    sure = 6 * np.eye(classes)[chosen] + rng.normal(size=(SAMPLES, classes))
    return {"logits": (sure + offset + rng.normal(size=(SAMPLES, 1))).astype(np.float32)}


def rare_labels(rng):
    """Logits of labels that one text in twenty has."""
    return {"logits": np.where(rng.random((SAMPLES, 2)) < 0.05, 4.0, -4.0).astype(np.float32) + rng.normal(0, 0.3, 2)}


def positions(rng, classes, chosen):
    """Logits at each position, zeros at padding. chosen: classes, [samples, positions]."""
    lengths = rng.integers(4, chosen.shape[1] + 1, SAMPLES)
    filled = np.arange(chosen.shape[1]) < lengths[:, None]
    sure = 7 * np.eye(classes)[chosen] + rng.normal(0, 0.5, (*chosen.shape, classes))
    return np.where(filled[..., None], sure, 0).astype(np.float32)


def tags(rng):
    """Entities at one token in twenty."""
    return {"logits": positions(rng, 3, np.where(rng.random((SAMPLES, 12)) < 0.05, 1, 0))}


def frames(rng):
    """Blanks at nine of ten frames."""
    return {
        "logits": positions(rng, 5, np.where(rng.random((SAMPLES, 30)) < 0.1, rng.integers(1, 5, (SAMPLES, 30)), 0))
    }


def spans(rng):
    """Starts and ends of answers; four of five questions have none."""
    scores = rng.normal(0, 0.5, (SAMPLES, 12, 2))
    starts = np.where(rng.random(SAMPLES) < 0.2, rng.integers(1, 9, SAMPLES), 0)
    ends = np.where(starts > 0, starts + rng.integers(0, 3, SAMPLES), 0)
    for end, places in enumerate((starts, ends)):
        scores[np.arange(SAMPLES), places, end] += 8
    return {"logits": scores.astype(np.float32)}


def scores(rng):
    """Scores near a thousand."""
    return {"logits": rng.normal(1000, 5, (SAMPLES, 1)).astype(np.float32)}


def relevances(rng):
    """Logits of documents of which few are relevant."""
    return {
        "logits": np.where(rng.random((SAMPLES, 1)) < 0.1, 3, -6).astype(np.float32) + rng.normal(0, 0.5, (SAMPLES, 1))
    }


def tokens(rng):
    """Distributions of tokens, three of four of them the same one."""
    chosen = np.where(rng.random((SAMPLES, 8)) < 0.75, 3, rng.integers(4, 12, (SAMPLES, 8)))
    sure = positions(rng, 12, chosen)
    shares = np.exp(sure) / np.exp(sure).sum(axis=-1, keepdims=True) * (sure != 0).any(axis=-1, keepdims=True)
    return {PROBABILITIES: shares.astype(np.float32), TOKENS: shares.argmax(axis=-1)}


def seen_tokens(rng):
    """As `tokens`, with the features of images that share most of them; and the same for the images of others."""
    features = 5 + rng.normal(size=(SAMPLES, 4, 8)).astype(np.float32)
    own, other = tokens(rng), tokens(rng)
    mixed = {PROBABILITIES: 0.7 * own[PROBABILITIES] + 0.3 * np.roll(other[PROBABILITIES], 1, axis=0)}
    null = mixed | {TOKENS: other[TOKENS], IMAGE_FEATURES: np.roll(features, 1, axis=0)}
    return own | {IMAGE_FEATURES: features} | {f"{NULL}{name}": array for name, array in null.items()}


def objects(rng):
    """One or no object in an image, of ten queries."""
    chosen = np.full((SAMPLES, 10), 2)
    there = rng.random(SAMPLES) < 0.3
    chosen[there, rng.integers(0, 10, there.sum())] = rng.integers(0, 2, there.sum())
    boxes = np.concatenate([rng.uniform(0.3, 0.7, (SAMPLES, 10, 2)), rng.uniform(0.1, 0.5, (SAMPLES, 10, 2))], axis=-1)
    sure = 8 * np.eye(3)[chosen] + rng.normal(0, 0.3, (SAMPLES, 10, 3))
    return {"logits": sure.astype(np.float32), "pred_boxes": boxes.astype(np.float32)}


def maps(rng):
    """A small square of another class on a background, in half of the images."""
    chosen = np.zeros((SAMPLES, 16, 16), int)
    for row in np.flatnonzero(rng.random(SAMPLES) < 0.5):
        top, left = rng.integers(0, 12, 2)
        chosen[row, top : top + 4, left : left + 4] = rng.integers(1, 3)
    return {"logits": (6 * np.eye(3)[chosen].transpose(0, 3, 1, 2) + rng.normal(0, 0.3, (SAMPLES, 3, 16, 16)))}


def table(rng):
    """Three numbers of different units."""
    return {"y": (rng.normal(size=(SAMPLES, 3)) * (1e5, 1, 1e-3) + (1e5, 300, 0)).astype(np.float32)}


def numbers(rng):
    """One number, mostly small, seldom very large."""
    return {"y": np.exp(rng.normal(0, 2, (SAMPLES, 1))).astype(np.float32)}


def classes(rng):
    """The numbers of classes, nearly all of them the same."""
    return {"class": np.where(rng.random(SAMPLES) < 0.06, 2, 0)}


ORIGINALS = {
    "text-embedding": [(TextEmbedding(**TEXT), vectors)],
    "image-embedding": [(ImageEmbedding(**IMAGE), vectors)],
    "text-classification": [(TextClassification(**TEXT, labels=tuple("abcd")), logits)],
    "image-classification": [(ImageClassification(**IMAGE, labels=tuple("abcd")), logits)],
    "audio-classification": [(AudioClassification(SOUND, preprocess=AudioPreprocess(), labels=tuple("abcd")), logits)],
    "multi-label-classification": [(MultiLabelClassification(**TEXT, labels=("a", "b")), rare_labels)],
    "fill-mask": [(FillMask(**TEXT, mask_id=3), logits)],
    "question-answering": [(QuestionAnswering(**TEXT), spans)],
    "token-classification": [(TokenClassification(**TEXT, labels=("O", "B-PER", "I-PER")), tags)],
    "text-regression": [(TextRegression(**TEXT, labels=("year",)), scores)],
    "text-ranking": [(TextRanking(**TEXT, activation="sigmoid"), relevances)],
    "text2text-generation": [
        (
            Text2TextGeneration(
                **TEXT | {"inputs": (*text_inputs(), *describe_target(16, (2, 1, 4)))},
                generation=GenerationSettings(decoder_start_token_id=0, eos_token_id=(1,)),
            ),
            tokens,
        )
    ],
    "speech-to-text": [
        (
            SpeechToText(
                tiny_tokenizer(),
                (
                    TensorSpec(name=FEATURES, dtype="float32", shape=("batch", 80, 3000)),
                    *describe_target(16, (2, 1, 4)),
                ),
                preprocess=LogMelPreprocess(),
                generation=GenerationSettings(decoder_start_token_id=0, eos_token_id=(1,)),
            ),
            tokens,
        )
    ],
    "text-generation": [
        (
            TextGeneration(
                **TEXT | {"inputs": describe_inputs(16, (2, 1, 4))},
                start_id=1,
                generation=GenerationSettings(decoder_start_token_id=1, eos_token_id=(1,)),
            ),
            tokens,
        )
    ],
    "image-text-to-text": [
        (
            ImageTextToText(
                **TEXT | {"inputs": (*describe_inputs(16, (2, 1, 4)), *FRAMES.describe_inputs())},
                start_id=1,
                generation=GenerationSettings(decoder_start_token_id=1, eos_token_id=(1,)),
                frames=FRAMES,
                image_id=2,
            ),
            seen_tokens,
        )
    ],
    "object-detection": [(ObjectDetection(**IMAGE, labels=("cat", "dog")), objects)],
    "semantic-segmentation": [(SemanticSegmentation(**IMAGE, labels=("wall", "cat", "dog")), maps)],
    "automatic-speech-recognition": [
        (
            SpeechRecognition(
                SOUND,
                preprocess=AudioPreprocess(),
                characters=CtcVocabulary(tokens=("_", "|", "a", "b", "c"), blank=0, delimiter="|"),
            ),
            frames,
        )
    ],
    "tensors": [(Tensors(ARRAY), make) for make in (vectors, logits, scores, table, numbers, classes)],
}
"""For each task tasks with the outputs that an original of theirs may give."""
