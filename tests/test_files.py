"""Local input within bounds, and folders that several processes replace at once."""

import shutil
import signal
import subprocess
import sys
import textwrap

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from laconic.artifacts.artifact import Artifact
from laconic.cache import open_scratch_folder
from laconic.config import read_yaml
from laconic.data.array_formats import load_arrays
from laconic.errors import ArtifactError, DataError, InputError, RecipeError
from laconic.files import MAX_BYTES, MAX_DEPTH, check_depth, find_replaced, read_json, replace_folder
from laconic.tasks.image_preprocess import ImagePreprocess, open_image

MEBIBYTES = 310


def nested(depth):
    """JSON of so many lists in one another."""
    return "[" * depth + "]" * depth


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 900, 1_000, 100_000])
def test_deep_json_is_refused(depth, tmp_path):
    (tmp_path / "deep.json").write_text(nested(depth))
    with pytest.raises(ValueError, match=f"more than {MAX_DEPTH} levels"):
        read_json(tmp_path / "deep.json")


def test_large_json_is_refused(tmp_path):
    (tmp_path / "large.json").write_bytes(b" " * MAX_BYTES + b"1")
    with pytest.raises(ValueError, match="more than 8,388,608 bytes"):
        read_json(tmp_path / "large.json")


JSON = st.recursive(
    st.none() | st.integers() | st.text(), lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner)
)


@given(JSON)
def test_depth_is_that_of_the_deepest_value(content):
    def depth(value):
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
        return 0 if inner is None else 1 + max(map(depth, inner), default=0)

    wrapped = content
    for _ in range(MAX_DEPTH - depth(content)):
        wrapped = [wrapped]
    check_depth(wrapped)
    with pytest.raises(ValueError, match="levels"):
        check_depth([wrapped])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: " + nested(10_000), "nested too deeply"),
        ("a: &a [x, x]\nb: [*a, *a]", "aliases are not supported"),
        ("a: &a {x: 1}\nb: {<<: *a}", "aliases are not supported"),
        ("a: " + "x" * 2**18, "more than 262,144 bytes"),
        ("a: 2020-13-45", "month must be"),
        ("? [a, b]\n: 1", "unhashable key"),
        ("? {a: b}\n: 1", "unhashable key"),
        ("a: !!python/object/apply:os.system [ls]", "could not determine a constructor"),
    ],
)
def test_a_recipe_that_explodes_is_refused_in_one_sentence(text, message, tmp_path):
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(RecipeError, match=message) as caught:
        read_yaml(tmp_path / "recipe.yaml")
    assert "\n" not in str(caught.value)


MEASURE = """
import os, resource, sys
from pathlib import Path
from types import SimpleNamespace
import numpy as np
from PIL import Image
from laconic.artifacts.artifact import Artifact
from laconic.cache import open_scratch_folder
from laconic.config import read_yaml
from laconic.data.array_formats import load_arrays
from laconic.data.parquet import ParquetRows
from laconic.errors import LaconicError
from laconic.files import read_json
from laconic.tasks.image_preprocess import ImagePreprocess, open_image

def read_image(path):
    ImagePreprocess(shortest_edge=224, crop=(224, 224)).apply(open_image(path))

def most():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024

def read_rows(path):
    return list(ParquetRows(path, SimpleNamespace(field="text", columns=())))

readers = {
    ".json": read_json, ".yaml": read_yaml, ".npz": load_arrays, ".png": read_image, ".parquet": read_rows
}

def measure(path):
    before = most()
    try:
        readers[path.suffix](path)
        print("read")
    except (LaconicError, ValueError) as error:
        print(error)
    print(most() - before, flush=True)

for path in sys.argv[1:]:
    child = os.fork()  # its peak begins anew; that of a started program begins at the memory of whoever started it
    if not child:
        measure(Path(path))
        os._exit(0)
    os.waitpid(child, 0)
"""


