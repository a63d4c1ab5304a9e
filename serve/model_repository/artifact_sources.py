"""Which artifacts a server is told to serve, under which names, and where they lie."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from laconic.artifacts.download import fetch_artifact, is_address
from laconic.artifacts.manifest import MANIFEST, make_name
from laconic.errors import CorruptArtifact, UsageError
from laconic.hashing import digest_file
from laconic.registry import did_you_mean
from serve.model_repository.versions import escape, explain_ambiguity
from serve.settings.server_settings import Settings

NAMED = re.compile(r"([A-Za-z0-9][\w.-]*)=(.+)", re.ASCII | re.DOTALL)
"""NAME=ARTIFACT."""


def locate_artifacts(artifacts: Sequence[Path | str], settings: Settings) -> dict[str, Path]:
    """Return the folders of artifacts by the names of their models; those at addresses are downloaded.

    artifacts: folders or addresses, each alone or as `NAME=ARTIFACT`. Raises UsageError for two of a name and for
    settings that name others, before anything is downloaded; CorruptArtifact for one of another digest than the
    settings say, and what `fetch_artifact` raises.
    """
    sources: dict[str, str] = {}
    for artifact in artifacts:
        name, source = split_name(artifact)
        if name != escape(name):
            raise UsageError(f"the name of {escape(source)} is not UTF-8. Rename the folder")
        if name in sources:
            raise UsageError(explain_ambiguity(name, (sources[name], source)))
        sources[name] = source
    check_required(sources, settings)
    digests = name_digests(sources, settings.sha256 or {})
    return {name: locate(source, digests.get(name), settings.download_timeout) for name, source in sources.items()}


def split_name(artifact: Path | str) -> tuple[str, str]:
    """Return the name of a model, and the folder or the address of its artifact. A folder may have a `=` in its
    name."""
    match = None if isinstance(artifact, Path) or Path(artifact).exists() else NAMED.fullmatch(artifact)
    if match is not None:
        return match[1], match[2]
    source = str(artifact)
    return make_name(Path(source.rstrip("/")) if is_address(source) else Path(source).resolve()), source


def check_required(names: Mapping[str, str], settings: Settings) -> None:
    """Raise UsageError for a required model that can never be served, for lack of a folder in which it might appear."""
    missing = [name for name in settings.require if name not in names]
    if missing and settings.models is None:
        hint = did_you_mean(missing[0], names)
        raise UsageError(f"--require names {missing[0]!r}, and no artifact of that name was given. {hint}")


def name_digests(names: Mapping[str, str], digests: Mapping[str, str]) -> dict[str, str]:
    """Return the digests by the names of models; one without a name belongs to the only model. Raises UsageError."""
    if digests.keys() == {""} and len(names) == 1:
        return {next(iter(names)): digests[""]}
    if unknown := [name for name in digests if name not in names]:
        hint = did_you_mean(unknown[0], names) if unknown[0] else "With several artifacts, write NAME=DIGEST."
        raise UsageError(f"--sha256 names {unknown[0]!r}, and no artifact of that name was given. {hint}")
    return dict(digests)


def locate(source: str, sha256: str | None, timeout: float) -> Path:
    """Return the folder of an artifact: its own, or that of the copy in the cache."""
    if is_address(source):
        return fetch_artifact(source, sha256=sha256, timeout=timeout)
    path = Path(source)
    if sha256 is not None and (path / MANIFEST).is_file() and digest_file(path / MANIFEST).sha256 != sha256:
        raise CorruptArtifact(f"{path} is another artifact than --sha256 says: the digest of its {MANIFEST} differs")
    return path
