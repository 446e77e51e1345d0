"""The names on sys.path, and the direction of imports; the wheel and the sdist contain the whole
library and nothing else."""

import ast
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import bedouin.kernels
import bedouin.solvers

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {
    "bedouin": ROOT / "src" / "bedouin",
    "bedouin.kernels": ROOT / "kernels",
    "bedouin.solvers": ROOT / "solvers",
}
# The parts of bedouin that the modules under a prefix may import; the longest prefix applies.
ALLOWED = {
    "bedouin": ("bedouin",),
    "bedouin.baselines": (
        *("bedouin.baselines", "bedouin.checks", "bedouin.kernels", "bedouin.layers"),
        *("bedouin.packing", "bedouin.state", "bedouin.wrapped"),
    ),
    "bedouin.tasks": ("bedouin.tasks",),
    "bedouin.kernels": ("bedouin.kernels",),
    "bedouin.solvers": ("bedouin.kernels", "bedouin.solvers"),
}
KNOWN_TO_TASKS = sys.stdlib_module_names | {"bedouin", "einops", "torch"}
TORCHDEQ_USER = "bedouin.solvers.torchdeq_adapter"
EXTRAS = (
    *("accelerate", "fla", "huggingface_hub", "liger_kernel", "mamba_ssm", "peft", "transformers"),
)


