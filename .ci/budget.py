"""The size of the code against its budget: lines and statements by folder, long files, functions of
many parameters, options of the layers. `make lint` runs it; it prints a table and fails beyond a
limit.

A limit is what a folder may have at most. It is lowered when code goes, and raised only with a
reason in the change that needs it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[1]

LINES = {"kernels": 9_990, "solvers": 1_670, "src": 8_920, "tests": 19_000, "examples": 8_500}
"""Most lines of Python of a folder."""

PRODUCT = "kernels", "solvers", "src"
PRODUCT_LINES = 20_500
"""Most lines of these folders together, less than the sum of their limits."""

LONGEST_FILE = 500
"""Most lines of a file of the product."""

MOST_PARAMETERS = 12
"""Of a function, but for constructors, kernels of Triton, whose parameters are pointers and numbers
one by one, and methods `forward`, whose parameters transformers determines."""

OPTIONS = {"Bedouin": 23, "FixedPointRNN": 20}
"""Most options of a layer, without d_model, layer_idx, device and dtype."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """A file of Python."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        self.name = str(path.relative_to(ROOT))
        self.lines, self.nodes = len(text.splitlines()), list(ast.walk(ast.parse(text)))

    @property
    def statements(self) -> int:
        """Statements but docstrings."""
        found = [node for node in self.nodes if isinstance(node, ast.stmt)]
        text = [v for v in found if isinstance(v, ast.Expr) and isinstance(v.value, ast.Constant)]
        return len(found) - len(text)


def sources_of(folder: str) -> list[Source]:
    """The files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", f"{folder}/*.py"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    paths = (ROOT / name for name in sorted(set(listed.split())))
    return [Source(path) for path in paths if path.exists()]


def parameters_of(function: Function) -> list[str]:
    arguments = function.args
    every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return [v.arg for v in every]


def breaches(source: Source) -> Iterator[str]:
    """What a file of the product has too much of."""
    if source.lines > LONGEST_FILE:
        yield f"{source.name} has {source.lines} lines, more than {LONGEST_FILE}"
    for node in source.nodes:
        if isinstance(node, ast.ClassDef) and node.name in OPTIONS:
            made = [v for v in node.body if isinstance(v, Function) and v.name == "__init__"]
            places = {"self", "d_model", "layer_idx", "device", "dtype"}
            options = [name for v in made for name in parameters_of(v) if name not in places]
            if len(options) > OPTIONS[node.name]:
                yield f"{node.name} has {len(options)} options, more than {OPTIONS[node.name]}"
        if isinstance(node, Function) and node.name not in ("__init__", "forward"):
            is_kernel = any("triton.jit" in ast.unparse(v) for v in node.decorator_list)
            count = len(parameters_of(node))
            if count > MOST_PARAMETERS and not is_kernel:
                yield f"{source.name}:{node.lineno} {node.name} has {count} parameters"


def main() -> int:
    found: list[str] = []
    total = 0
    rows = [["folder", "lines", "limit", "statements", "files", "median"]]
    for folder, limit in LINES.items():
        sources = sources_of(folder)
        lines, middle = sum(v.lines for v in sources), median(v.lines for v in sources)
        numbers = lines, limit, sum(v.statements for v in sources), len(sources), round(middle)
        rows.append([folder, *map(str, numbers)])
        if lines > limit:
            found.append(f"{folder} has {lines} lines, more than {limit}")
        if folder in PRODUCT:
            total += lines
            found += [breach for source in sources for breach in breaches(source)]
    rows.append(["product", str(total), str(PRODUCT_LINES)])
    if total > PRODUCT_LINES:
        found.append(f"the product has {total} lines, more than {PRODUCT_LINES}")
    table = ["".join(f"{cell:>12}" for cell in row) for row in rows]
    sys.stdout.write("\n".join(table) + "\n")
    sys.stderr.write("".join(f"over budget: {breach}\n" for breach in found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
