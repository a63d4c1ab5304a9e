"""The pages say what the code does: every verb, key, setting and library is on its page."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
import typer
import yaml

from laconic import registry
from laconic.artifacts.manifest import Manifest
from laconic.commands.command_line import app
from laconic.config import NamedSettings
from laconic.errors import MissingPackage
from laconic.recipes.goal import Goal
from laconic.recipes.recipe import Data, Recipe
from train.data.loader_settings import LoaderSettings
from train.parallel.mesh import Mesh
from train.planner.memory_prediction import HEADROOM
from train.settings import Training, TrainingData, TrainingRecipe
from train.step.compatibility import EXCLUSIVE_SLOTS, NEEDS

HOME = Path(__file__).parents[1]
DOCS = HOME / "docs"
COMMANDS = {name: each.load() for name, each in typer.main.get_command(app).commands.items()}


def page(name):
    return (DOCS / name).read_text(encoding="utf-8")


def blocks(name, language):
    return re.findall(rf"```{language}\n(.*?)```", page(name), re.DOTALL)


def test_no_file_holds_the_markers_of_a_merge():
    listing = subprocess.run(["git", "ls-files", "-z"], cwd=HOME, capture_output=True, text=True, check=False)
    if listing.returncode:
        pytest.skip("this is no clone of the repository")
    marker = re.compile(rb"^(<{7} |>{7} |\|{7} |={7}$)", re.MULTILINE)
    files = [HOME / name for name in listing.stdout.split("\0") if name]
    texts = {file: file.read_bytes() for file in files if file.is_file()}
    assert [str(file) for file, text in texts.items() if b"\0" not in text and marker.search(text)] == []


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


def test_every_key_of_a_manifest_and_every_training_setting_of_a_stage_is_explained():
    found = {
        key
        for line in page("artifact.md").splitlines()
        if line.startswith("| `")
        for key in re.findall("`(.*?)`", line)
    }
    assert set(Manifest.model_fields) - found == set()
    (section,) = [text for text in page("recipe.md").split("\n### ") if text.startswith("Training settings")]
    assert [key for key in Training.model_fields if f"| `{key}` |" not in section] == []


@pytest.mark.parametrize("name", registry.STAGES)
def test_every_stage_is_explained_with_its_settings(name):
    try:
        stage = registry.resolve("stage", name)
    except MissingPackage as error:
        pytest.skip(str(error))
    (row,) = [line for line in page("recipe.md").splitlines() if line.startswith(f"| `{name}`")]
    shared = set()
    if issubclass(stage, Training):
        assert "[training settings](#training-settings)" in row
        shared = set(Training.model_fields)
    assert [key for key in stage.model_fields if key not in shared and f"`{key}`" not in row] == []


@pytest.mark.parametrize("kind", ["task", "runtime", "format"])
def test_every_name_that_a_recipe_may_hold_is_on_its_page(kind):
    names = set(registry.TABLES[kind]) - {"folder", "fake"}
    text = page("recipe.md") + page("tasks.md")
    assert [name for name in names if f"`{name}`" not in text] == []


def test_the_recipes_on_the_pages_and_among_the_examples_are_good_ones():
    found = blocks("recipe.md", "yaml")
    assert len(found) > 1
    for text in found:
        Recipe.parse(yaml.safe_load(text))
    found = [yaml.safe_load(text) for text in blocks("training.md", "yaml")]
    whole = [content for content in found if "source" in content]
    assert whole
    for content in found:
        TrainingRecipe.model_validate({"source": "m", "data": "d.jsonl"} | content).components()
    Recipe.load(HOME / "examples" / "fast.yaml", source="model")
    TrainingRecipe.load(HOME / "examples" / "finetune.yaml", source="model", data={"train": "d.jsonl"})


def test_the_example_stage_is_one(tmp_path, monkeypatch):
    (tmp_path / "inner.py").write_text(blocks("extend.md", "python")[0])
    monkeypatch.syspath_prepend(tmp_path)
    text = blocks("extend.md", "yaml")[0].replace("mypackage.inner", "inner")
    with registry.trust_addresses(True):
        (stage,) = Recipe.parse({"source": "m", **yaml.safe_load(text)}, trust=True).make_stages()
    assert stage.ends == 2


def test_the_example_technique_is_one(tmp_path, monkeypatch):
    (tmp_path / "sparse.py").write_text(next(text for text in blocks("extend.md", "python") if "Technique" in text))
    monkeypatch.syspath_prepend(tmp_path)
    text = next(text for text in blocks("extend.md", "yaml") if "techniques" in text).replace(
        "mypackage.sparse", "sparse"
    )
    (named,) = yaml.safe_load(text)["techniques"]
    with registry.trust_addresses(True):
        assert NamedSettings.model_validate(named).configure("technique").threshold == 1e-7


def test_every_table_of_the_registry_is_on_the_page_and_the_headroom_of_a_plan_is_as_its_page_says():
    names = [name for name, table in vars(registry).items() if any(table is each for each in registry.TABLES.values())]
    assert len(names) == len(registry.TABLES)
    for name in (*names, "TARGETS"):
        assert f"`{name}`" in page("extend.md")
    assert f"leaves {100 * HEADROOM:.0f} % of the memory free" in page("training.md")


def row_of(name, heading, *, start="`"):
    """The cells of a table's row on the page about training."""
    sections = re.split(r"^## ", page("training.md"), flags=re.MULTILINE)
    (section,) = [text for text in sections if text.startswith(heading)]
    (line,) = [line for line in section.splitlines() if line.startswith(f"| {start}{name}`")]
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize("name", registry.TECHNIQUES)
def test_every_technique_is_explained_with_what_it_says_of_itself(name):
    technique = registry.resolve("technique", name)
    _, slot, exact, *rest = row_of(name, "Techniques")
    text = " ".join(rest)
    assert slot == technique.slot
    assert exact.startswith("yes" if technique.exact else "no")
    assert [key for key in technique.model_fields if f"`{key}`" not in text and "those of `lora`" not in text] == []
    assert [
        other for other in (*technique.excludes, *technique.requires) if f"`{other}`" not in rest[-1] + rest[-2]
    ] == []
    for other in registry.TECHNIQUES:  # the table says it of both
        if name in registry.resolve("technique", other).excludes:
            assert f"`{other}`" in rest[-1], other


