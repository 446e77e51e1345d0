"""Import the installed wheel and run one layer: `make build` does it in an empty environment.

A script, not a test: that environment has the wheel and its dependencies, and no pytest.
"""

import importlib
import importlib.util
import pkgutil
from pathlib import Path

import torch

import bedouin
from bedouin import Bedouin

ROOT = Path(__file__).resolve().parents[1]
OPTIONAL = ("transformers", "triton")


def require_installed() -> None:
    sources = (ROOT / "src", ROOT / "kernels", ROOT / "solvers")
    here = Path(bedouin.__file__).resolve()
    if any(here.is_relative_to(folder) for folder in sources):
        raise RuntimeError(f"expected the installed wheel, got the sources: {here}")


def attempt(name: str) -> bool:
    """Whether a module was imported: not if its library is missing, which the wheel does not
    require: Triton's kernels and adapters."""
    try:
        importlib.import_module(name)
    except ImportError as error:
        missing = str(error.name).partition(".")[0]
        if missing not in OPTIONAL or importlib.util.find_spec(missing) is not None:
            raise
        return False
    return True


def import_everything() -> int:
    """The number of modules that were imported."""
    # walk_packages would pass over a package whose import fails
    modules = pkgutil.walk_packages(bedouin.__path__, "bedouin.", onerror=attempt)
    return sum(attempt(module.name) for module in modules)


def run_layer() -> tuple[int, ...]:
    layer = Bedouin(16)
    y = layer(torch.randn(2, 5, 16))  # (b, t, m)
    y.square().mean().backward()
    if not all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters()):
        raise RuntimeError("a parameter of Bedouin(16) has no finite gradient")
    return tuple(y.shape)


if __name__ == "__main__":
    require_installed()
    count = import_everything()
    shape = run_layer()
    # `make build` shows this line as evidence that the wheel works.
    print(f"wheel: {count} modules imported, Bedouin(16) gives {shape}")  # noqa: T201
