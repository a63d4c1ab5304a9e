"""Limits of control groups (cgroups), as container runtimes set them: CPU quota and memory of this process."""

import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

SYSTEM = Path("/")
DEFAULT_PERIOD = 100_000
"""Microseconds of a quota's period where the file states none."""


class CgroupLimit(NamedTuple):
    """A limit and the file that states it. value: CPUs, or bytes."""

    value: float
    file: Path

    @property
    def whole_cores(self) -> int:
        """Of a CPU quota, the number of cores that it pays for in full, at least one."""
        return max(1, int(self.value))


def read_cpu_quota(root: Path = SYSTEM) -> CgroupLimit | None:
    """Return the lowest CPU quota of this process's cgroup and of those above it, in CPUs; None without any.

    root: the folder that `proc` and `sys` are in.
    """
    limits = []
    for folder in list_cgroups(root, ""):  # version 2
        if (values := read_numbers(folder / "cpu.max")) and min(values) > 0:
            limits.append(CgroupLimit(values[0] / (*values[1:], DEFAULT_PERIOD)[0], folder / "cpu.max"))
    for folder in list_cgroups(root, "cpu"):
        quota, period = (read_numbers(folder / f"cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota and period and min(*quota, *period) > 0:
            limits.append(CgroupLimit(quota[0] / period[0], folder / "cpu.cfs_quota_us"))
    return min(limits, key=lambda limit: limit.value, default=None)


def read_memory_limit(root: Path = SYSTEM) -> CgroupLimit | None:
    """Return the lowest memory limit of this process's cgroup and of those above it, in bytes; None without any.

    Beyond `memory.high` the kernel slows a process down until memory is free again, so it counts as a limit.
    root: the folder that `proc` and `sys` are in.
    """
    files = [folder / name for folder in list_cgroups(root, "") for name in ("memory.max", "memory.high")]
    files += [folder / "memory.limit_in_bytes" for folder in list_cgroups(root, "memory")]
    limits = [CgroupLimit(values[0], file) for file in files if (values := read_numbers(file)) and values[0] > 0]
    return min(limits, key=lambda limit: limit.value, default=None)


def list_cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folder of this process's cgroup and those above it, up to the mount, in one hierarchy.

    controller: of version 1; "" for version 2. A container may see its own cgroup as the mount itself: the path that
    `/proc/self/cgroup` states then lies outside, and the mount alone is yielded.
    """
    path, mount = find_path(root, controller), find_mount(root, controller)
    if path is None or mount is None:
        return
    mounted, folder = mount
    is_inside = path.is_relative_to(mounted) and ".." not in path.parts
    inner = path.relative_to(mounted) if is_inside else PurePosixPath()
    yield from (folder / part for part in (inner, *inner.parents))


def find_path(root: Path, controller: str) -> PurePosixPath | None:
    """Return the path of this process's cgroup in a hierarchy; None without one. controller: as of `list_cgroups`."""
    for line in read_lines(root / "proc/self/cgroup"):
        parts = line.split(":", 2)
        if len(parts) == 3 and controller in parts[1].split(","):
            return PurePosixPath(parts[2])
    return None


def find_mount(root: Path, controller: str) -> tuple[PurePosixPath, Path] | None:
    """Return which cgroup of a hierarchy is mounted, and where; None if none is. controller: as of `list_cgroups`."""
    for line in read_lines(root / "proc/self/mountinfo"):
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 5 or len(kind) < 3:
            continue
        if kind[0] == ("cgroup" if controller else "cgroup2") and (not controller or controller in kind[2].split(",")):
            mounted, folder = (unescape(field) for field in fields[3:5])
            return PurePosixPath(mounted), root / folder.lstrip("/")
    return None


def unescape(field: str) -> str:
    """Decode the octal escapes of a path in mountinfo: a space is `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def read_lines(file: Path) -> list[str]:
    """Read the lines of a file of the kernel; none where it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def read_numbers(file: Path) -> tuple[int, ...]:
    """Read the numbers on the first line of a file; none where it is absent, unreadable or says `max`."""
    try:
        return tuple(int(word) for word in next(iter(read_lines(file)), "").split())
    except ValueError:
        return ()