def test_what_techniques_ask_of_an_optimizer_is_explained():
    for name in registry.TECHNIQUES:
        for need in registry.resolve("technique", name).requires_of_optimizer:
            attribute, _ = NEEDS[need]
            assert attribute == "per_parameter" or f"`{attribute}: true`" in " ".join(row_of(name, "Techniques"))
    assert all(registry.resolve("optimizer", name).per_parameter for name in registry.OPTIMIZERS)
    for slot in EXCLUSIVE_SLOTS:
        assert f"`{slot}`" in page("training.md")


@pytest.mark.parametrize("name", registry.OPTIMIZERS)
def test_every_optimizer_is_explained_with_the_bytes_of_its_state(name):
    settings = registry.resolve("optimizer", name)()
    _, state, exact, shards, text = row_of(name, "Optimizers")
    assert exact == ("yes" if settings.exact else "no")
    assert shards == ("yes" if settings.dtensor else "no")
    common = {"lr", "weight_decay", "betas", "eps", "stochastic_rounding"}
    assert [
        key for key in settings.__class__.model_fields if key not in common and f"`{key}`" not in state + text
    ] == []
    weight = torch.nn.Parameter(torch.zeros(1024, 1024))
    optimizer = settings.build([{"params": [weight], "weight_decay": 0.0}])
    weight.grad = torch.ones_like(weight)
    optimizer.step()
    kept = [value.nbytes for each in optimizer.state.values() for value in each.values() if torch.is_tensor(value)]
    assert float(re.match(r"[0-9.]+", state)[0]) == pytest.approx(sum(kept) / weight.numel(), rel=0.05)


@pytest.mark.parametrize("name", registry.SCHEDULES)
def test_every_schedule_is_explained_with_its_settings(name):
    text = " ".join(row_of(name, "Learning-rate schedules"))
    assert [key for key in registry.resolve("schedule", name).model_fields if f"`{key}`" not in text] == []


