"""What is shipped: a wheel that holds what it should, and works where nothing else of ours is."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
import zipfile
from pathlib import Path

import pytest
from artifacts import write_artifact

from laconic import __version__
from laconic.registry import EXTRAS, PACKAGES

HOME = Path(__file__).parents[1]
PROJECT = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))
HOSTILE = "import sys; print('the wrong file ran'); sys.exit(7)"


def run(*command, cwd, **environment):
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, capture_output=True, text=True, env=os.environ | environment
    )


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from a copy, so that nothing is left in the checkout."""
    source = tmp_path_factory.mktemp("source")
    for package in PACKAGES:
        shutil.copytree(HOME / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(HOME / "tests", source / "tests", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(HOME / name, source)
    done = run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", source / "dist", cwd=source)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def python(wheel, tmp_path_factory):
    """An interpreter with the wheel installed. What it depends on comes from here; the checkout does not."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False)
    bin_folder = folder / "bin"
    arguments = ("--python", bin_folder / "python", "install", "--quiet", "--no-deps", "--no-index", wheel)
    done = run(sys.executable, "-m", "pip", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    site = next(folder.rglob("site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return bin_folder / "python"


def test_the_wheel_holds_the_declared_packages_with_every_file_of_theirs_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        files = [name for name in archive.namelist() if ".dist-info/" not in name]
        metadata = [name for name in archive.namelist() if ".dist-info/" in name]
    code = [name for name in files if name.endswith(".py")]
    assert {str(Path(name).parent).replace("/", ".") for name in code} == set(PROJECT["tool"]["setuptools"]["packages"])
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = run("git", "ls-files", *PACKAGES, cwd=HOME)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    assert {name for name in tracked.stdout.split() if (HOME / name).exists()} <= held


def test_the_installed_command_works_beside_a_file_that_bears_the_name_of_a_room(python, tmp_path):
    (tmp_path / "export.py").write_text(HOSTILE)
    for arguments in (("--help",), ("--version",), ("schema",)):
        done = run(python.parent / "laconic", *arguments, cwd=tmp_path, PYTHONPATH="")
        assert done.returncode == 0, done.stderr
        assert "the wrong file ran" not in done.stdout
        assert arguments != ("--version",) or __version__ in done.stdout


def test_run_as_a_module_the_guard_speaks_in_a_sentence(python, tmp_path):
    """There the working folder comes first on the path."""
    (tmp_path / "export.py").write_text(HOSTILE)
    done = run(python, "-c", "from laconic.cli import main; main()", "--help", cwd=tmp_path, PYTHONPATH="")
    assert done.returncode == 2
    assert str(tmp_path / "export.py") in done.stderr
    assert "Traceback" not in done.stderr
    assert "the wrong file ran" not in done.stdout


def test_the_rooms_are_those_of_the_wheel(python, tmp_path):
    code = "import laconic, train, compress, export, serve; print(laconic.__file__, compress.__file__, serve.__file__)"
    done = run(python, "-P", "-c", code, cwd=tmp_path, PYTHONPATH="")
    assert str(HOME) not in done.stdout, "the checkout is not on the path of this environment"
    assert "tests" not in done.stdout


BLOCK = """
import sys
for name in {names}:
    sys.modules[name] = None
from laconic.cli import main
for arguments in {commands}:
    sys.argv = ["laconic", *arguments]
    try:
        main()
    except SystemExit as stopped:
        print("exit code:", stopped.code)
print("loaded:", *{{"torch", "onnx", "transformers", "pyarrow"}} & {{*sys.modules}})
"""


def run_without(names, commands, cwd):
    """Run commands one after the other in one process without some packages: their exit codes, what the process has
    loaded, and the process."""
    done = run(sys.executable, "-c", BLOCK.format(names=list(names), commands=list(commands)), cwd=cwd)
    lines = done.stdout.splitlines()
    codes = [int(line.removeprefix("exit code: ")) for line in lines if line.startswith("exit code: ")]
    return codes, lines[-1].removeprefix("loaded:").split(), done


def test_the_base_install_is_enough_to_look_around(tmp_path):
    write_artifact(tmp_path / "twice")
    commands = (["--help"], ["compress", "--help"], ["schema"], ["doctor"], ["inspect", "twice"])
    codes, _, done = run_without({*EXTRAS, "click"}, commands, tmp_path)
    assert codes == [0] * len(commands), done.stderr
    for shown in ("Commands", "--recipe", "$defs", "python", "twice"):
        assert shown in done.stdout


def test_the_server_imports_without_torch_and_onnx_and_without_its_extra_says_how_to_get_it(tmp_path):
    write_artifact(tmp_path / "twice")
    codes, _, done = run_without(EXTRAS, (["serve", "twice"],), tmp_path)
    assert codes == [2]
    assert "pip install 'laconic[serve]'" in done.stderr
    assert "Traceback" not in done.stderr
    code = "import sys\nfor name in ('torch', 'onnx', 'transformers'): sys.modules[name] = None\nimport serve.server"
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_neither_torch_nor_onnx_is_imported_to_look_around(tmp_path):
    write_artifact(tmp_path / "twice")
    commands = (["--help"], ["inspect", "twice"], ["serve", "--help"], ["schema"])
    codes, loaded, done = run_without((), commands, tmp_path)
    assert codes == [0] * len(commands), done.stderr
    assert loaded == []


@pytest.mark.parametrize(
    "arguments", [["--nope"], ["compress", "--nope"], ["inspect"], ["nope"], ["serve", "a", "--port", "x"]]
)
def test_bad_use_is_answered_without_a_traceback(arguments, laconic):
    code, _, err = laconic(*arguments)
    assert code == 2
    assert err
    assert "Traceback" not in err


def test_the_licence_is_the_one_that_is_declared():
    assert PROJECT["project"]["license"] == "Apache-2.0"
    text = (HOME / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
