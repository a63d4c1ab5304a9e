"""The labelled test sets: none of their samples is trained with, and no null answer does well on them."""

from collections import Counter

import numpy as np
import pytest

CHANCE = 0.15
"""The share of right answers that a null answer may have, of ten or twelve classes."""


@pytest.fixture(scope="module")
def module(import_benchmark):
    return import_benchmark("labelled_test_sets")


@pytest.fixture(scope="module")
def rows(module):
    missing = [name for name in module.PACKAGES if not (module.INSTALLED / name).is_dir()]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return module.split_docstrings()


def check_null_answers(labels):
    """A constant, the most frequent class, and the labels of other samples are right by chance alone."""
    labels = np.array(labels)
    most = Counter(labels.tolist()).most_common(1)[0][1]
    shuffled = np.random.default_rng(0).permutation(labels)
    assert max(most / len(labels), float((labels == shuffled).mean())) < CHANCE


@pytest.mark.sweep
def test_docstrings_judge_by_texts_that_nothing_was_trained_with_and_null_answers_fail(module, rows):
    train, judge = rows
    counts = Counter(row["label"] for row in judge)
    assert counts == dict.fromkeys(module.PACKAGES, module.JUDGED)
    assert sum(counts.values()) >= 1000
    texts = [row["text"].lower() for row in train + judge]
    assert len(set(texts)) == len(texts)
    check_null_answers([row["label"] for row in judge])


def test_digits_judge_in_another_order_than_that_of_development_and_null_answers_fail(module):
    (before, _), (images, labels) = module.read_digits(), module.read_digits(module.DIGITS_SALT)
    judged = slice(module.SEEN + module.GIVEN, None)
    assert len(labels[judged]) == 497
    assert (before[judged] == images[judged]).all(axis=(1, 2, 3)).mean() < 0.05
    check_null_answers(labels[judged])


@pytest.mark.sweep
def test_no_package_of_the_test_set_is_one_that_the_recipe_was_chosen_by(module, import_benchmark):
    classifier = import_benchmark("classifier")
    sizes = {label: len(texts) for label, texts in classifier.labelled_texts().items()}
    assert not set(module.PACKAGES) & set(sorted(sizes, key=lambda label: (-sizes[label], label))[: classifier.LABELS])
