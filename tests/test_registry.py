import importlib.util
import inspect
import sys
from pathlib import Path

import pytest

from laconic import registry
from laconic.config import NamedSettings
from laconic.errors import LaconicError, MissingPackage, RecipeError, UntrustedCode, UsageError
from laconic.recipes.recipe import Recipe
from laconic.recipes.stage import PlanStage, Stage, TorchStage
from laconic.runtimes.decoder_file import gguf_of
from laconic.runtimes.runtime import Runtime, Session
from laconic.tasks.task import Task

GPU_ENGINES = {engine for target in ("cuda", "tensorrt") for engine in registry.TARGETS[target]}
ENTRIES = [(kind, name) for kind, table in registry.TABLES.items() for name in table]


def resolve(kind, name):
    try:
        return registry.resolve(kind, name)
    except MissingPackage as error:
        pytest.skip(str(error))


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_every_entry_leads_somewhere(kind, name):
    assert resolve(kind, name) is not None


@pytest.mark.parametrize("name", registry.TASKS)
def test_every_task_keeps_the_contract(name):
    task = resolve("task", name)
    assert issubclass(task, Task)
    assert not inspect.isabstract(task)
    assert task.name == name
    assert task.field
    assert task.metric
    assert task.objective in registry.OBJECTIVES
    assert 0 < task.tolerance.mean <= 1
    assert task.__doc__


@pytest.mark.parametrize("name", registry.RUNTIMES)
def test_every_runtime_keeps_the_contract(name, tmp_path):
    try:
        runtime = resolve("runtime", name)
        engine = runtime()
    except MissingPackage as error:
        pytest.skip(str(error))
    assert issubclass(runtime, Runtime)
    assert engine.name == name
    assert engine.version()
    only = {"llamacpp": "int8-dynamic"} | dict.fromkeys(GPU_ENGINES, "float16")
    assert engine.computes()[0] == only.get(name, "float32")
    damaged = tmp_path / "model.onnx"
    for path in (damaged, gguf_of(damaged)):
        path.write_bytes(b"\x00not a model")
    with pytest.raises(LaconicError, match=r"model\.(onnx|gguf)"):
        engine.open(damaged)


@pytest.mark.parametrize("name", registry.STAGES)
def test_every_stage_keeps_the_contract(name):
    stage = resolve("stage", name)
    assert issubclass(stage, Stage)
    assert issubclass(stage, TorchStage if stage.kind == "torch" else PlanStage)
    assert not inspect.isabstract(stage)
    assert stage() == stage.model_validate_json(stage().model_dump_json()), "the defaults survive JSON"
    assert stage.model_config["frozen"]
    assert stage.model_config["extra"] == "forbid"


def test_every_engine_of_a_target_is_registered_and_has_a_placement():
    engines = {engine for target in registry.TARGETS for engine in registry.list_engines(target)}
    assert engines <= set(registry.RUNTIMES)
    assert engines <= set(registry.PLACEMENTS)


def test_an_unknown_name_is_answered_with_the_nearest_and_an_earlier_one_with_the_new_one():
    with pytest.raises(UsageError, match=r"unknown task 'text-embeding'. Did you mean 'text-embedding'\?"):
        registry.resolve("task", "text-embeding")
    with pytest.raises(UsageError, match="Known: fake, llamacpp, onnxruntime, onnxruntime-cuda, openvino"):
        registry.resolve("runtime", "zzz")
    for kind, names in registry.RENAMED.items():
        for old, new in names.items():
            assert new in registry.TABLES[kind]
            assert old not in registry.TABLES[kind]
            with pytest.raises(UsageError) as caught:
                registry.resolve(kind, old)
            assert str(caught.value) == f"{kind} {old!r} is now called {new!r}"


def test_the_refusal_of_an_earlier_name_reaches_whoever_wrote_the_recipe(monkeypatch):
    monkeypatch.setattr(registry, "RENAMED", {"stage": {"quantize.post": "quantize.static"}})
    with pytest.raises(RecipeError, match=r"stage 'quantize\.post' is now called 'quantize\.static'"):
        Recipe.parse({"source": "m", "stages": ["quantize.post"]}).build()
    with pytest.raises(RecipeError, match=r"quantize\.static: key 'smooth' is now called 'smoothquant'"):
        Recipe.parse({"source": "m", "stages": [{"quantize.static": {"smooth": False}}]}).build()


@pytest.mark.parametrize(("kind", "name"), ENTRIES)
def test_an_earlier_key_of_a_registered_entry_is_refused_with_the_new_one(kind, name):
    model = resolve(kind, name)
    for old, new in getattr(model, "renamed", {}).items():
        assert new in model.model_fields
        assert old not in model.model_fields
        with pytest.raises(RecipeError) as caught:
            NamedSettings(name=name, config={old: None}).configure(kind)
        assert str(caught.value) == f"{name}: key {old!r} is now called {new!r}"


@pytest.mark.parametrize("kind", registry.ADDRESSABLE)
def test_an_address_needs_no_line_in_the_registry_but_trust(kind):
    with pytest.raises(UntrustedCode, match=rf"{kind} 'laconic.runtimes.runtime:Session' .* --trust"):
        registry.resolve(kind, "laconic.runtimes.runtime:Session")
    with registry.trust_addresses(True):
        assert registry.resolve(kind, "laconic.runtimes.runtime:Session") is Session
        with registry.trust_addresses(False), pytest.raises(UntrustedCode):
            registry.resolve(kind, "laconic.runtimes.runtime:Session")


@pytest.mark.parametrize("kind", sorted(registry.TABLES.keys() - set(registry.ADDRESSABLE)))
def test_what_artifacts_and_requests_name_is_found_in_the_registry_alone(kind):
    with registry.trust_addresses(True), pytest.raises(UsageError, match=f"unknown {kind} 'os:system'"):
        registry.resolve(kind, "os:system")


@pytest.mark.parametrize("kind", registry.TABLES)
def test_no_name_imports_what_is_not_registered(kind, tmp_path, monkeypatch):
    (tmp_path / "trap.py").write_text("def spring(): pass")
    monkeypatch.syspath_prepend(tmp_path)
    names = ("trap:spring", "trap", "trap.spring", "trap:spring\n", "trap:" * 10**4, "builtins:eval", "..:x", ":", "")
    for name in names:
        with pytest.raises(UsageError) as caught:
            registry.resolve(kind, name)
        assert "\n" not in str(caught.value)
    assert "trap" not in sys.modules


@pytest.mark.parametrize(
    ("address", "message"),
    [("no.such.place:Thing", "there is no module 'no.such.place'"), ("laconic.errors:Thing", "has no 'Thing'")],
)
def test_an_address_that_leads_nowhere_is_named(address, message):
    with registry.trust_addresses(True), pytest.raises(UsageError, match=message):
        registry.resolve("stage", address)


def test_a_missing_package_comes_with_the_command_that_brings_it(tmp_path, monkeypatch):
    (tmp_path / "needs_tensorrt.py").write_text("import tensorrt")
    monkeypatch.syspath_prepend(tmp_path)
    if importlib.util.find_spec("tensorrt"):
        pytest.skip("tensorrt is installed")
    with registry.trust_addresses(True), pytest.raises(MissingPackage, match=r"pip install 'laconic\[tensorrt\]'"):
        registry.resolve("stage", "needs_tensorrt:Thing")
    pyproject = (Path(registry.__file__).parents[1] / "pyproject.toml").read_text()
    for extra in set(registry.EXTRAS.values()):
        assert f"\n{extra} = [" in pyproject
