"""The environment of `make gpu`: a virtual environment around the CUDA build of PyTorch that is already there.

    python benchmarks/gpu_environment.py .venv-gpu [--offline]

Its packages are those of the Python that runs this script, with what the project needs beside them. PyTorch is never
installed or replaced: its version is a constraint. What cannot be installed, without a network for one, is named, and
the rest is done. Exit code 3 where there is no PyTorch that can use a GPU; --offline asks for none, and installs
nothing.
"""

import argparse
import importlib.metadata
import re
import subprocess
import sys
import sysconfig
import tomllib
import venv
from pathlib import Path

HOME = Path(__file__).parents[1]
GROUPS = ("core", "compress", "train", "gpu", "tensorrt", "tests")
"""Requirements that are installed together. One that fails leaves the others."""
TEST_PACKAGES = ("pytest", "hypothesis", "scikit-learn")
KEPT = ("torch", "torchvision", "torchaudio", "triton")
"""Packages that belong to the build of PyTorch."""


def main() -> None:
    """Make the environment, and install."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where the environment goes")
    parser.add_argument("--offline", action="store_true", help="install nothing, and ask for no GPU: for a dry run")
    arguments = parser.parse_args()
    if not arguments.offline and (reason := find_obstacle()):
        print(f"{reason}, so nothing was measured. Give a Python whose PyTorch is: make gpu GPU_PYTHON=...")
        sys.exit(3)
    python = make_environment(arguments.folder)
    if not arguments.offline:
        install(python, arguments.folder / "constraints.txt")


def find_obstacle() -> str:
    """Why PyTorch cannot use a GPU here; empty if it can."""
    try:
        import torch
    except ImportError as error:
        return f"PyTorch cannot be imported by {sys.executable} ({error})"
    if torch.version.cuda is None:
        return f"PyTorch {torch.__version__} is not a build for CUDA"
    return "" if torch.cuda.is_available() else "PyTorch finds no NVIDIA GPU that it can use"


def make_environment(folder: Path) -> Path:
    """Make the environment, or find it; returns its Python.

    The packages of this Python, which may itself be in a virtual environment, and the checkout come behind its own.
    """
    python = folder.resolve() / "bin" / "python"
    if not python.is_file():
        venv.create(folder, system_site_packages=True, with_pip=False)
    site = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    paths = dict.fromkeys([sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(HOME)])
    (site / "around.pth").write_text("\n".join(paths) + "\n", encoding="utf-8")
    return python


def install(python: Path, constraints: Path) -> None:
    """Install what is missing, group by group, with this Python's pip."""
    kept = [f"{name}=={version}" for name in KEPT if (version := find_version(name))]
    constraints.write_text("\n".join(kept) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "-c", str(constraints)]
    network = ["--retries", "1", "--timeout", "10"]
    for name, requirements in list_requirements().items():
        done = subprocess.run([*command, *network, *requirements], capture_output=True, text=True)
        if done.returncode:
            lines = [line for line in done.stderr.splitlines() if line.strip()]
            print(f"not all of {name!r} could be installed: {lines[-1] if lines else 'pip says nothing'}")
            if "connection" in done.stderr.lower():
                network = ["--no-index"]  # each further attempt would wait for its timeouts


def list_requirements() -> dict[str, list[str]]:
    """The project's requirements by group, without PyTorch and without the project itself."""
    project = tomllib.loads((HOME / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    found = {
        "core": project["dependencies"],
        **{name: extras[name] for name in GROUPS if name in extras},
        "tests": [each for each in extras["dev"] if name_of(each) in TEST_PACKAGES],
    }
    return {
        name: [each for each in requirements if name_of(each) not in (*KEPT, "laconic")]
        for name, requirements in found.items()
    }


def name_of(requirement: str) -> str:
    """The package that a requirement names."""
    return re.split(r"[\[<>=!~; ]", requirement, maxsplit=1)[0].lower()


def find_version(name: str) -> str:
    """The version of a package of this Python; empty if it is missing."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main()
