import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from laconic.errors import UsageError
from train.planner.timeline_plot import COLUMNS, downsample, find_phases, plot_timeline

GIB = 2**30
PHASES = [("forward", 0, 4), ("backward", 4, 8), ("optimizer", 8, 9)]


def series(scale=GIB):
    shapes = {
        "parameters": [4] * 10,
        "gradients": [0, 0, 0, 0, 0, 1, 2, 3, 4, 4],
        "optimizer": [8] * 10,
        "activations": [0, 8, 16, 24, 32, 24, 16, 8, 0, 0],
        "temporaries": [0, 0, 0, 0, 3, 3, 3, 3, 0, 0],
    }
    return {name: np.array(values, np.int64) * scale for name, values in shapes.items()}


def words(path):
    root = ElementTree.parse(path).getroot()
    return [text for text in ("".join(each.itertext()).strip() for each in root.iter() if "text" in each.tag) if text]


def drawn(path, at=None, limit=None, **more):
    plot_timeline(np.arange(10) if at is None else at, series(), PHASES, limit, path, **more)
    return words(path)


def test_the_peak_is_told_with_its_phase_and_what_it_is_made_of(tmp_path):
    said = drawn(tmp_path / "a.svg")
    assert {"47.00 GiB", "at the peak, in backward", "forward", "backward"} <= set(said)
    for name, part, share in (
        ("activations", "32.00", "68 %"),
        ("optimizer", "8.00", "17 %"),
        ("gradients", "0.00", "0 %"),
    ):
        place = len(said) - 1 - said[::-1].index(name)
        assert said[place + 1 : place + 3] == [part, share]


def test_the_limit_the_axis_and_host_memory_are_drawn_where_there_are_any(tmp_path):
    assert "limit 40 GiB" in drawn(tmp_path / "a.svg", limit=40 * GIB)
    assert "limit 800 GiB, above this picture" in drawn(tmp_path / "b.svg", limit=800 * GIB)
    assert not any("limit" in word for word in drawn(tmp_path / "c.svg"))
    assert "seconds" in drawn(tmp_path / "a.svg", at=np.linspace(0, 9, 10))
    assert "events: allocations and releases" in drawn(tmp_path / "b.svg")
    nothing = {"optimizer": np.zeros(10, np.int64)}
    assert "Host memory" not in drawn(tmp_path / "a.svg", host=nothing)
    said = drawn(tmp_path / "b.svg", host={**nothing, "parameters": np.full(10, 3 * 2**20)})
    assert {"Host memory", "3.00 MiB"} <= set(said)


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG\r\n\x1a\n")])
def test_the_same_figures_give_the_same_bytes(tmp_path, suffix, start):
    paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path in paths:
        plot_timeline(np.arange(10), series(), PHASES, 40 * GIB, path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert paths[0].read_bytes().startswith(start)
    assert b"20" + b"26-" not in paths[0].read_bytes()[:4000]


def test_a_long_run_is_thinned_and_keeps_its_peak(tmp_path):
    total = np.random.default_rng(0).integers(0, 1000, 200_000)
    total[123_457] = 5000
    kept = downsample(total)
    assert kept.size <= 2 * COLUMNS + 3
    assert {0, 123_457, total.size - 1} <= set(kept.tolist())
    assert (np.diff(kept) > 0).all()
    plot_timeline(np.arange(total.size), {"activations": total * GIB}, [], None, tmp_path / "a.svg")
    assert "5000.00 GiB" in words(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size < 600_000


def test_bands_begin_where_the_phase_changes_and_only_those_with_room_are_named(tmp_path):
    assert find_phases([]) == []
    assert find_phases(["build", "forward", "forward", "backward"]) == [
        ("build", 0, 1),
        ("forward", 1, 3),
        ("backward", 3, 3),
    ]
    at, phases = np.arange(1000), [("forward", 0, 500), ("sliver", 500, 501), ("backward", 501, 999)]
    plot_timeline(at, {"parameters": at}, phases, None, tmp_path / "a.svg")
    assert {"forward", "sliver", "backward"} & set(words(tmp_path / "a.svg")) == {"forward", "backward"}
    plot_timeline(np.arange(3), {"cache": np.array([1, 2, 3]) * GIB}, [], None, tmp_path / "a.svg")
    assert "cache" in words(tmp_path / "a.svg")


@pytest.mark.parametrize("values", [[7], [0, 0, 0], [1, 1, 1]])
def test_runs_of_little_are_drawn_too(tmp_path, values):
    plot_timeline(np.arange(len(values)), {"parameters": np.array(values)}, [("build", 0, 0)], None, tmp_path / "a.svg")
    assert f"{max(values)}.00 B" in words(tmp_path / "a.svg")


@pytest.mark.parametrize(
    ("name", "at", "values", "message"),
    [
        ("a.gif", 3, {"parameters": 3}, "as .svg or .png"),
        ("a.svg", 3, {"parameters": 4}, "expected as many"),
        ("a.svg", 0, {"parameters": 0}, "needs instants"),
        ("a.svg", 3, {}, "needs instants"),
    ],
)
def test_what_cannot_be_drawn_is_refused(tmp_path, name, at, values, message):
    given = {category: np.ones(count, np.int64) for category, count in values.items()}
    with pytest.raises(UsageError, match=message):
        plot_timeline(np.arange(at), given, [], None, tmp_path / name)
