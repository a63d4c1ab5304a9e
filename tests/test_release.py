"""What is released: one version everywhere, workflows that run the project's own commands, the same bytes again."""

import io
import re
import runpy
import tarfile
import tomllib
from pathlib import Path

import pytest
import yaml

from laconic import __version__
from laconic.artifacts.artifact import Artifact

HOME = Path(__file__).parents[1]
WORKFLOWS = HOME / ".github/workflows"


def read(name: str) -> str:
    return (HOME / name).read_text(encoding="utf-8")


def test_one_version_is_named_everywhere() -> None:
    assert yaml.safe_load(read("CITATION.cff"))["version"] == __version__
    files = [*(HOME / "deploy").glob("*.yaml"), *(HOME / "deploy").rglob("kustomization.yaml")]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    named = re.findall(r"newTag: (.*)|LACONIC_VERSION:-([^}]*)", text)
    assert {tag or version for tag, version in named} == {__version__}


@pytest.mark.parametrize("path", sorted((HOME / "tests/formats").glob("*.laconic")), ids=lambda path: path.stem)
def test_an_artifact_of_each_version_still_loads_and_answers(path: Path) -> None:
    artifact = Artifact.load(path)
    assert artifact.manifest.versions["laconic"] == path.stem
    with artifact.open() as session:  # checks the golden outputs
        pair = artifact.golden(artifact.manifest.placements[0])[0]
        assert session.run(pair[0]).keys() == pair[1].keys()


def test_the_workflow_runs_what_the_script_runs_on_every_python_that_is_supported() -> None:
    jobs = yaml.safe_load((WORKFLOWS / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    commands = "\n".join(step.get("run", "") for step in jobs["test"]["steps"])
    targets = re.findall(r"^make (\w+)", read(".ci/run"), re.MULTILINE)
    assert targets == re.findall(r"^make (\w+)", commands, re.MULTILINE)
    oldest = tomllib.loads(read("pyproject.toml"))["project"]["requires-python"].removeprefix(">=")
    assert jobs["test"]["strategy"]["matrix"]["python"][0] == oldest
    for path in WORKFLOWS.glob("*.yml"):
        workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
        assert workflow["permissions"] == {"contents": "read"}, path
        assert all("timeout-minutes" in job for job in workflow["jobs"].values()), path
        wanted = set(re.findall(r"^ *(?:run: |- )?make ([a-z-]+)", path.read_text(encoding="utf-8"), re.MULTILINE))
        assert wanted <= set(re.findall(r"^([a-z-]+):", read("Makefile"), re.MULTILINE)), path


def test_an_sdist_is_packed_to_the_same_bytes_whenever_and_by_whomever_its_files_were_made(tmp_path: Path) -> None:
    repack = runpy.run_path(str(HOME / ".ci/build_dist.py"))["repack"]
    contents = []
    for name, time, mode, names in (("one", 1e9, 0o600, "ab"), ("two", 2e9 + 0.5, 0o664, "ba")):
        path = tmp_path / name
        with tarfile.open(path, "w:gz") as archive:
            for member in names:
                info = tarfile.TarInfo(member)
                info.size, info.mtime, info.mode, info.uid, info.uname = 1, time, mode, int(time) % 1000, name
                archive.addfile(info, io.BytesIO(b"x"))
        repack(path, 1_700_000_000)
        contents.append(path.read_bytes())
        with tarfile.open(path) as archive:
            assert [(member.name, member.mtime, member.mode) for member in archive] == [
                ("a", 1_700_000_000, 0o644),
                ("b", 1_700_000_000, 0o644),
            ]
    assert contents[0] == contents[1]
