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


def import_everything() -> int:
    """The number of modules that were imported: all but those whose libraries are missing, which
    the wheel does not require: Triton's kernels and adapters."""
    count = 0
    for module in pkgutil.walk_packages(bedouin.__path__, "bedouin.", onerror=refuse):
        try:
            importlib.import_module(module.name)
            count += 1
        except ImportError as error:
            if not lacks_optional_library(error):
                raise
    return count


def refuse(name: str) -> None:
    # walk_packages would pass over a package whose import fails
    try:
        importlib.import_module(name)
    except ImportError as error:
        if not lacks_optional_library(error):
            raise


def lacks_optional_library(error: ImportError) -> bool:
    missing = str(error.name).partition(".")[0]
    return missing in OPTIONAL and importlib.util.find_spec(missing) is None


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