@pytest.mark.parametrize("name", registry.TASKS)
def test_what_every_task_learns_from_is_explained(name):
    assert len(row_of(name, "Training data")) == 3


@pytest.mark.parametrize("model", [TrainingRecipe, TrainingData, LoaderSettings, Mesh])
def test_every_key_of_a_recipe_of_training_is_explained(model):
    first = [line.split("|")[1] for line in page("training.md").splitlines() if line.startswith("| `")]
    assert [key for key in model.model_fields if not any(f"`{key}`" in cell for cell in first)] == []


def test_every_library_is_decided_upon():
    project = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].values()
    lines = [*project["dependencies"], *(line for extra in extras for line in extra)]
    names = {re.match(r"[A-Za-z0-9_-]+", line)[0] for line in lines} - {"onnxruntime-gpu", "laconic"}
    text = page("decisions.md")
    assert [name for name in names if not re.search(rf"(^\| {name} \|)|\b{name}\s\(", text, re.MULTILINE)] == []


def test_prose_is_wrapped_at_120_characters():
    for path in [*DOCS.glob("*.md"), *HOME.glob("*.md")]:
        prose = re.sub(r"^(\s*)```.*?^\1```$", "", path.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        kept = r"\||<|    |- \*\*.*  $"  # tables, tags, code by its indentation, a heading that ends its line
        long = [line for line in prose.splitlines() if len(line) > 120 and not re.match(kept, line)]
        assert long == [], path.name


def test_every_page_is_in_the_navigation_and_needs_nothing_from_another_server():
    sections = [next(iter(entry.values())) for entry in yaml.safe_load((HOME / "mkdocs.yml").read_text())["nav"]]
    listed = [page for section in sections for page in (section if isinstance(section, list) else [{"": section}])]
    assert sorted(next(iter(page.values())) for page in listed) == sorted(path.name for path in DOCS.glob("*.md"))
    for path in [*DOCS.rglob("*.md"), HOME / "mkdocs.yml"]:
        assert not re.search(r"(src|href)=.https?://|!\[[^]]*\]\(http", path.read_text(encoding="utf-8")), path


STANDARD_TERMS = (
    "activation checkpointing",
    "activation offloading",
    "bootstrap",
    "calibration",
    "confidence interval",
    "constant folding",
    "data parallel",
    "dynamic batching",
    "fully sharded data parallel",
    "gradient accumulation",
    "gradient checkpointing",
    "gradient clipping",
    "knowledge distillation",
    "learning-rate schedule",
    "low-rank factorization",
    "mixed precision",
    "Pareto front",
    "post-training quantization",
    "quantization-aware training",
    "sensitivity",
    "SmoothQuant",
    "structured pruning",
    "test set",
    "validation set",
    "weight-only quantization",
)
"""What a newcomer searches for; each is found in the glossary and on the page that covers it."""


@pytest.mark.parametrize("term", STANDARD_TERMS)
def test_a_standard_term_is_in_the_glossary_and_on_another_page(term):
    pages = [path.name for path in DOCS.glob("*.md") if term.lower() in " ".join(path.read_text().lower().split())]
    assert "glossary.md" in pages
    assert len(pages) > 1


@pytest.mark.parametrize(
    "term", ["gradient checkpointing", "gradient accumulation", "knowledge distillation", "SmoothQuant"]
)
def test_a_standard_term_leads_to_the_code(term):
    sources = [path for package in registry.PACKAGES for path in (HOME / package).rglob("*.py")]
    assert any(term.lower() in " ".join(path.read_text(encoding="utf-8").lower().split()) for path in sources)


def test_the_plot_of_the_readme_is_drawn_from_its_table(tmp_path, import_benchmark):
    plot = import_benchmark("plot")
    points = plot.read_points(HOME / "README.md")
    assert len(points) >= 7
    plot.draw(points, tmp_path / "front.svg")
    assert read_marks(tmp_path / "front.svg") == read_marks(DOCS / "images" / "front.svg")


def test_bars_are_drawn_from_the_tables_of_their_pages(tmp_path, import_benchmark):
    import_benchmark("bars").draw_all(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["servers.svg", "training.svg"]
    for path in tmp_path.iterdir():
        assert len(read_marks(path)[0]) > 10
        assert read_marks(path) == read_marks(DOCS / "images" / path.name)


def read_marks(path):
    """The words of a plot, and the places of its points, rounded."""
    text = path.read_text(encoding="utf-8")
    words = re.findall(r"<text[^>]*>([^<]*)</text>", text)
    places = re.findall(r'<use xlink:href="#m[^"]*" x="([\d.]+)" y="([\d.]+)"', text)
    return words, [(round(float(x)), round(float(y))) for x, y in places]


def test_pages_show_what_the_result_files_say(import_benchmark):
    results = import_benchmark("results")
    shown = {}
    for page, text, rendered in results.render_pages():
        assert text == rendered, f"{page.name}: run python benchmarks/results.py"
        shown |= {match["name"]: page for match in results.BLOCK.finditer(text)}
    assert sorted(shown) == sorted(["looks", *(path.stem for path in results.FOLDER.glob("*.json"))])


@pytest.mark.parametrize("path", sorted(DOCS.glob("performance-*.md")), ids=lambda path: path.stem)
def test_a_table_of_figures_comes_from_a_result_file_or_names_the_commit_it_was_copied_at(path):
    typed = re.sub(r"<!-- result: .*?<!-- end of result -->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    tables = re.findall(r"((?:^\|.*\n)+)\n(.*)", typed, re.MULTILINE)
    figures = [(table, below) for table, below in tables if len(re.findall(r"\d\.\d", table)) >= 3]
    summaries = [table for table, below in figures if not re.match(r"Copied by hand at commits? [0-9a-f]{8}", below)]
    assert len(summaries) <= 1, f"keep it by --publish, or name its commit:\n{summaries[1]}"  # the first of a page


def test_a_table_is_kept_with_its_conditions_and_written_over_an_older_one(tmp_path, monkeypatch, import_benchmark):
    results = import_benchmark("results")
    monkeypatch.setattr(results, "FOLDER", tmp_path)
    monkeypatch.setattr(results, "list_changes", list)
    words = ["/home/me/benchmarks/speed.py", "/data/a model.laconic", "--runs", "5", "--publish=speed"]
    monkeypatch.setattr(sys, "argv", words)
    measured = results.Results(publish="speed")
    measured.table("first", ["way", "ms"], [["ours", "11 ms"]])
    measured.table("second", ["way", "ms"], [["ours", "22 ms"]])
    page = "Before\n\n<!-- result: speed first -->\n\nBetween\n\n<!-- result: speed second -->\n\nAfter\n"
    once = results.render_page(page)
    order = ["Before", "| ours | 11 ms |", "Between", "| ours | 22 ms |", "After"]
    assert sorted(order, key=once.index) == order
    assert "`python benchmarks/speed.py 'a model.laconic' --runs 5` at commit" in once
    assert once.count("at commit") == once.count("Measured in the same run.") == 1
    assert results.render_page(once.replace("22 ms", "99 ms").replace("11 ms", "88")) == once


def test_benchmarks_print_their_tables_through_result_files():
    by_hand = re.compile(r"(?:print\(\s*f?|\\n)[\"']?\|| ?--- ?\|")
    texts = {path.stem: path.read_text(encoding="utf-8") for path in (HOME / "benchmarks").glob("*.py")}
    printing = {name for name, text in texts.items() if by_hand.search(text)}
    assert printing == {"results"}


def test_code_that_benchmarks_name_is_there():
    modules = {path.stem: path.read_text(encoding="utf-8") for path in (HOME / "benchmarks").glob("*.py")}
    named = {name for text in modules.values() for name in re.findall(r'"(\w+:build\w*)"', text)}
    assert named
    for module, function in (name.split(":") for name in named):
        assert f"def {function}(" in modules.get(module, ""), f"{module}:{function}"


def test_figures_of_uncommitted_code_are_not_published(monkeypatch, import_benchmark):
    results = import_benchmark("results")
    monkeypatch.setattr(results, "list_changes", lambda: ["serve/server.py"])
    with pytest.raises(SystemExit, match=r"commit serve/server\.py first"):
        results.Results(publish="speed")
