"""Which artifacts a server is told to serve, under which names, and where they lie."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from laconic.artifacts.artifact_signature import read_public_key
from laconic.artifacts.download import fetch_artifact
from laconic.artifacts.model_name import is_address, split_name
from laconic.errors import UsageError, did_you_mean
from serve.model_repository.versions import escape, explain_ambiguity
from serve.settings.server_settings import Settings

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey


def locate_artifacts(artifacts: Sequence[Path | str], settings: Settings) -> dict[str, Path]:
    """Return the folders of artifacts by the names of their models; those at addresses are downloaded.

    Raises what `name_sources` does before anything is downloaded, and what `locate_artifact` raises.
    """
    sources = name_sources(artifacts, settings)
    return {name: locate_artifact(name, source, settings) for name, source in sources.items()}


def name_sources(artifacts: Sequence[Path | str], settings: Settings) -> dict[str, str]:
    """Return the folders or addresses of artifacts by the names of their models.

    artifacts: folders or addresses, each alone or as `NAME=ARTIFACT`. Raises UsageError for a name that cannot be
    one, two of a name, settings that name others, and the key of a signature that cannot be used.
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
    check_digests(sources, settings)
    read_signer(settings)
    return sources


def locate_artifact(name: str, source: str, settings: Settings) -> Path:
    """Return the folder of the artifact of a model; one at an address is downloaded. Raises what `fetch_artifact`
    raises."""
    if not is_address(source):
        return Path(source)
    digest, signer = settings.find_digest(name), read_signer(settings)
    return fetch_artifact(source, sha256=digest, timeout=settings.download_timeout, signer=signer)


def read_signer(settings: Settings) -> "EllipticCurvePublicKey | None":
    """Read the key of who must have signed each artifact; None where nobody must. Raises UsageError for one that cannot
    be used."""
    return None if settings.require_signature is None else read_public_key(settings.require_signature)


def check_required(names: Mapping[str, str], settings: Settings) -> None:
    """Raise UsageError for a required model that can never be served, for lack of a folder in which it might appear."""
    missing = [name for name in settings.require if name not in names]
    if missing and settings.models is None:
        hint = did_you_mean(missing[0], names)
        raise UsageError(f"--require names {missing[0]!r}, and no artifact of that name was given. {hint}")


def check_digests(names: Mapping[str, str], settings: Settings) -> None:
    """Raise UsageError for digests of artifacts that were not given; one without a name belongs to the only model."""
    unknown = [name for name in settings.sha256 or () if name not in names]
    if unknown == [""] and (len(names) != 1 or settings.models is not None):
        raise UsageError("--sha256 has a digest without a name, and there are several models. Write NAME=DIGEST")
    if unknown not in ([], [""]) and settings.models is None:
        hint = did_you_mean(unknown[0], names)
        raise UsageError(f"--sha256 names {unknown[0]!r}, and no artifact of that name was given. {hint}")
