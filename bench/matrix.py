"""Runs the fast tests with every pair of a torch and a triton version that installs here.

    python bench/matrix.py
    python bench/matrix.py --torch 2.13 newest --triton 3.6 3.8 --tests tests/test_kernels.py

pip looks each version up first, without a download. A pair is refused where this torch's metadata
excludes this triton, and left out where torch is a CUDA build of several GB, unless ``--cuda``
allows them. What is left gets a virtual environment of its own under ``.matrix/``, which is kept: a
run that was interrupted goes on where it stopped, and a pair that passed is tested again once the
sources or the selection of tests have changed. The table is printed, and written
as JSON to ``.matrix/results.json``. The exit status is 1 where a test or an installation failed.
"""

import argparse
import hashlib
import json
import platform
import shutil
import subprocess
import sys
import time
import venv
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from xml.etree import ElementTree

from packaging.requirements import Requirement
from packaging.version import Version
from tqdm import tqdm

ROOT = Path(__file__).parents[1]
TORCH = ("2.8", "2.10", "2.11", "2.13", "newest")
TRITON = ("3.6", "3.8", "3.9")
# A few of each layer: kernels, module, agreement with torch on ranks, launches.
TESTS = ("kernels", "module", "parity", "host_path")
# Named by pyproject.toml as the extra `test`, without the demo's packages and the linters.
NEEDED = ("pytest>=8", "pytest-timeout", "hypothesis")
SOURCES = ("syncbn_triton/**/*.py", "kernels/**/*.*", "tests/*.py", "pyproject.toml")


@dataclass(frozen=True)
class Wheel:
    """What pip would install for a version asked for."""

    version: str
    requires: tuple[str, ...] = ()

    @property
    def cuda(self) -> bool:
        """Whether it brings NVIDIA's libraries along."""
        return any(Requirement(r).name.startswith(("nvidia-", "cuda-")) for r in self.requires)

    def excludes(self, name: str, version: str) -> str | None:
        """The requirement that keeps a version of another package out."""
        for text in self.requires:
            requirement = Requirement(text)
            if requirement.name == name and not requirement.specifier.contains(version):
                return f"{name}{requirement.specifier}"
        return None


@dataclass
class Row:
    """A pair, and what became of it.

    ``status`` is "passed", "failed", "not installed" (pip failed), "refused" (by torch's metadata),
    "skipped" (too large) or "missing" (no such wheel for this Python).
    """

    torch: str
    triton: str
    status: str
    why: str = ""
    passed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    sources: str = ""


def look_up(name: str, version: str) -> Wheel:
    """What pip would install for "2.13" or "newest", from its metadata.

    Raises:
        LookupError: There is none for this Python; carries pip's last error.
    """
    wanted = name if version == "newest" else f"{name}=={version}.*"
    with TemporaryDirectory() as folder:
        report = Path(folder, "report.json")
        options = ("--dry-run", "--ignore-installed", "--no-deps", "--report", str(report))
        done = pip(sys.executable, "install", *options, wanted)
        if done.returncode:
            raise LookupError(last_error(done.stderr))
        metadata = json.loads(report.read_text())["install"][0]["metadata"]
    needed = map(Requirement, metadata.get("requires_dist", []))
    here = (r for r in needed if r.marker is None or r.marker.evaluate({"extra": ""}))
    return Wheel(metadata["version"], tuple(f"{r.name}{r.specifier}" for r in here))


def numpy_for(triton: str) -> str:
    """The interpreter of triton 3.6 turns arrays into scalars, which NumPy 2.4 refuses."""
    return "numpy<2.4" if Version(triton) < Version("3.7") else "numpy"


