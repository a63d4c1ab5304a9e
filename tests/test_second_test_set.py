"""The second test set: the frozen texts are here, and none is one that something is healed on or chosen by."""

import json
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"


@pytest.fixture(scope="module")
def module(import_benchmark):
    return import_benchmark("second_test_set")


@pytest.fixture(scope="module")
def texts(module):
    """The frozen texts; those of the reference of Python only where it is the Python that they were frozen with."""
    frozen = json.loads(module.FROZEN.read_text(encoding="utf-8"))
    try:
        changed = {name for name, version in module.read_versions().items() if version != frozen["versions"][name]}
    except PackageNotFoundError as error:
        pytest.skip(f"a package is not installed: {error}")
    if changed - {"python"}:
        pytest.skip(f"of other versions than those that the texts were frozen with: {', '.join(changed)}")
    texts = module.read_texts()
    if changed:
        del texts["language reference"]
    digests = module.digest_kinds(texts)
    assert digests == {kind: frozen["sha256"][kind] for kind in texts}
    return texts


def test_all_texts_are_found_and_each_kind_is_another_than_what_is_healed_on(module, texts, import_benchmark):
    corpora = [import_benchmark(name).KINDS for name in ("wide_corpus", "test_set")]
    assert not {*texts} & {kind for kinds in corpora for kind in kinds}
    assert {len(chosen) for chosen in texts.values()} == {module.EACH}
    assert len(module.KINDS) * module.EACH >= 1000


def test_the_packages_of_the_texts_are_pinned(module):
    pins = set(CONSTRAINTS.read_text(encoding="utf-8").splitlines())
    versions = json.loads(module.FROZEN.read_text(encoding="utf-8"))["versions"]
    assert {f"{name}=={version}" for name, version in versions.items() if name != "python"} <= pins


def test_no_text_is_near_another_or_one_of_the_development_set(module, texts):
    seen: set[tuple[str, ...]] = set()
    for text in (text for chosen in texts.values() for text in chosen):
        assert not module.is_copy(text, seen), text
        seen.update(module.runs_of(text))
    runs = [set(module.runs_of(text)) for text in module.kept_away()]
    together = set().union(*runs)
    suspects = [text for chosen in texts.values() for text in chosen if module.is_copy(text, together)]
    assert [text for text in suspects if any(module.is_copy(text, each) for each in runs)] == []


@pytest.mark.sweep
def test_no_text_is_near_one_of_a_corpus_that_is_healed_on(module, texts):
    assert module.find_copies([text for chosen in texts.values() for text in chosen]) == set()


def test_texts_of_other_versions_are_refused(module, monkeypatch, tmp_path):
    frozen = tmp_path / "frozen.json"
    frozen.write_text(json.dumps({"sha256": {"one": "0" * 64}, "digests": {"one": ["0" * 16]}}))
    monkeypatch.setattr(module, "FROZEN", frozen)
    monkeypatch.setattr(module, "KINDS", {"one": lambda: iter(["A text of at least as many words as it takes."])})
    with pytest.raises(SystemExit, match="other versions than it was frozen with"):
        module.open_texts()
