"""The built wheel and sdist hold the library, all of it, and nothing else."""

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = ("src", "kernels", "solvers", "pyproject.toml", "README.md", "LICENSE")
MAPPING = {"bedouin": "src/bedouin", "bedouin/kernels": "kernels", "bedouin/solvers": "solvers"}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel of a copy, so that no old build/lib and no egg-info takes part."""
    copy = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, copy / name, ignore=ignore)
        else:
            shutil.copy(source, copy / name)
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


def test_sdist_holds_every_source(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path for folder in MAPPING.values() for path in (ROOT / folder).rglob("*.py")}
    wanted = {path.relative_to(ROOT).as_posix() for path in sources}
    assert wanted | {"pyproject.toml", "README.md", "LICENSE", "src/bedouin/py.typed"} <= names


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
