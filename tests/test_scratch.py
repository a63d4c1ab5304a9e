"""The folder in which a result is made until it is whole."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from laconic.cache import open_scratch_folder
from laconic.errors import UsageError

HOLD = """
import sys, time
from pathlib import Path
from laconic.cache import open_scratch_folder
with open_scratch_folder(Path(sys.argv[1])) as folder:
    (folder / "half").write_text("done")
    print(folder, flush=True)
    time.sleep(60)
"""


def holding(destination: Path) -> tuple[subprocess.Popen[str], Path]:
    """A process at work in a folder of its own, and that folder."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, destination], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_folder_is_beside_the_destination_and_gone_after_an_error(tmp_path: Path) -> None:
    destination = tmp_path / "new" / "out"

    def fail() -> None:
        with open_scratch_folder(destination) as folder:
            assert folder.parent == destination.parent
            raise ValueError("in the middle")

    with pytest.raises(ValueError, match="in the middle"):
        fail()
    assert not list(destination.parent.iterdir())


def test_a_run_keeps_the_folder_of_one_at_work_and_removes_that_of_one_killed(tmp_path: Path) -> None:
    destination = tmp_path / "out[1].laconic"
    process, other = holding(destination)
    with process:
        try:
            with open_scratch_folder(destination) as folder:
                assert folder != other
                assert (other / "half").read_text() == "done"
        finally:
            process.send_signal(signal.SIGKILL)
    assert other.is_dir()
    with open_scratch_folder(tmp_path / "another"):
        assert other.is_dir()
    with open_scratch_folder(destination):
        assert not other.exists()


def test_a_folder_of_the_users_stays_and_a_destination_that_cannot_be_is_said(tmp_path: Path) -> None:
    (tmp_path / ".out.original").mkdir()
    with open_scratch_folder(tmp_path / "out"):
        pass
    assert (tmp_path / ".out.original").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="Choose another --output"), open_scratch_folder(tmp_path / "file" / "out"):
        pass
