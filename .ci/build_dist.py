"""Builds the wheel and the sdist of the last commit into a folder: the same commit gives the same bytes.

Usage: python .ci/build_dist.py [FOLDER]
"""

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

HOME = Path(__file__).resolve().parents[1]


def git(*arguments: str) -> bytes:
    """Return what a git command prints."""
    return subprocess.run(["git", "-C", str(HOME), *arguments], check=True, stdout=subprocess.PIPE).stdout


def repack(path: Path, epoch: int) -> None:
    """Write an sdist anew, in the order of names and with one time: those of generated files are of the build."""
    content = io.BytesIO()
    with tarfile.open(path) as old, tarfile.open(fileobj=content, mode="w", format=tarfile.PAX_FORMAT) as new:
        for member in sorted(old.getmembers(), key=lambda each: each.name):
            member.mtime, member.uid, member.gid, member.uname, member.gname = epoch, 0, 0, "", ""
            member.mode = 0o755 if member.isdir() or member.mode & 0o100 else 0o644
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)
    with path.open("wb") as file, gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed:
        packed.write(content.getvalue())


def build(destination: Path) -> list[Path]:
    """Build from an export of the last commit, so that nothing that lies around gets in."""
    os.umask(0o022)  # a wheel holds the modes of its files
    epoch = int(git("log", "-1", "--format=%ct"))
    with tempfile.TemporaryDirectory() as folder:
        with tarfile.open(fileobj=io.BytesIO(git("archive", "HEAD"))) as archive:
            archive.extractall(folder, filter="data")
        for path in Path(folder).rglob("*"):
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(destination), folder]
        environment = os.environ | {"SOURCE_DATE_EPOCH": str(epoch), "PYTHONHASHSEED": "0", "TZ": "UTC"}
        subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)
    (sdist,) = destination.glob("*.tar.gz")
    repack(sdist, epoch)
    return sorted(destination.iterdir())


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else HOME / "dist").resolve()
    target.mkdir(parents=True, exist_ok=True)
    for old in target.iterdir():
        old.unlink()
    for path in build(target):
        sys.stdout.write(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n")
