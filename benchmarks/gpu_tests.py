"""The tests that need a GPU, run as a part of the GPU benchmark."""

import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

HOME = Path(__file__).parents[1]
MARK = "mark.gpu"
LOG, REPORT = "tests.txt", "tests.xml"


@dataclass
class TestRun:
    """What became of the tests: names with the first line of the reason. problem: why there is nothing more to say."""

    __test__ = False

    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    problem: str = ""

    @property
    def succeeded(self) -> bool:
        """Whether the tests ran to their end, and none failed."""
        return not self.failed and not self.problem

    def describe(self) -> str:
        """The outcome, in Markdown."""
        counts = f"{len(self.passed)} passed, {len(self.failed)} failed, {len(self.skipped)} skipped."
        lines = [f"- failed: `{name}`: {reason}" for name, reason in self.failed.items()]
        reasons = Counter(self.skipped.values())
        lines += [f"- {count} skipped: {reason}" for reason, count in reasons.items()]
        return "\n".join([*([self.problem] if self.problem else []), counts, "", *lines]).strip()


def run_gpu_tests(folder: Path, seconds: float) -> TestRun:
    """Run the tests with the marker `gpu`, for so many seconds at most; the log goes to tests.txt in the folder."""
    folder = folder.resolve()
    files = [path for path in sorted((HOME / "tests").glob("test_*.py")) if MARK in path.read_text(encoding="utf-8")]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-W", "default", "--continue-on-collection-errors"]
    command += ["-p", "no:cacheprovider", f"--junit-xml={folder / REPORT}", *map(str, files)]
    (folder / REPORT).unlink(missing_ok=True)
    with (folder / LOG).open("wb") as log:
        try:
            subprocess.run(command, cwd=HOME, stdout=log, stderr=subprocess.STDOUT, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return TestRun(problem=f"The tests took longer than {seconds:.0f} s and were stopped; {LOG} has the log.")
    if not (folder / REPORT).is_file():
        return TestRun(problem=f"The tests did not start; {LOG} says why.")
    return read_report(folder / REPORT)


def read_report(path: Path) -> TestRun:
    """Read pytest's report in JUnit's form."""
    run = TestRun()
    for case in ElementTree.parse(path).iter("testcase"):
        name = ".".join(part for part in (case.get("classname"), case.get("name")) if part)
        outcome = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        if outcome is None:
            run.passed.append(name)
            continue
        reasons = run.skipped if outcome.tag == "skipped" else run.failed
        reasons[name] = next(iter((outcome.get("message") or "").splitlines()), "")
    return run
