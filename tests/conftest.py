import signal
import sys

import pytest

from laconic import registry
from laconic.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background ignores it


@pytest.fixture(scope="module")
def own_tasks():
    """Tasks of these tests, registered while a module of tests runs: an artifact may name registered tasks only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.TASKS, "padded", "served:Padded")
        patch.setitem(registry.TASKS, "brightness", "served:Brightness")
        yield


@pytest.fixture
def laconic(monkeypatch, capsys):
    """Run the command in this process: exit code, standard output, standard error."""
    monkeypatch.setenv("COLUMNS", "80")
    before = signal.getsignal(signal.SIGTERM)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["laconic", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main()
        shown = capsys.readouterr()
        return stopped.value.code, shown.out, shown.err

    yield run
    signal.signal(signal.SIGTERM, before)
