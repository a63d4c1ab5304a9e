"""The build context of an image that holds artifacts: a Dockerfile, and the folder that becomes `/models`.

The image of one artifact has it at /models itself, where KServe's `oci://` looks for a model; that of several has each
in a folder of its own. The same artifacts give the same bytes.
"""

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from laconic import __version__
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.artifact_files import open_plain
from laconic.artifacts.artifact_signature import SIGNATURE, UNSIGNED, check_signature, list_files, read_public_key
from laconic.artifacts.manifest import MANIFEST, check_manifest_exists
from laconic.artifacts.model_name import check_name, split_name
from laconic.cache import open_scratch_folder
from laconic.errors import UsageError
from laconic.files import replace_folder
from laconic.hashing import digest_file

DOCKERFILE = "Dockerfile"
MODELS = "models"
HEADER = "# Written by `laconic package`: an image that holds models at /models, and serves them."
BASE = f"""
# With BASE=busybox the image holds the models alone, as for KServe's oci://.
ARG BASE=laconic:{__version__}
FROM ${{BASE}}
COPY {MODELS}/ /{MODELS}/
"""


def write_context(sources: Sequence[Path | str], destination: Path, key: Path | None = None) -> dict[str, str]:
    """Write the build context of an image that holds artifacts; return the digests of their manifests by name.

    sources: folders, each alone or as `NAME=ARTIFACT`. key: the public one of who must have signed them. Raises
    UsageError for names that cannot be used and a destination that is something else, and the errors of artifacts that
    are not whole or not signed.
    """
    named = name_folders(sources)
    check_context(named.values(), destination)
    artifacts = load_artifacts(named, key)
    digests = {name: digest_file(artifact.path / MANIFEST).sha256 for name, artifact in artifacts.items()}
    with open_scratch_folder(destination) as scratch:
        context = scratch / "context"
        for name, artifact in artifacts.items():
            folder = context / MODELS if len(artifacts) == 1 else context / MODELS / f"{name}.laconic"
            copy_artifact(artifact, folder)
        (context / DOCKERFILE).write_text(write_dockerfile(digests), encoding="utf-8")
        for path in (context, *context.rglob("*")):  # a layer holds modes and times, too
            path.chmod(0o755 if path.is_dir() else 0o644)
            os.utime(path, (0, 0))
        replace_folder(context, destination)
    return digests


def check_context(paths: Iterable[Path], destination: Path) -> None:
    """Raise UsageError where something else than our build context would be overwritten, or an artifact changed."""
    for path in paths:
        if path.resolve() in destination.resolve().parents:
            raise UsageError(f"{destination} lies inside the artifact {path}. Choose another --output")
    dockerfile = destination / DOCKERFILE
    is_ours = dockerfile.is_file() and dockerfile.read_text(encoding="utf-8", errors="replace").startswith(HEADER)
    if destination.is_file() or (destination.is_dir() and any(destination.iterdir()) and not is_ours):
        raise UsageError(f"{destination} exists and was not written by `laconic package`. Choose another --output")


def name_folders(sources: Sequence[Path | str]) -> dict[str, Path]:
    """Return the folders of artifacts by the names of their models. Raises UsageError for names that cannot be used."""
    folders: dict[str, Path] = {}
    for each in sources:
        name, source = split_name(each)
        check_name(name)
        if name in folders:
            raise UsageError(
                f"{folders[name]} and {source} have the same name. Give one of them another, as NAME=ARTIFACT"
            )
        folders[name] = Path(source)
    return folders


def load_artifacts(folders: Mapping[str, Path], key: Path | None) -> dict[str, Artifact]:
    """Load artifacts by name, each after its signature where a key is given."""
    public = None if key is None else read_public_key(key)
    artifacts: dict[str, Artifact] = {}
    for name, path in folders.items():
        if public is not None:
            check_manifest_exists(path)
            check_signature(path, public)
        artifacts[name] = Artifact.load(path)
    return artifacts


def copy_artifact(artifact: Artifact, folder: Path) -> None:
    """Copy the files of an artifact; where it is signed, its signature and all that this is over."""
    is_signed = (artifact.path / SIGNATURE).is_file()
    for name in list_files(artifact.path, UNSIGNED[1:]) if is_signed else artifact.listed:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with open_plain(artifact.path / name) as source, target.open("wb") as file:
            shutil.copyfileobj(source, file)


def write_dockerfile(digests: dict[str, str]) -> str:
    """Write the Dockerfile. digests: of manifests, by the names of the models."""
    labels = {f"laconic.model.{name}": f"sha256:{digest}" for name, digest in sorted(digests.items())}
    label = " \\\n      ".join(f'{name}="{value}"' for name, value in labels.items())
    artifacts = [f"/{MODELS}/{name}.laconic" for name in digests]
    if len(artifacts) == 1:
        artifacts = [f"{name}=/{MODELS}" for name in digests]
    pins = [argument for name, digest in digests.items() for argument in ("--sha256", f"{name}={digest}")]
    return f"{HEADER}{BASE}LABEL {label}\nCMD {json.dumps([*artifacts, *pins])}\n"