def measure(paths):
    """Read files, each in a process of its own: what was said, and the mebibytes that it took at most, of each."""
    done = subprocess.run([sys.executable, "-c", MEASURE, *paths], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return list(zip(lines[::2], map(float, lines[1::2]), strict=True))


def write_flat_json(path):
    path.write_text("[" + ",".join(["[]"] * (MAX_BYTES // 3 - 1)) + "]")


def write_dense_yaml(path):
    path.write_text("a: [" + ",".join(["[]"] * 87_000) + "]")


def write_zeros(path):
    np.savez_compressed(path, x=np.zeros((2**29,), np.uint8))


def write_repeated_value(path):
    values = pa.DictionaryArray.from_arrays(pa.array(np.zeros(2**20, np.int32)), ["x" * 2**16])
    pq.write_table(pa.table({"text": values}), path)


def write_compressed_values(path):
    values = [f"{number}" + "x" * 2**20 for number in range(300)]
    pq.write_table(pa.table({"text": values}), path, compression="zstd", use_dictionary=False)


def write_huge_image(path):
    Image.new("1", (30_000, 30_000)).save(path)


def write_largest_image(path):
    Image.new("RGBA", (6_000, 6_000)).save(path, compress_level=1)


def write_narrow_image(path):
    Image.new("RGB", (16, 100_000)).save(path)


BOMBS = {
    "flat.json": (write_flat_json, "read"),
    "dense.yaml": (write_dense_yaml, "read"),
    "zeros.npz": (write_zeros, "times its size"),
    "repeated.parquet": (write_repeated_value, "times its size"),
    "compressed.parquet": (write_compressed_values, "times its size"),
    "huge.png": (write_huge_image, "900000000 pixels"),
    "largest.png": (write_largest_image, "read"),
    "narrow.png": (write_narrow_image, "would become an input of 224 x 1400000"),
}


def test_a_file_takes_little_memory_however_it_is_made(tmp_path):
    for name, (write, _) in BOMBS.items():
        write(tmp_path / name)
        assert (tmp_path / name).stat().st_size < 2**24, name
    for (name, (_, said)), (answer, taken) in zip(
        BOMBS.items(), measure([tmp_path / name for name in BOMBS]), strict=True
    ):
        assert said in answer, name
        assert taken < MEBIBYTES, name


def test_an_npz_of_ordinary_data_is_read_and_one_that_lies_about_sizes_is_refused(tmp_path):
    np.savez_compressed(tmp_path / "zeros.npz", x=np.zeros((10, 2**20), np.uint8))
    assert load_arrays(tmp_path / "zeros.npz")["x"].shape == (10, 2**20)
    path = tmp_path / "liar.npz"
    np.savez_compressed(path, x=np.zeros((2**25,), np.uint8))
    content = path.read_bytes()
    size = (2**25 + 128).to_bytes(4, "little")
    assert size in content
    path.write_bytes(content.replace(size, (64).to_bytes(4, "little")))
    with pytest.raises(DataError, match=r"liar\.npz does not read as \.npz"):
        load_arrays(path)


@pytest.mark.parametrize("crop", [(4_000, 4_000), (1, 10**9)])
def test_a_crop_that_no_memory_holds_is_refused(crop):
    with pytest.raises(InputError, match=f"an input of {crop[1]} x {crop[0]}, more than 8,000,000 pixels"):
        ImagePreprocess(crop=crop).apply(Image.new("RGB", (8, 8)))


def test_a_format_whose_decoder_runs_programs_is_refused(tmp_path):
    Image.new("RGB", (8, 8)).save(tmp_path / "image.eps")
    with pytest.raises(InputError, match="not an image that can be read"):
        open_image(tmp_path / "image.eps")


def folder_of(path, text):
    path.mkdir(parents=True)
    (path / "manifest.json").write_text(text)
    return path


def test_a_folder_takes_the_place_of_another_and_nothing_is_left(tmp_path):
    for text in ("one", "two", "three"):
        replace_folder(folder_of(tmp_path / f"made-{text}", text), tmp_path / "out[1]")
        assert (tmp_path / "out[1]" / "manifest.json").read_text() == text
    assert [path.name for path in tmp_path.iterdir()] == ["out[1]"]


WRITE = """
import sys
from pathlib import Path
from laconic.files import replace_folder
parent, name = Path(sys.argv[1]), sys.argv[2]
sys.stdin.readline()
for number in range(200):
    made = parent / f"made-{name}-{number}"
    made.mkdir()
    for part in "abc":
        (made / part).write_text(f"{name} {number}")
    replace_folder(made, parent / "out")
"""


def test_processes_that_write_to_one_destination_at_the_same_instant_all_succeed(tmp_path):
    command = [sys.executable, "-c", WRITE, tmp_path]
    running = [subprocess.Popen([*command, name], stdin=subprocess.PIPE, text=True) for name in "xyz"]
    for process in running:
        process.stdin.write("\n")
        process.stdin.flush()
    assert [process.wait(60) for process in running] == [0, 0, 0]
    for process in running:
        process.stdin.close()
    parts = {path.read_text() for path in (tmp_path / "out").iterdir()}
    assert len(parts) == 1, "the folder is of one process as a whole"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


KILL = textwrap.dedent("""
    import os, signal, sys
    from pathlib import Path
    from laconic.files import replace_folder
    made, out = map(Path, sys.argv[1:])
    rename = Path.rename
    def killed(self, to):
        if self == made:
            os.kill(os.getpid(), signal.SIGKILL)
        return rename(self, to)
    Path.rename = killed
    replace_folder(made, out)
""")


@pytest.fixture
def killed(tmp_path):
    """A destination whose folder was moved aside by a process that was killed before the new one was there."""
    out = folder_of(tmp_path / "out", "earlier")
    made = folder_of(tmp_path / "made", "later")
    done = subprocess.run([sys.executable, "-c", KILL, made, out])
    assert done.returncode == -signal.SIGKILL
    assert not out.exists()
    shutil.rmtree(made)
    return out


def test_a_neighbour_that_cannot_be_read_hides_nothing(killed):
    (killed.parent / ".gone").symlink_to("x" * 300)  # whose target no system looks up
    assert len(find_replaced(killed)) == 1
    assert find_replaced(killed.parent / "nowhere" / "out") == []


def test_what_a_killed_run_moved_aside_is_named_to_readers_and_put_back_by_the_next_run(killed, tmp_path):
    (found,) = find_replaced(killed)
    with pytest.raises(ArtifactError, match=r"a run that was killed left the earlier artifact in") as caught:
        Artifact.load(killed)
    assert str(found) in str(caught.value)
    with open_scratch_folder(killed):
        assert (killed / "manifest.json").read_text() == "earlier"
    assert find_replaced(killed) == []
    (tmp_path / ".out.old-empty").mkdir()  # of a process that was killed before it moved anything
    replace_folder(folder_of(tmp_path / "made", "third"), killed)
    assert (killed / "manifest.json").read_text() == "third"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
