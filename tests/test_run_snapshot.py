"""Snapshots of a run that cannot be written: a warning, and another try."""

import logging
import shutil

import pytest
import torch

from laconic.errors import TrainingFailure
from train import run_snapshot
from train.run_snapshot import open_snapshots, save_snapshot
from train.snapshots.snapshot_manifest import PACKS


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setattr(run_snapshot, "snapshot_content", lambda state, losses: {"model": {"weight": state}})


def break_folder(folder):
    """What a full disk does: no file can be made in the folder of the tensors."""
    shutil.rmtree(folder / PACKS)
    (folder / PACKS).write_text("")


def mend_folder(folder):
    (folder / PACKS).unlink()
    (folder / PACKS).mkdir()


def test_a_snapshot_that_cannot_be_written_is_a_warning_and_the_next_one_tries_again(tmp_path, caplog):
    weight = torch.ones(3)
    with open_snapshots(tmp_path) as snapshots, caplog.at_level(logging.WARNING):
        break_folder(tmp_path)
        save_snapshot(snapshots, weight, [1.0], wait=False)  # fails in the background
        save_snapshot(snapshots, weight, [1.0, 1.0], wait=False)  # tells of it, and fails again
        assert "the snapshot of step 1 could not be written" in caplog.text
        assert "The training goes on" in caplog.text
        with pytest.raises(TrainingFailure):
            snapshots._wait()
        mend_folder(tmp_path)
        save_snapshot(snapshots, weight, [1.0] * 3, wait=True)
        assert snapshots.latest() == 3


def test_a_last_snapshot_that_fails_costs_not_the_result_unless_the_run_was_interrupted(tmp_path, caplog):
    with open_snapshots(tmp_path) as snapshots, caplog.at_level(logging.WARNING):
        break_folder(tmp_path)
        save_snapshot(snapshots, torch.ones(3), [1.0], wait=False)
    assert "the snapshot of step 1 could not be written" in caplog.text
    with open_snapshots(tmp_path / "interrupted") as snapshots:
        break_folder(tmp_path / "interrupted")
        with pytest.raises(TrainingFailure, match="could not be written"):
            save_snapshot(snapshots, torch.ones(3), [1.0], wait=True)