def pip(python: str | Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def last_error(log: str) -> str:
    errors = [line for line in log.splitlines() if line.startswith("ERROR: ")]
    return errors[-1].removeprefix("ERROR: ") if errors else "pip failed"


def judge(torch: Wheel, triton: Wheel, cuda_allowed: bool) -> Row | None:
    """Why a pair is not tried, or None if it is."""
    pair = (torch.version, triton.version)
    pin = torch.excludes("triton", triton.version)
    if pin is not None:
        return Row(*pair, "refused", f"this torch requires {pin}")
    if torch.cuda and not cuda_allowed:
        return Row(
            *pair,
            "skipped",
            "a CUDA build, several GB: --cuda, or torch's CPU index in PIP_EXTRA_INDEX_URL",
        )
    return None


def try_pair(torch: str, triton: str, tests: Iterable[str], timeout: int, folder: Path) -> Row:
    """Installs a pair where that has not been done, and runs the tests."""
    home = folder / f"py{platform.python_version()}-torch{torch}-triton{triton}"
    python = home / "bin" / "python"
    needed = (f"torch=={torch}", f"triton=={triton}", *NEEDED, numpy_for(triton))
    installed = home / "installed.txt"
    if not installed.exists() or installed.read_text() != "\n".join(needed):
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        done = pip(python, "install", "--quiet", "--editable", ".", *needed)
        if done.returncode:
            return Row(torch, triton, "not installed", last_error(done.stderr))
        installed.write_text("\n".join(needed))
    report = home / "tests.xml"
    command = [str(python), "-m", "pytest", "-q", "-m", "not slow", f"--junitxml={report}"]
    start = time.perf_counter()
    report.unlink(missing_ok=True)
    with (home / "tests.log").open("w") as log:
        try:
            subprocess.run([*command, *tests], cwd=ROOT, stdout=log, stderr=log, timeout=timeout)
        except subprocess.TimeoutExpired:
            return Row(torch, triton, "failed", f"no end after {timeout} s")
    row = Row(torch, triton, "failed", seconds=round(time.perf_counter() - start, 1))
    if not report.exists():
        row.why = f"no test ran: see {log.name}"
        return row
    row.passed, row.skipped, failed = counts(report)
    row.status = "failed" if failed or not row.passed else "passed"
    row.why = f"{len(failed)} failed, first {failed[0]}" if failed else ""
    return row


def counts(report: Path) -> tuple[int, int, list[str]]:
    """Tests passed and skipped, and the names of those that failed, of a JUnit report."""
    passed, skipped, failed = 0, 0, []
    for case in ElementTree.parse(report).iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            failed.append(f"{case.get('classname')}::{case.get('name')}")
        elif case.find("skipped") is not None:
            skipped += 1
        else:
            passed += 1
    return passed, skipped, failed


def fingerprint(tests: Iterable[str]) -> str:
    """Of all that a result depends on, beside the versions."""
    digest = hashlib.sha256(" ".join(tests).encode())
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def table(rows: Iterable[Row]) -> str:
    lines = [("torch", "triton", "result", "passed", "skipped", "seconds", "why")]
    for row in rows:
        ran = row.status in ("passed", "failed")
        numbers = (row.passed, row.skipped, row.seconds) if ran else ("", "", "")
        lines.append((row.torch, row.triton, row.status, *map(str, numbers), row.why))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def found(name: str, versions: Iterable[str], rows: list[Row]) -> list[Wheel]:
    """Each version that pip finds, once; of the others, a row."""
    wheels: dict[str, Wheel] = {}
    for version in tqdm(versions, desc=f"looking up {name}", leave=False, disable=None):
        try:
            wheel = look_up(name, version)
        except LookupError as error:
            pair = (version, "any") if name == "torch" else ("any", version)
            rows.append(Row(*pair, "missing", str(error)))
        else:
            wheels[wheel.version] = wheel
    return list(wheels.values())


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--torch", nargs="+", default=TORCH, metavar="VERSION")
    parser.add_argument("--triton", nargs="+", default=TRITON, metavar="VERSION")
    parser.add_argument(
        "--tests", nargs="+", default=[f"tests/test_{name}.py" for name in TESTS], metavar="FILE"
    )
    parser.add_argument("--cuda", action="store_true", help="download CUDA builds too")
    parser.add_argument("--again", action="store_true", help="test what has been tested as well")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for a pair's tests")
    parser.add_argument("--folder", type=Path, default=ROOT / ".matrix")
    arguments = parser.parse_args()

    results = arguments.folder.resolve() / "results.json"
    results.parent.mkdir(parents=True, exist_ok=True)
    sources = fingerprint(arguments.tests)
    passed: dict[tuple[str, str], Row] = {}
    if results.exists() and not arguments.again:
        record = json.loads(results.read_text())
        kept = (Row(**row) for row in record["rows"])
        if record["python"] == platform.python_version():
            passed = {
                (row.torch, row.triton): row
                for row in kept
                if row.status == "passed" and row.sources == sources
            }

    rows: list[Row] = []
    torches = found("torch", arguments.torch, rows)
    tritons = found("triton", arguments.triton, rows)
    pairs = [(torch, triton) for torch in torches for triton in tritons]
    with tqdm(pairs, unit="pair", disable=None) as bar:
        for torch, triton in bar:
            pair = (torch.version, triton.version)
            bar.set_description("torch {}, triton {}".format(*pair))
            row = judge(torch, triton, arguments.cuda) or passed.pop(pair, None)
            if row is None:
                row = try_pair(*pair, arguments.tests, arguments.timeout, results.parent)
                row.sources = sources
            rows.append(row)
            record = {
                "python": platform.python_version(),
                "platform": platform.platform(),
                "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
                "tests": list(arguments.tests),
                "rows": [asdict(row) for row in (*rows, *passed.values())],
            }
            results.write_text(json.dumps(record, indent=1) + "\n")
    print(table(rows))
    print(f"Python {platform.python_version()}; also in {results}")
    sys.exit(int(any(row.status in ("failed", "not installed") for row in rows)))


if __name__ == "__main__":
    main()
