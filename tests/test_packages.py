import subprocess
import sys
from pathlib import Path

import pytest

from laconic.errors import UsageError
from laconic.packages import PACKAGES, check_packages


def test_the_rooms_of_this_checkout_are_the_right_ones():
    check_packages()


@pytest.mark.parametrize("room", PACKAGES)
def test_a_file_that_takes_the_place_of_a_room_is_named(room, tmp_path):
    (tmp_path / f"{room}.py").write_text("raise SystemExit('the wrong file ran')")
    code = "from laconic.packages import check_packages; check_packages()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert str(tmp_path / f"{room}.py") in done.stderr
    assert "Rename that file" in done.stderr
    assert "the wrong file ran" not in done.stderr


def test_a_folder_that_takes_the_place_of_a_room_is_named(tmp_path, monkeypatch):
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "serve"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="hides Laconic's package 'serve'"):
        check_packages()


def test_no_room_is_a_namespace_that_anyone_could_join():
    home = Path(sys.modules["laconic"].__file__).parents[1]
    assert all((home / room / "__init__.py").is_file() for room in PACKAGES)
