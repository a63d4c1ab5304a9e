"""CPU quota and memory limit of control groups, from trees of files as kernels and container runtimes lay them out."""

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from laconic import hardware
from laconic.commands import doctor
from laconic.limits import thread_pools
from laconic.limits.cgroups import read_cpu_quota, read_memory_limit
from serve.settings.server_settings import MIB, Settings

V2 = "31 23 0:28 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1_CPU = "32 31 0:29 / /sys/fs/cgroup/cpu,cpuacct rw shared:9 - cgroup cgroup rw,cpu,cpuacct"
V1_MEMORY = "35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
NO_LIMIT = "9223372036854771712"
"""What version 1 says where memory is not limited."""


def make_tree(root: Path, membership: str, mounts: str, **files: str) -> Path:
    """Write what `/proc` says of the process, and the files of cgroups by their paths."""
    contents = {"proc/self/cgroup": membership, "proc/self/mountinfo": mounts}
    contents |= {f"sys/fs/cgroup/{name}": text for name, text in files.items()}
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def tree_v2(root: Path, path: str = "/", mounts: str = V2, **files: str) -> Path:
    return make_tree(root, f"0::{path}", mounts, **files)


def test_of_nested_cgroups_of_version_2_the_least_quota_counts_in_cpus_with_its_file(tmp_path):
    quota = read_cpu_quota(tree_v2(tmp_path, **{"cpu.max": "50000 100000"}))
    assert quota == (0.5, tmp_path / "sys/fs/cgroup/cpu.max")
    assert read_cpu_quota(tree_v2(tmp_path, **{"cpu.max": "250000"})).value == 2.5
    files = {"cpu.max": "max 100000", "kube/cpu.max": "150000 100000", "kube/pod/cpu.max": "400000 100000"}
    quota = read_cpu_quota(tree_v2(tmp_path, "/kube/pod", **files))
    assert quota == (1.5, tmp_path / "sys/fs/cgroup/kube/cpu.max")
    files = {"cpu.max": "max 100000", "other/cpu.max": "10000 100000", "own/child/cpu.max": "10000 100000"}
    assert read_cpu_quota(tree_v2(tmp_path, "/own", **files)) is None


@pytest.mark.parametrize("path", ["/../../system.slice/docker-1.scope", "/system.slice/docker-1.scope"])
def test_a_container_whose_own_path_lies_outside_its_mount_has_the_mounts_limits(tmp_path, path):
    mounts = "31 23 0:28 /system.slice/docker-2.scope /sys/fs/cgroup ro - cgroup2 cgroup rw"
    assert read_cpu_quota(tree_v2(tmp_path, path, mounts, **{"cpu.max": "100000 50000"})).value == 2


def test_a_path_is_taken_relative_to_the_part_that_is_mounted_whatever_the_mount_point(tmp_path):
    mounts = "31 23 0:28 /docker/1 /sys/fs/cgroup ro - cgroup2 cgroup rw"
    root = tree_v2(tmp_path, "/docker/1/job", mounts, **{"job/cpu.max": "50000 100000"})
    assert read_cpu_quota(root).value == 0.5
    mounts = V2.replace("/sys/fs/cgroup", r"/sys/fs/cgroup/of\040it")
    assert read_cpu_quota(tree_v2(tmp_path, mounts=mounts, **{"of it/cpu.max": "50000 100000"})).value == 0.5


def test_quota_and_memory_of_version_1_are_read_from_their_hierarchies(tmp_path):
    root = make_tree(
        tmp_path, "5:cpu,cpuacct:/docker/1\n4:memory:/docker/1\n1:name=systemd:/x", f"{V1_CPU}\n{V1_MEMORY}",
        **{
            "cpu,cpuacct/docker/1/cpu.cfs_quota_us": "150000", "cpu,cpuacct/docker/1/cpu.cfs_period_us": "50000",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1", "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "memory/docker/1/memory.limit_in_bytes": "536870912", "memory/memory.limit_in_bytes": NO_LIMIT,
        },
    )  # fmt: skip
    assert read_cpu_quota(root).value == 3
    assert read_memory_limit(root) == (2**29, root / "sys/fs/cgroup/memory/docker/1/memory.limit_in_bytes")


def test_of_both_versions_at_once_the_least_limit_counts(tmp_path):
    root = make_tree(
        tmp_path, "5:cpu,cpuacct:/\n0::/", f"{V1_CPU}\n{V2.replace('/sys/fs/cgroup', '/sys/fs/cgroup/unified')}",
        **{
            "cpu,cpuacct/cpu.cfs_quota_us": "200000", "cpu,cpuacct/cpu.cfs_period_us": "100000",
            "unified/cpu.max": "100000 100000",
        },
    )  # fmt: skip
    assert read_cpu_quota(root).value == 1


def test_the_lowest_memory_limit_counts_be_it_high_or_max(tmp_path):
    files = {"a/memory.max": "max", "a/memory.high": "3000", "memory.max": "4000", "memory.high": "max"}
    assert read_memory_limit(tree_v2(tmp_path, "/a", **files)) == (3000, tmp_path / "sys/fs/cgroup/a/memory.high")


