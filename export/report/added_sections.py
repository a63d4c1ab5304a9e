"""Sections that are added to the report of a finished artifact: trials of a search, and of a draft model."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from export.report.changes import summarize_search
from export.report.report import render_template
from laconic import registry
from laconic.artifacts.artifact import Artifact
from laconic.artifacts.manifest import MEASURED, REPORT, read_measurements
from laconic.hashing import digest_file, seal
from laconic.timing.measurements import DraftTrial, TrialRecord

SEARCH, DRAFT = "search.html.j2", "draft.html.j2"
DRAFT_MARK = "<!--draft-->"
"""Stands before and after the section about a draft model, which is in front of that about a search."""
MARK = "<!--search-->"
"""Marks the place of the section about a search: once without it, before and after it once it is there."""


def add_search(folder: Path, trials: Iterable[Mapping[str, Any]]) -> None:
    """Write the trials of a search into an artifact's report.html and measured.json, replacing those of an earlier
    search.

    trials: the fields of a TrialRecord each, JSON-ready.
    """
    artifact = Artifact.load(folder)
    records = tuple(TrialRecord.model_validate(trial) for trial in trials)
    metric = str(registry.resolve("task", artifact.manifest.task).metric)
    section = render_template(SEARCH, search=summarize_search(records, metric)) if records else ""
    before, _, rest = (folder / REPORT).read_text(encoding="utf-8").partition(MARK)
    after = rest.rpartition(MARK)[2]
    (folder / REPORT).write_text(f"{before}{MARK}\n{section}{MARK}{after}", encoding="utf-8")
    measured = artifact.measured.model_copy(update={"search": records, "report": digest_file(folder / REPORT).sha256})
    (folder / MEASURED).write_bytes(seal(measured.model_dump(mode="json")))


def add_draft_trial(folder: Path, trial: DraftTrial) -> None:
    """Write the trial of a draft model into an artifact's report.html and measured.json, replacing an earlier one."""
    measured = read_measurements(folder).model_copy(update={"draft": trial})
    if measured.report is not None:
        text = (folder / REPORT).read_text(encoding="utf-8")
        text = re.sub(f"{DRAFT_MARK}.*{DRAFT_MARK}\n", "", text, flags=re.DOTALL)
        section = f"{DRAFT_MARK}\n{render_template(DRAFT, trial=trial)}{DRAFT_MARK}\n"
        (folder / REPORT).write_text(text.replace(MARK, section + MARK, 1), encoding="utf-8")
        measured = measured.model_copy(update={"report": digest_file(folder / REPORT).sha256})
    (folder / MEASURED).write_bytes(seal(measured.model_dump(mode="json")))
