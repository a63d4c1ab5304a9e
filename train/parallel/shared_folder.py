"""A folder that the ranks of one machine share while they open what they train."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch.distributed as dist

from laconic.cache import Cache, open_scratch_folder
from train.parallel.ranks import Ranks

NAME = "shared"


@contextmanager
def share_folder(ranks: Ranks, cache: Cache) -> Iterator[Path | None]:
    """Make a folder in the cache for the ranks of each machine, removed when all ranks have left the body; None for the
    only rank of one. What a killed run has left is removed by the next one. Raises UsageError where none can be made.
    """
    host = socket.gethostname()
    hosts = gather(ranks, host)
    if len(hosts) == 1:
        yield None
        return
    first = hosts.index(host)
    is_maker = first == ranks.rank and hosts.count(host) > 1
    with open_scratch_folder(cache.folder / NAME) if is_maker else nullcontext() as folder:
        folders = gather(ranks, str(folder) if folder else "")
        yield Path(folders[first]) if folders[first] else None
        ranks.any(False)  # a barrier: the folder stays until all ranks have opened what is in it


def gather(ranks: Ranks, text: str) -> list[str]:
    """Return the text of every rank, in their order."""
    texts = [text] * ranks.world
    if ranks.world > 1:
        dist.all_gather_object(texts, text)
    return texts