@pytest.mark.parametrize(
    "text", ["max 100000", "", "-1 100000", "0 100000", "50000 0", "half", "5e4 1e5", "1" * 5000, "\x00\xff"]
)
def test_a_file_that_states_no_quota_is_no_limit(tmp_path, text):
    root = tree_v2(tmp_path, **{"cpu.max": text, "memory.max": text.partition(" ")[0].replace("50000", "max")})
    assert read_cpu_quota(root) is None
    assert read_memory_limit(root) is None


@pytest.mark.parametrize(
    ("membership", "mounts"),
    [("", V2), ("0::/", ""), ("0:/", V2), ("garbage", "garbage"), ("0::/", "31 23 0:28 - cgroup2"), ("3:cpu:/", V2)],
)
def test_without_a_cgroup_or_its_mount_there_is_no_limit(tmp_path, membership, mounts):
    root = make_tree(tmp_path, membership, mounts, **{"cpu.max": "50000 100000", "memory.max": "1000"})
    assert read_cpu_quota(root) is None
    assert read_memory_limit(root) is None


def test_a_machine_without_proc_and_a_file_that_cannot_be_read_have_no_limit(tmp_path):
    assert read_cpu_quota(tmp_path) is None
    assert read_memory_limit(tmp_path) is None
    root = tree_v2(tmp_path)
    (root / "sys/fs/cgroup/cpu.max").mkdir(parents=True)
    assert read_cpu_quota(root) is None


@pytest.fixture
def container(tmp_path, monkeypatch):
    """Have the process be in a container with this quota, in microseconds of 100,000, and this memory."""

    def enter(quota: str, memory: str) -> Path:
        root = tree_v2(tmp_path, **{"cpu.max": f"{quota} 100000", "memory.max": memory})
        for module in (hardware, doctor, thread_pools):
            for name, read in (("read_cpu_quota", read_cpu_quota), ("read_memory_limit", read_memory_limit)):
                monkeypatch.setattr(module, name, partial(read, root), raising=False)
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
        monkeypatch.setattr(os, "cpu_count", lambda: 16)
        return root

    return enter


@pytest.mark.parametrize(
    ("quota", "count"), [("50000", 1), ("100000", 1), ("250000", 2), ("800000", 8), ("6400000", 8), ("max", 8)]
)
def test_cores_are_those_that_the_quota_pays_for_in_full(container, quota, count):
    container(quota, "max")
    assert hardware.cores() == count
    assert hardware.this_machine().cores == count


def test_memory_is_that_of_the_container_unless_the_machine_has_less(container):
    container("max", "536870912")
    assert hardware.this_machine().memory == 2**29
    container("max", NO_LIMIT)
    assert hardware.this_machine().memory == hardware.physical_memory()


@pytest.mark.parametrize(
    ("limit", "fronts", "body", "in_flight", "cache"),
    [("536870912", 1, 64, 64, 128), ("268435456", 2, 16, 16, 32), (str(2**33), 1, 64, 256, 1024)],
)
def test_bodies_and_the_cache_of_the_server_follow_the_memory(container, limit, fronts, body, in_flight, cache):
    container("max", limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "physical_memory", lambda: 2**36)
        settings = Settings(fronts=fronts)
        assert Settings(max_body="1 GiB").max_body == 2**30
    assert (settings.max_body, settings.max_in_flight, settings.kv_cache) == (body * MIB, in_flight * MIB, cache * MIB)


def test_the_doctor_says_where_limits_come_from(container):
    root = container("50000", "536870912")
    findings = {finding.name: finding.found for finding in doctor.examine()}
    quota, memory = (root / "sys/fs/cgroup" / name for name in ("cpu.max", "memory.max"))
    assert findings["cores"] == f"1 of 16 available to this process: the CPU quota in {quota} is 0.5"
    assert findings["memory"].endswith(f"available to this process: the limit is in {memory}")
    container("max", "max")
    assert doctor.format_cores(hardware.this_machine()) == (
        "8 of 16 available to this process: the CPU affinity leaves no more"
    )


def test_thread_pools_follow_the_quota_unless_the_user_set_them(container, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.delenv("TORCHINDUCTOR_COMPILE_THREADS", raising=False)
    container("250000", "max")
    thread_pools.limit_thread_pools()
    assert (os.environ["OMP_NUM_THREADS"], os.environ["TORCHINDUCTOR_COMPILE_THREADS"]) == ("3", "2")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    container("max", "max")
    thread_pools.limit_thread_pools()
    assert "OMP_NUM_THREADS" not in os.environ


def test_torch_computes_with_as_many_threads_as_the_quota_pays_for(tmp_path):
    code = (
        "import sys, functools, pathlib; from laconic.limits import cgroups, thread_pools;"
        "thread_pools.read_cpu_quota = functools.partial(cgroups.read_cpu_quota, pathlib.Path(sys.argv[1]));"
        "thread_pools.limit_thread_pools(); import torch; print(torch.get_num_threads())"
    )
    root = tree_v2(tmp_path, **{"cpu.max": "50000 100000"})
    clean = {name: value for name, value in os.environ.items() if not name.endswith("NUM_THREADS")}
    done = subprocess.run([sys.executable, "-c", code, root], env=clean, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
