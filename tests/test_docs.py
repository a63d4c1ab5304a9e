"""The pages say what the code does: every verb, key, setting and library is on its page."""

import re
import tomllib
from pathlib import Path

import pytest
import typer
import yaml

from laconic import registry
from laconic.artifact import Manifest
from laconic.cli import app
from laconic.errors import MissingPackage
from laconic.recipe import Data, Goal, Recipe

HOME = Path(__file__).parents[1]
DOCS = HOME / "docs"
COMMANDS = typer.main.get_command(app).commands


def page(name):
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(name, language):
    return re.findall(rf"```{language}\n(.*?)```", page(name), re.DOTALL)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_verb_has_help_and_a_section_with_its_options(name):
    command = COMMANDS[name]
    assert command.help
    sections = re.split(r"^## ", page("cli.md"), flags=re.MULTILINE)
    (section,) = [text for text in sections if re.match(rf"`?laconic {name}\b|`?{name}\b", text)]
    for option in (flag for parameter in command.params for flag in parameter.opts if flag.startswith("--")):
        assert option == "--help" or option in section, f"{option} of {name}"


@pytest.mark.parametrize("name", COMMANDS)
def test_every_verb_prints_json_where_it_prints_results(name):
    if name in ("serve", "schema"):  # the one prints no results, the other nothing but JSON
        return
    assert "--json" in [flag for parameter in COMMANDS[name].params for flag in parameter.opts]


@pytest.mark.parametrize("model", [Recipe, Data, Goal])
def test_every_key_of_a_recipe_is_explained(model):
    for key in model.model_fields:
        assert f"| `{key}` |" in page("recipe.md")


def test_every_key_of_a_manifest_is_explained():
    found = {
        key
        for line in page("artifact.md").splitlines()
        if line.startswith("| `")
        for key in re.findall("`(.*?)`", line)
    }
    assert set(Manifest.model_fields) - found == set()


@pytest.mark.parametrize("name", registry.STAGES)
def test_every_stage_is_explained_with_its_settings(name):
    try:
        stage = registry.resolve("stage", name)
    except MissingPackage as error:
        pytest.skip(str(error))
    (row,) = [line for line in page("recipe.md").splitlines() if line.startswith(f"| `{name}`")]
    assert [key for key in stage.model_fields if f"`{key}`" not in row] == []


@pytest.mark.parametrize("kind", ["task", "runtime", "format"])
def test_every_name_that_a_recipe_may_hold_is_on_its_page(kind):
    names = set(registry.TABLES[kind]) - {"folder", "fake", "torch"}
    assert [name for name in names if f"`{name}`" not in page("recipe.md")] == []


def test_the_recipes_on_the_page_are_good_ones():
    found = blocks("recipe.md", "yaml")
    assert len(found) > 1
    for text in found:
        Recipe.parse(yaml.safe_load(text))


def test_the_example_stage_is_one(tmp_path, monkeypatch):
    (tmp_path / "inner.py").write_text(blocks("extend.md", "python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    text = blocks("extend.md", "yaml")[0].replace("mypackage.inner", "inner")
    (stage,) = Recipe.parse({"source": "m", **yaml.safe_load(text)}).build()
    assert stage.ends == 2


def test_every_table_of_the_registry_is_on_the_page():
    for name in ("STAGES", "TASKS", "RUNTIMES", "PLACEMENTS", "FORMATS", "TARGETS"):
        assert hasattr(registry, name)
        assert f"`{name}`" in page("extend.md")


def test_every_library_is_decided_upon():
    project = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = {re.match(r"[A-Za-z0-9_-]+", line)[0] for line in lines} - {"onnxruntime-gpu"}
    text = page("decisions.md")
    assert [name for name in names if not re.search(rf"(^\| {name} \|)|\b{name} \(", text, re.MULTILINE)] == []


def test_every_page_is_in_the_navigation():
    pages = {next(iter(entry.values())) for entry in yaml.safe_load((HOME / "mkdocs.yml").read_text())["nav"]}
    assert pages == {path.name for path in DOCS.glob("*.md")}


def test_a_page_needs_nothing_from_another_server():
    for path in [*DOCS.rglob("*.md"), HOME / "mkdocs.yml"]:
        assert not re.search(r"(src|href)=.https?://|!\[[^]]*\]\(http", path.read_text(encoding="utf-8")), path


def test_an_example_recipe_is_a_good_one():
    for path in (HOME / "examples").glob("*.yaml"):
        Recipe.load(path, source="model")
