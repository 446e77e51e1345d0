"""Build the reference pages, with the README as their first page.

    python docs/reference.py build/docs         # make docs

Needs pdoc (`pip install ".[docs]"`). The pages are made from the docstrings of the public names, of
the operations of `bedouin.kernels` and of the classes from which public ones inherit.
"""

import importlib
import inspect
import pkgutil
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
OPTION_GROUPS = ["Size", "Recurrence", "Feedback", "Solve", "Precision"]
"""The headings of options in the docstrings of layers."""
PUBLIC = "bedouin", "bedouin.solvers", "bedouin.kernels", "bedouin.baselines", "bedouin.tasks"


def operations() -> list[str]:
    """The packages of `bedouin.kernels` with a list of public names."""
    kernels = importlib.import_module("bedouin.kernels")
    found = pkgutil.iter_modules(kernels.__path__, "bedouin.kernels.")
    packages = [importlib.import_module(module.name) for module in found if module.ispkg]
    return [package.__name__ for package in packages if hasattr(package, "__all__")]


def public_names() -> list[tuple[str, str]]:
    """Every public name as the pair of its module and itself."""
    modules = [importlib.import_module(name) for name in (*PUBLIC, *operations())]
    return [(module.__name__, name) for module in modules for name in exported(module)]


def exported(module: ModuleType) -> list[str]:
    names: list[str] = getattr(module, "__all__", [])
    return names


def base_modules() -> list[str]:
    """The modules of the classes of this library from which public classes inherit."""
    public = [getattr(sys.modules[module], name) for module, name in public_names()]
    bases = {base for cls in public if inspect.isclass(cls) for base in inspect.getmro(cls)[1:]}
    return sorted(
        {
            base.__module__
            for base in bases - {cls for cls in public if inspect.isclass(cls)}
            if base.__module__.startswith("bedouin.") and not base.__name__.startswith("_")
        }
    )


def first_page(folder: Path) -> str:
    """The README, whose figures are copied to the folder and whose other links lead to the
    repository."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"(?<=\]\()(?!https?:|#)[^)]+", text):
        if target.endswith((".png", ".svg")):
            shutil.copy(ROOT / target, folder)
            text = text.replace(f"]({target})", f"]({Path(target).name})")
        else:
            text = text.replace(f"]({target})", f"]({(ROOT / target).as_uri()})")
    return text


def build(folder: Path) -> None:
    """Write the pages to the folder."""
    from pdoc import doc, docstrings, render

    folder.mkdir(parents=True, exist_ok=True)
    render.configure(
        docformat="google",
        include_undocumented=False,
        template_directory=ROOT / "docs" / "templates",
    )
    docstrings.GOOGLE_LIST_SECTIONS += OPTION_GROUPS
    render.env.globals["readme"] = first_page(folder)
    names = dict.fromkeys((*PUBLIC, *operations(), *base_modules()))
    modules = {name: doc.Module(importlib.import_module(name)) for name in names}
    for name, module in modules.items():
        path = folder / f"{name.replace('.', '/')}.html"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(render.html_module(module, modules), encoding="utf-8")
    (folder / "index.html").write_text(render.html_index(modules), encoding="utf-8")
    (folder / "search.js").write_text(render.search_index(modules), encoding="utf-8")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
