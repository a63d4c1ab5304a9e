"""What is released: one version everywhere, workflows that run the project's own commands, the same bytes again."""

import io
import re
import runpy
import subprocess
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
    text = "\n".join(path.read_text(encoding="utf-8") for path in [*files, HOME / "Dockerfile"])
    named = re.findall(r"(?:newTag: |LACONIC_VERSION:-|ARG VERSION=)([^}\n]*)", text)
    assert set(named) == {__version__}


@pytest.mark.parametrize("path", sorted((HOME / "tests/formats").glob("*.laconic")), ids=lambda path: path.stem)
def test_an_artifact_of_each_version_still_loads_and_answers(path: Path) -> None:
    """It was made with VNNI. Without it sums of INT8 products saturate: agreement is 0.953, and servers refuse it."""
    artifact = Artifact.load(path)
    assert artifact.manifest.versions["laconic"] == path.stem
    choice = artifact.choose(None)
    (session,) = artifact.open_unchecked(choice.engine, choice.placement)
    with session:
        pair = artifact.golden(choice.placement)[0]
        assert session.run(pair[0]).keys() == pair[1].keys()
        assert min(artifact.measure_golden_agreement(session, choice.placement).values()) > 0.9


def test_the_workflow_runs_what_the_script_runs_on_every_python_that_is_supported() -> None:
    jobs = yaml.safe_load((WORKFLOWS / "ci.yml").read_text(encoding="utf-8"))["jobs"]
    commands = "\n".join(step.get("run", "") for step in jobs["test"]["steps"])
    targets = re.findall(r"^make (\w+)", read(".ci/run"), re.MULTILINE)
    assert targets == re.findall(r"^make (\w+)", commands, re.MULTILINE)
    project = tomllib.loads(read("pyproject.toml"))["project"]
    versions = jobs["test"]["strategy"]["matrix"]["python"]
    assert versions[0] == project["requires-python"].removeprefix(">=")
    assert project["classifiers"] == [f"Programming Language :: Python :: {version}" for version in versions]
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


def test_every_file_that_a_server_installs_has_a_digest_and_the_version_of_the_constraints() -> None:
    """`make hashes` writes it."""
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", read("constraints.txt"), re.MULTILINE))
    requirements = read("deploy/requirements.txt").replace("\\\n", "").splitlines()[2:]
    names = set()
    for line in requirements:
        name, version, rest = re.fullmatch(r"([\w-]+)==(\S+) (.*)", line).groups()
        assert pins.get(name, version) == version
        assert re.fullmatch(r"(;[^-]*)?( *--hash=sha256:[0-9a-f]{64})+", rest), name
        names.add(name)
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    for extra in ("sign", "serve", "onnxruntime", "openvino", "generate", "remote", "otel"):
        needed = {re.match(r"[\w-]+", each)[0] for each in extras[extra]} - {"laconic"}
        assert needed <= names, extra


def read_stages() -> dict[str, list[str]]:
    """The instructions of each stage of the Dockerfile by its name, those of several lines as one."""
    text = re.sub(r"\\\n *", "", re.sub(r"^#.*\n", "", read("Dockerfile"), flags=re.MULTILINE))
    stages = re.split(r"^FROM \S+ AS (\S+)\n", text, flags=re.MULTILINE)
    return {name: body.strip().splitlines() for name, body in zip(stages[1::2], stages[2::2], strict=True)}


def test_each_image_is_unprivileged_labelled_and_stopped_by_sigterm_and_the_last_one_serves() -> None:
    stages = read_stages()
    assert list(stages)[-3:] == ["compress", "gpu", "serve"]
    labels = {
        f"org.opencontainers.image.{name}" for name in ("title", "description", "licenses", "version", "revision")
    }
    for name in ("compress", "gpu", "serve"):
        instructions = stages[name]
        assert {"USER 10001:10001", "STOPSIGNAL SIGTERM", "WORKDIR /models"} <= set(instructions), name
        assert labels == {label for each in instructions for label in re.findall(r"(org\.[\w.]+)=", each)}, name
        assert any(each.startswith("HEALTHCHECK ") for each in instructions), name
        assert not any(each.startswith(("RUN", "ADD")) for each in instructions), name
    for name in ("install-serve", "install-compress", "install-gpu"):
        assert any("--output-file /opt/laconic/sbom.cdx.json" in each for each in stages[name]), name
    assert not re.search(r"https?://(?!download\.pytorch\.org|127\.0\.0\.1)", read("Dockerfile"))
    extras = tomllib.loads(read("pyproject.toml"))["project"]["optional-dependencies"]
    assert {"cpu", "openvino", "onnxruntime"} <= set(extras)
    for path in re.findall(r"^COPY (?!--)(.*) \S+$", read("Dockerfile"), re.MULTILINE):
        assert all((HOME / each).exists() for each in path.split()), path


def test_what_the_image_leaves_out_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    kept = ["openvino/libs/libopenvino_intel_cpu_plugin.so", "openvino/libs/libopenvino_onnx_frontend.so.1", "a/b.py"]
    hub = ["huggingface_hub/x.py", "hf_xet/x.so"]
    gone = ["openvino/libs/libopenvino_intel_gpu_plugin.so", "numpy/tests/x.py", "a/b.pyi", "onnxruntime/tools/x.py"]
    for remote in (False, True):
        site = tmp_path / str(remote)
        for name in (*kept, *hub, *gone, "pygments/lexers/__init__.py", *(["aiohttp/x.py"] if remote else [])):
            (site / name).parent.mkdir(parents=True, exist_ok=True)
            (site / name).touch()
        subprocess.run(["sh", HOME / "deploy/image/slim.sh", site], check=True)
        assert all((site / name).exists() for name in kept)
        assert not any((site / name).exists() for name in gone)
        assert all((site / name).exists() == remote for name in hub)
