"""The module that an artifact was captured from, where stages changed the original."""

from collections.abc import Sequence

from laconic.artifacts.manifest import Manifest
from laconic.artifacts.record import Record
from laconic.cache import Cache
from laconic.errors import SourceError, UntrustedSource
from laconic.files import read_json
from laconic.models.checkpoint import CARD, Checkpoint
from laconic.models.source import CheckpointSource
from laconic.recipes.stage import TorchStage
from laconic.registry import resolve, trust_addresses


def list_module_records(manifest: Manifest, *, trust: bool) -> list[Record]:
    """List the records of the stages that changed the module when the artifact was made.

    Raises UntrustedCode for a stage that is given by its address, unless it is trusted.
    """
    with trust_addresses(trust):
        return [
            record
            for record in manifest.history[manifest.source.get("earlier", 0) :]
            if issubclass(resolve("stage", record.stage), TorchStage)
        ]


def find_teacher(records: Sequence[Record], *, trust: bool) -> str:
    """Find the name of the last stage that changed the outputs on purpose, whose result the verdict compares with; or
    ""."""
    with trust_addresses(trust):
        teachers = [record.stage for record in records if resolve("stage", record.stage).teaches]
    return teachers[-1] if teachers else ""


def find_compressed(records: Sequence[Record], cache: Cache, *, trust: bool) -> tuple[CheckpointSource | None, str]:
    """Find the module after the last of these stages in the cache, where `laconic compress` keeps each result.

    Returns it and "", or None and the reason why there is none.
    """
    last = records[-1]
    for card in sorted(cache.folder.glob(f"stage-*/*/{CARD}")):
        try:
            history = read_json(card)["history"]
            if not history or history[-1]["key"] != last.key:
                continue
        except (OSError, ValueError, KeyError, TypeError):  # removed meanwhile, or not a checkpoint
            continue
        try:
            return CheckpointSource.of(Checkpoint.load(card.parent, trust=trust)), ""
        except UntrustedSource:
            return None, f"the module after {last.stage} is made by code of your own. Give --trust to have it opened"
        except SourceError as error:
            return None, f"the module after {last.stage} cannot be opened: {error}"
    return None, (
        f"the module after {last.stage} is not in the cache of this machine ({cache.folder}). Repeat the compression "
        f"here to have it compared"
    )
