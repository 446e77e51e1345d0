"""The built wheel and sdist contain the whole library and nothing else."""

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("src", "kernels", "solvers", "tests", "examples")
FILES = ("pyproject.toml", "Makefile", "README.md", "LICENSE", ".ci/pypi.md")
MAPPING = {"bedouin": "src/bedouin", "bedouin/kernels": "kernels", "bedouin/solvers": "solvers"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel of a copy, so that no old build/lib and no egg-info takes part."""
    copy = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in FOLDERS:
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    (copy / ".ci").mkdir()
    for name in FILES:
        shutil.copy(ROOT / name, copy / name)
    author = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    for arguments in (["init", "-q"], ["add", "--all"], [*author, "commit", "-q", "-m", "copy"]):
        subprocess.run(["git", *arguments], cwd=copy, check=True)
    command = [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy / "dist"


def repository_modules() -> set[str]:
    return {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in MAPPING.items()
        for path in (ROOT / folder).rglob("*.py")
    }


def test_wheel_holds_every_module(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert names == repository_modules() | {"bedouin/py.typed"}


def test_sdist_holds_what_builds_tests_and_trains(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    paths = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.*") if path.is_file()}
    built = {path for path in paths if "__pycache__" in str(path) or ".egg-info" in str(path)}
    wanted = {path.relative_to(ROOT).as_posix() for path in paths - built} | set(FILES)
    assert {"tests/conftest.py", "tests/examples/conftest.py"} <= wanted
    assert wanted <= names
    assert not [name for name in names if "__pycache__" in name]


def test_long_description_needs_no_file_of_the_repository(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith("/METADATA")]
        header, _, text = archive.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in header
    assert text.startswith("# bedouin\n") and "```python\nimport torch\n" in text
    assert not re.findall(r"!\[", text)
    links = re.findall(r"\[[^\]]*\]\(([^)]*)\)", text)
    assert links and all(link.startswith("https://") for link in links)


def test_wheel_runs(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = str(ROOT / "tests" / "smoke_wheel.py")
    start = "import runpy, sys; sys.path.insert(0, sys.argv[1]); runpy.run_path(sys.argv[2], "
    command = [sys.executable, "-I", "-c", start + "run_name='__main__')", str(tmp_path), script]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Bedouin(16) gives (2, 5, 16)" in done.stdout
