"""Where figures come from: the commit, the command and the versions that they are measured with."""

import importlib.metadata
import os
import shlex
import subprocess
from collections.abc import Sequence
from pathlib import Path

HOME = Path(__file__).parents[1]
PACKAGES = ("torch", "onnxruntime", "openvino", "nncf", "onnxruntime-genai")
UNPUBLISHED = ("benchmarks/results/", "benchmarks/looks.json", "docs/", "README.md", "CHANGELOG.md")
"""Paths that no figure depends on, by their beginning."""


def read_versions() -> dict[str, str]:
    """Read the versions of what computes, as far as it is installed."""
    installed = {each.name.lower(): each.version for each in importlib.metadata.distributions()}
    return {package: installed[package] for package in PACKAGES if package in installed}


def describe_command(words: Sequence[str]) -> str:
    """Return the command of a run; folders of this machine are left out, and so is --publish."""
    script, *others = words
    pairs = (word.rpartition("=") for word in others if not word.startswith("--publish"))
    shown = [f"{name}{sign}{Path(value).name if os.sep in value else value}" for name, sign, value in pairs]
    return shlex.join(["python", f"benchmarks/{Path(script).name}", *shown])


def run_git(*words: str) -> str:
    """Return what a command of git prints in this repository."""
    git = subprocess.run(["git", *words], cwd=HOME, check=True, capture_output=True, text=True)
    return git.stdout.strip("\n")


def list_changes() -> list[str]:
    """List the paths that differ from the commit, and that a figure could depend on."""
    paths = [line[3:] for line in run_git("status", "--porcelain").splitlines()]
    return [path for path in paths if not path.startswith(UNPUBLISHED)]
