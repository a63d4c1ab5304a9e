"""The folder of a run of fine-tuning: whose it is, and what of an interrupted run still counts."""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from laconic.errors import UsageError
from laconic.progress import Steps
from train.finetune.evaluator import ANSWERS, LOG
from train.trainer import SNAPSHOTS

KEY = "run.json"


@contextmanager
def claim_folder(folder: Path, key: str, validation: str, steps: Steps) -> Iterator[None]:
    """Use a folder for the run with this key in the body: what another run has left in it is removed, and so are
    evaluations on another validation set.

    Where the body fails before the first snapshot, the run cannot be resumed, and the folder is removed, too.
    """
    path, card = folder / KEY, {"key": key, "validation": validation}
    try:
        earlier = dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        earlier = {}
    if earlier.get("key") != key:
        if folder.exists() and not path.is_file() and any(folder.iterdir()):
            raise UsageError(f"{folder} exists and is not a run's: it will not be removed. Choose another --output")
        if any((folder / SNAPSHOTS).glob("step-*.json")):
            steps.warn(
                f"{folder.name} held an interrupted run with other settings, other data or another source: it is "
                f"removed, and training starts from the beginning"
            )
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    elif earlier.get("validation", validation) != validation:
        steps.warn("the validation set is another one than before the interruption: it is evaluated anew")
        for name in (LOG, ANSWERS):
            (folder / name).unlink(missing_ok=True)
    path.write_text(json.dumps(card) + "\n", encoding="utf-8")
    try:
        yield
    except BaseException:
        if not any((folder / SNAPSHOTS).glob("step-*.json")):
            shutil.rmtree(folder, ignore_errors=True)
        raise
