import functools
import gc
import importlib
import logging
import os
import signal
import sys
from fnmatch import fnmatch
from pathlib import Path

import pytest
import typer
from artifacts import write_artifact
from hypothesis import HealthCheck, settings

from laconic import registry
from laconic.cache import Cache
from laconic.cli import main
from laconic.timing.benchmark import TRIAL_BATCHES

os.environ["OMP_NUM_THREADS"] = "1"  # of torch, here and in every program that a test starts: its models are small
# No example may fail because the machine is busy: on one with a load of 10, Hypothesis's limit of 200 ms did.
settings.register_profile("busy", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell that starts the tests in the background ignores it


# The commands are made of their functions once and not anew for each test, which took two thirds of a short command.
typer.main.get_command = functools.cache(typer.main.get_command)

SLOWEST = (
    "text_generation openvino_decoder text2text_generation capture tensor_parallel mesh_plan search finetune pipeline "
    "prediction plan parity_ledger speech_to_text transcriptions stages object_detection gpu_benchmark fooled_verdict "
    "fleet place quantize_stages prune_transformer loop generator audio text_heads image_text_to_text launchers "
    "serve_text_fields serve_ray deploy rank_meter parallel distill search_strategy adapter layerwise "
    "serve_generation prune_channels host_weights checkpoint"
)
"""The files of tests that take longest, the longest first: the last one to begin would run alone at the end."""


CORES = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()
"""The cores of the machine that the tests may use."""


def pytest_configure(config):
    """Keep each process of the run, with the programs that it starts, to a core of its own.

    Two processes with two threads each on two cores wait for one another: a run of the digits network took 80 ms of
    processor time instead of 0.5.
    """
    if CORES and not config.getoption("numprocesses", None):  # children of the process that hands out tests inherit its
        number = int(os.environ.get("PYTEST_XDIST_WORKER", f"gw{os.getpid()}").removeprefix("gw"))
        os.sched_setaffinity(0, {sorted(CORES)[number % len(CORES)]})


HANDLERS = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}


@pytest.fixture(autouse=True)
def _give_back_signals_and_log():
    """Undo what agents of torchrun do to the signals of this process, and Ray to its log, before the next test."""
    yield
    logging.getLogger().setLevel(logging.WARNING)
    for number, handler in HANDLERS.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def import_benchmark():
    """Return what imports a script of benchmarks/ by its name."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(Path(__file__).parents[1] / "benchmarks")
        yield importlib.import_module


@pytest.fixture
def all_cores():
    """Let a test use all cores, which something that it uses counts."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, CORES)
    yield
    os.sched_setaffinity(0, before)


UNMATCHED: list[str] = []
"""What is wrong with patterns of sweeps."""


@pytest.hookimpl(trylast=True)  # when all parameters are known
def pytest_generate_tests(metafunc):
    """Note patterns of sweeps that match no parameters of their test."""
    ids = [call.id for call in metafunc._calls]
    for mark in metafunc.definition.iter_markers("sweep"):
        for pattern in mark.args:
            if not any(fnmatch(each, pattern) for each in ids):
                UNMATCHED.append(f"{metafunc.function.__name__}: sweep({pattern!r}) matches none of {', '.join(ids)}")


@pytest.hookimpl(tryfirst=True)  # a plugin that shuffles has the last word
def pytest_collection_modifyitems(items):
    """The slowest files first; skip what needs a GPU where there is none; leave marks of sweeps where they belong."""
    if UNMATCHED:
        raise pytest.UsageError(*UNMATCHED)
    for item in items:
        mark = item.get_closest_marker("sweep")
        if mark and mark.args and not any(fnmatch(item.callspec.id, pattern) for pattern in mark.args):
            item.own_markers.remove(mark)
    places = {f"test_{name}": place for place, name in enumerate(SLOWEST.split())}
    items.sort(key=lambda item: places.get(item.path.stem, len(places)))
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not has_gpu():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and there is none that PyTorch can use"))


def pytest_collection_finish():
    """Spare the garbage collector what was imported: looking through it took 6 % of the time of tests that capture."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


def pytest_runtest_setup():
    """Let the exporter of torch keep its table of operators: it reads it anew for each model, in 0.8 s of the 5 s that
    a small encoder takes. And time what is exported at two batch sizes instead of six, those that a search asks for:
    the larger ones took a third of the time of an export. And measure how fast this machine multiplies by one product
    instead of twenty, which took a second of each fine-tuning with a cache of its own."""
    exporter = sys.modules.get("torch.onnx._internal.exporter._registration")
    if exporter and not hasattr(exporter.ONNXRegistry.from_torchlib, "cache_info"):
        exporter.ONNXRegistry.from_torchlib = staticmethod(functools.cache(exporter.ONNXRegistry.from_torchlib))
    # Else pytest listens to it, and torch describes all that it traces: a tenth of the time of a capture.
    logging.getLogger("torch.__trace").propagate = True
    if race := sys.modules.get("export.candidates.race"):
        race.BATCHES = TRIAL_BATCHES
    if flops := sys.modules.get("train.callbacks.flops"):
        flops.PATIENCE = 1e-9


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
def cache(tmp_path_factory):
    """What the runs of a module of tests share, as those of one user do."""
    return Cache(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """Weights and labelled samples of the digits network."""
    import digits  # imports torch

    return digits.write(tmp_path_factory.mktemp("trained"))


@pytest.fixture(scope="module")
def artifact(tmp_path_factory):
    """The artifact that doubles numbers."""
    return write_artifact(tmp_path_factory.mktemp("artifacts") / "twice.laconic")


@pytest.fixture
def http(server):
    """A client of the server of a module of tests."""
    with server.client() as client:
        yield client


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
        patch.setitem(registry.TASKS, "ranked", "served:Ranked")
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
