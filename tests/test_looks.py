"""Looks at test sets: recorded by the scripts that look, and not older than what their figures depend on."""

import subprocess
from pathlib import Path

import pytest

HOME = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def looks(import_benchmark):
    return import_benchmark("looks")


def run_git(*words, cwd=HOME):
    git = subprocess.run(["git", *words], cwd=cwd, capture_output=True, text=True, check=False)
    return git.stdout.strip() if git.returncode == 0 else None


def test_no_figure_of_a_test_set_is_older_than_what_it_depends_on(looks):
    if run_git("rev-parse", "--is-shallow-repository") != "false":
        pytest.skip("this is no clone with the whole history")
    assert looks.find_stale_looks(looks.read_looks()) == [], "look again, or enter the look as a development set"


def test_a_published_judgement_is_in_the_ledger(looks, import_benchmark):
    results = import_benchmark("results")
    for path in results.FOLDER.glob("judge*.json"):
        published = results.ResultFile.model_validate_json(path.read_text(encoding="utf-8"))
        assert (published.command, published.commit) in {(look.command, look.commit) for look in looks.read_looks()}


@pytest.fixture
def repository(tmp_path, looks, import_benchmark, monkeypatch):
    """A repository with a method and an empty ledger."""
    monkeypatch.setattr(import_benchmark("provenance"), "HOME", tmp_path)
    monkeypatch.setattr(looks, "LEDGER", tmp_path / "benchmarks" / "looks.json")
    looks.LEDGER.parent.mkdir()
    looks.write_looks([])
    run_git("init", "-q", cwd=tmp_path)
    commit(tmp_path, "method.py")
    return tmp_path


def commit(folder, name):
    (folder / name).write_text(f"{name} {run_git('rev-list', '--count', 'HEAD', cwd=folder)}")
    run_git("add", "-A", cwd=folder)
    run_git("-c", "user.name=a", "-c", "user.email=a@example.org", "commit", "-qm", f"change {name}", cwd=folder)


def test_a_look_is_stale_after_a_change_of_the_method_and_not_of_anything_else(looks, repository):
    with looks.take_look("texts", "abc", ["method.py"]) as figures:
        figures["ours"] = "0.99"
    commit(repository, "other.py")
    assert [look.figures for look in looks.read_looks()] == [{"ours": "0.99"}]
    assert looks.find_stale_looks(looks.read_looks()) == []
    commit(repository, "method.py")
    (sentence,) = looks.find_stale_looks(looks.read_looks())
    assert sentence.startswith("texts, seen on")
    assert sentence.endswith("change method.py")
    spent = looks.read_looks()[0].model_copy(update={"standing": "development set", "commit": "f" * 40})
    assert looks.find_stale_looks([spent]) == []
    assert "not in the history" in looks.find_stale_looks([spent.model_copy(update={"standing": "test set"})])[0]
    looks.write_looks([spent])
    with looks.take_look("texts", "abc", ["method.py"]):
        pass
    assert looks.read_looks()[-1].standing == "development set"


def test_a_look_that_is_interrupted_is_a_look_and_uncommitted_code_has_none(looks, repository):
    with pytest.raises(ZeroDivisionError), looks.take_look("texts", "abc", ["method.py"]) as figures:
        figures["ours"] = f"{1 / len(looks.read_looks()[0].figures)}"
    assert len(looks.read_looks()) == 1
    (repository / "method.py").write_text("changed")
    with pytest.raises(SystemExit, match=r"commit method\.py first"), looks.take_look("texts", "abc", ["method.py"]):
        raise AssertionError("nothing may be judged")
    assert len(looks.read_looks()) == 1
