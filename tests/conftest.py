import os
import signal
import sys

import pytest
from hypothesis import HealthCheck, settings

from laconic import registry
from laconic.cli import main

# No example may fail because the machine is busy: on one with a load of 10, Hypothesis's limit of 200 ms did.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background ignores it


SLOWEST = (
    "search capture prediction text2text_generation text_heads plan trust pipeline parity_ledger cli gpu_benchmark "
    "prune_transformer serve_connections finetune stages fleet prune_channels fooled_verdict"
)
"""The files of tests that take 25 s and more. They come first: the last one to begin would run alone at the end."""


@pytest.hookimpl(tryfirst=True)  # a plugin that shuffles has the last word
def pytest_collection_modifyitems(items):
    """The slowest files first; skip what needs a GPU where there is none."""
    slowest = {f"test_{name}" for name in SLOWEST.split()}
    items.sort(key=lambda item: item.path.stem not in slowest)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and there is none that PyTorch can use"))


def has_gpu():
    try:
        import torch  # most runs of a part of the tests need no torch, which takes two seconds to import
    except ImportError:
        return False
    return torch.cuda.is_available()


@pytest.fixture(scope="session")
def shared(tmp_path_factory):
    """A folder of all processes of this run."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def one_thread():
    """torch computes with one thread while a module of tests runs: its models are small."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def captured(shared):
    """Get the checkpoint and the graph of a model of the zoo by its name."""
    from captured import open_captured  # imports torch

    return lambda name: open_captured(shared, name)


@pytest.fixture
def zoo(shared):
    """Get the checkpoint, the graph and the calibrated ranges of a model of the zoo by its name."""
    from captured import calibrate, open_captured  # imports torch

    return lambda name: (*open_captured(shared, name), calibrate(shared, name))


@pytest.fixture(scope="module")
def own_tasks():
    """Tasks of these tests, registered while a module of tests runs: an artifact may name registered tasks only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.TASKS, "padded", "served:Padded")
        patch.setitem(registry.TASKS, "brightness", "served:Brightness")
        patch.setitem(registry.TASKS, "framed", "served:Framed")
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
