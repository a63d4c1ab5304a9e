import subprocess
import sys
from pathlib import Path

import pytest

from laconic.cli import check_packages
from laconic.errors import UsageError
from laconic.registry import PACKAGES

GENERIC = sorted(set(PACKAGES) - {"laconic"})


def test_the_packages_of_this_checkout_are_the_right_ones_and_none_is_a_namespace_that_anyone_could_join():
    check_packages()
    home = Path(sys.modules["laconic"].__file__).parents[1]
    assert all((home / package / "__init__.py").is_file() for package in PACKAGES)


@pytest.mark.parametrize("package", GENERIC)
def test_a_file_that_shadows_a_package_is_named(package, tmp_path):
    (tmp_path / f"{package}.py").write_text("raise SystemExit('the wrong file ran')")
    code = "from laconic.cli import check_packages; check_packages()"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert str(tmp_path / f"{package}.py") in done.stderr
    assert "Rename that file" in done.stderr
    assert "the wrong file ran" not in done.stderr


def test_a_folder_that_shadows_a_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "serve").mkdir()
    (tmp_path / "serve" / "__init__.py").touch()
    for name in [name for name in sys.modules if name.partition(".")[0] == "serve"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match="shadows Laconic's package 'serve'"):
        check_packages()