def is_below(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def dotted(prefix: str, folder: Path, path: Path) -> str:
    parts = path.relative_to(folder).with_suffix("").parts
    return ".".join(part for part in (prefix, *parts) if part and part != "__init__")


def modules() -> list[tuple[str, Path]]:
    """Every module of the library: its dotted name and its file."""
    return [
        (dotted(prefix, folder, path), path)
        for prefix, folder in FOLDERS.items()
        for path in sorted(folder.rglob("*.py"))
    ]


def imports_in(source: str) -> Iterator[str]:
    """Dotted names that `source` imports at any depth; `from a import b` gives a.b.

    A relative import gives a name that starts with a dot.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            start = "." * node.level + (node.module or "")
            yield from (f"{start}.{alias.name}" for alias in node.names)


def misplaced(module: str, imported: str) -> str | None:
    """Why `module` must not import `imported`; None if it may."""
    if imported.startswith(".") or is_below(imported, "kernels") or is_below(imported, "solvers"):
        return "write imports in full, from bedouin"
    if is_below(imported, "torchdeq") and module != TORCHDEQ_USER:
        return f"only {TORCHDEQ_USER} imports torchdeq"
    if not is_below(module, "bedouin.integrations"):
        if is_below(imported, "bedouin.integrations"):
            return "an integration is imported by its users alone"
        # the delta rule may be computed with FLA's operation
        if imported.partition(".")[0] in EXTRAS and module != "bedouin.kernels.delta_rule.fla":
            return "only bedouin.integrations import other libraries"
    if is_below(imported, "bedouin.baselines") and not is_below(module, "bedouin.baselines"):
        return "the library does not import its baselines"
    if is_below(module, "bedouin.tasks") and imported.partition(".")[0] not in KNOWN_TO_TASKS:
        return "tasks import only torch and einops"
    triton_names = (module.rpartition(".")[0] + ".triton_kernels", "triton")
    if module.endswith(".reference") and any(is_below(imported, name) for name in triton_names):
        return "a reference never imports triton"
    layer = max((prefix for prefix in ALLOWED if is_below(module, prefix)), key=len)
    if is_below(imported, "bedouin") and not any(is_below(imported, a) for a in ALLOWED[layer]):
        return f"{layer} may import of bedouin only {', '.join(ALLOWED[layer])}"
    return None


def test_metadata_agrees_with_the_readme() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    language = "Programming Language :: Python :: 3"
    assert {f"{language}.{minor}" for minor in (11, 12, 13)} <= set(project["classifiers"])
    (floor,) = [x for x in project["dependencies"] if x.startswith("torch>=")]
    lowest = floor.removeprefix("torch>=")
    readme = (ROOT / "README.md").read_text()
    assert f"torch ≥ {lowest}" in readme and f"torch {lowest} and 2.13 are tested" in readme


@pytest.mark.parametrize("name", ["kernels", "solvers"])
def test_no_top_level_module_of_ours(name: str) -> None:
    loaded = [module for key, module in sys.modules.items() if is_below(key, name)]
    files = [Path(file).resolve() for m in loaded if (file := getattr(m, "__file__", None))]
    assert not [file for file in files if file.is_relative_to(ROOT / name)]
    assert str(ROOT) not in sys.path


def test_imports_go_one_way() -> None:
    errors = [
        f"{path.relative_to(ROOT)}: {imported}: {reason}"
        for module, path in modules()
        for imported in imports_in(path.read_text())
        if (reason := misplaced(module, imported))
    ]
    assert not errors, "\n".join(errors)


def test_modules_import_each_other_in_no_circle() -> None:
    files = dict(modules())
    graph = {
        module: {
            name if name in files else name.rpartition(".")[0]
            for name in imports_in(path.read_text())
        }
        & files.keys()
        for module, path in files.items()
    }
    assert "bedouin.layers.stages" in graph["bedouin.layers.fixed_point"]
    assert "bedouin.kernels.direct" in graph["bedouin.layers.map"]
    TopologicalSorter(graph).prepare()  # CycleError names the circle


def test_the_mapped_folders_are_the_ones_imported() -> None:
    for module, folder in ((bedouin.kernels, "kernels"), (bedouin.solvers, "solvers")):
        assert Path(str(module.__file__)).resolve() == ROOT / folder / "__init__.py"


COPIED = ("src", "kernels", "solvers", "tests", "examples")
ALSO_COPIED = ("pyproject.toml", "Makefile", "README.md", "LICENSE", ".ci/pypi.md")
MAPPING = {"bedouin": "src/bedouin", "bedouin/kernels": "kernels", "bedouin/solvers": "solvers"}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """sdist and wheel of a copy, so that no old build/lib and no egg-info takes part."""
    copy = tmp_path_factory.mktemp("copy")
    ignore = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in COPIED:
        shutil.copytree(ROOT / name, copy / name, ignore=ignore)
    (copy / ".ci").mkdir()
    for name in ALSO_COPIED:
        shutil.copy(ROOT / name, copy / name)
    author = ["-c", "user.name=test", "-c", "user.email=test@example.invalid"]
    for arguments in (["init", "-q"], ["add", "--all"], [*author, "commit", "-q", "-m", "copy"]):
        subprocess.run(["git", *arguments], cwd=copy, check=True)
    command = [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy / "dist"


@pytest.fixture
def wheel(dist: Path) -> Iterator[zipfile.ZipFile]:
    (path,) = dist.glob("*.whl")
    with zipfile.ZipFile(path) as archive:
        yield archive


def repository_modules() -> set[str]:
    return {
        f"{package}/{path.relative_to(ROOT / folder).as_posix()}"
        for package, folder in MAPPING.items()
        for path in (ROOT / folder).rglob("*.py")
    }


@pytest.mark.slow
def test_wheel_holds_every_module(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == repository_modules() | {"bedouin/py.typed"}


@pytest.mark.slow
def test_sdist_holds_what_builds_tests_and_trains(dist: Path) -> None:
    (sdist,) = dist.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {m.name.partition("/")[2] for m in archive.getmembers() if m.isfile()}
    paths = {path for folder in COPIED for path in (ROOT / folder).rglob("*.*") if path.is_file()}
    built = {path for path in paths if "__pycache__" in str(path) or ".egg-info" in str(path)}
    wanted = {path.relative_to(ROOT).as_posix() for path in paths - built} | set(ALSO_COPIED)
    assert {"tests/conftest.py", "tests/examples/conftest.py"} <= wanted
    assert wanted <= names
    assert not [name for name in names if "__pycache__" in name]


@pytest.mark.slow
def test_long_description_needs_no_file_of_the_repository(wheel: zipfile.ZipFile) -> None:
    (name,) = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    header, _, text = wheel.read(name).decode().partition("\n\n")
    assert "Description-Content-Type: text/markdown" in header
    assert text.startswith("# bedouin\n") and "```python\nimport torch\n" in text
    assert not re.findall(r"!\[", text)
    links = re.findall(r"\[[^\]]*\]\(([^)]*)\)", text)
    assert links and all(link.startswith("https://") for link in links)
