import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest

from laconic.errors import UsageError
from train.planner.plan_plots import COLUMNS, downsample, find_phases, plot_timeline

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


def drawn(path, limit=800 * GIB, host=None):
    plot_timeline(series(), host or {}, PHASES, limit, path)
    return words(path)


def test_the_peak_is_told_with_its_phase_and_what_it_is_made_of(tmp_path):
    said = drawn(tmp_path / "a.svg")
    assert {"47.00 GiB at the peak, in backward", "forward", "backward"} <= set(said)
    assert {"32.00  activations, 68%", "8.00  optimizer, 17%", "0.00  gradients, 0%"} <= set(said)


def test_the_limit_the_axis_and_host_memory_are_drawn_where_there_are_any(tmp_path):
    assert "limit 40 GiB" in drawn(tmp_path / "a.svg", limit=40 * GIB)
    assert "limit 800 GiB, above this picture" in drawn(tmp_path / "b.svg", limit=800 * GIB)
    assert "events: allocations and releases" in drawn(tmp_path / "c.svg")
    nothing = {"optimizer": np.zeros(10, np.int64)}
    assert "Host memory" not in drawn(tmp_path / "a.svg", host=nothing)
    said = drawn(tmp_path / "b.svg", host={**nothing, "parameters": np.full(10, 3 * 2**20)})
    assert {"Host memory", "3.00 MiB at the peak, in forward"} <= set(said)


@pytest.mark.parametrize(("suffix", "start"), [("svg", b"<?xml"), ("png", b"\x89PNG\r\n\x1a\n")])
def test_the_same_figures_give_the_same_bytes(tmp_path, suffix, start):
    paths = [tmp_path / f"{name}.{suffix}" for name in "ab"]
    for path in paths:
        plot_timeline(series(), {}, PHASES, 40 * GIB, path)
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
    plot_timeline({"activations": total * GIB}, {}, [], GIB, tmp_path / "a.svg")
    assert "5000.00 GiB at the peak" in words(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").stat().st_size < 600_000


def test_bands_begin_where_the_phase_changes_and_only_those_with_room_are_named(tmp_path):
    assert find_phases([]) == []
    assert find_phases(["build", "forward", "forward", "backward"]) == [
        ("build", 0, 1),
        ("forward", 1, 3),
        ("backward", 3, 3),
    ]
    phases = [("forward", 0, 500), ("sliver", 500, 501), ("backward", 501, 999)]
    plot_timeline({"parameters": np.arange(1000)}, {}, phases, 5, tmp_path / "a.svg")
    assert {"forward", "sliver", "backward"} & set(words(tmp_path / "a.svg")) == {"forward", "backward"}


@pytest.mark.parametrize("values", [[7], [0, 0, 0], [1, 1, 1]])
def test_runs_of_little_are_drawn_too(tmp_path, values):
    plot_timeline({"parameters": np.array(values)}, {}, [("build", 0, 0)], 5, tmp_path / "a.svg")
    assert any(word.startswith(f"{max(values)}.00 B at the peak") for word in words(tmp_path / "a.svg"))


@pytest.mark.parametrize(("name", "message"), [("a.gif", "as .svg or .png"), ("no/a.svg", "there is no folder")])
def test_what_cannot_be_drawn_is_refused(tmp_path, name, message):
    with pytest.raises(UsageError, match=message):
        plot_timeline(series(), {}, PHASES, GIB, tmp_path / name)
