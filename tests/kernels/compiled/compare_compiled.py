"""Compiles every Triton kernel of a checkout for sm_90 and compares two checkouts; needs no GPU.

cd tests/kernels/compiled
python compare_compiled.py dump --tree BEFORE --out before.json
python compare_compiled.py dump --tree AFTER --out after.json
python compare_compiled.py compare before.json after.json --rename old_kernel=new_kernel

`dump` makes the calls of `compiled_cases` with meta tensors that the library takes for tensors on
an H100, records the launches instead of running them, compiles each specialization once, and writes
its size, registers, stack, shared memory and a hash of its instructions. Signatures and constants
come from the launches, so kernels, files and arguments may have other names in the other checkout.
`--quick` makes the small calls with default options only, `--only TEXT` those whose name contains
TEXT; `--sass FOLDER` keeps the instructions as text, for diff.

Two launches match if kernel, constants and types of the arguments are the same, and otherwise by
their code: then the kernel or its arguments have another name, which is reported but is no
difference. The hash does not depend on where in the constant bank an argument lies, so arguments
may change places. `--rename` is for a kernel whose name and code changed; MODULE.OLD tells apart
kernels of one name. Both files must come from the same Triton and ptxas. The exit status of
`compare` is 1 if a launch differs or has no counterpart.
"""

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from compiled_cases import CASES, QUICK, Case
from recorded_launches import TARGET, Launch, capture
from triton.compiler import ASTSource

ARGUMENTS = 0x210
"""Where a kernel's arguments begin in constant bank 0 on sm_90."""

SIZES = ("instructions", "registers", "stack", "spills", "shared")

Entry = dict[str, Any]

INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;?\s*/\* (0x[0-9a-f]{16}) \*/$", re.M)
ENCODING = re.compile(r"/\* (0x[0-9a-f]{16}) \*/")
CONSTANT = re.compile(r"c\[0x0\]\[(0x[0-9a-f]+)\]")


def disassemble(cubin: bytes) -> str:
    """Resource usage and instructions, by the tool that comes with Triton."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def normalize(sass: str, name: str) -> list[str]:
    """Instructions without the kernel's name, arguments numbered as they are first read."""
    order: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        offset = match[1]
        if int(offset, 16) < ARGUMENTS:
            return match[0]
        return order.setdefault(offset, f"argument[{len(order)}]")

    lines = [match[1].replace(name, "KERNEL") for match in INSTRUCTION.finditer(sass)]
    while lines and lines[-1] == "NOP":
        lines.pop()
    return [CONSTANT.sub(number, line) for line in lines]


def digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def measure(launch: Launch) -> tuple[Entry, str]:
    """Compile; what is compared, and the instructions as text."""
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    compiled = triton.compile(source, target=TARGET, options=launch.options.__dict__)
    sass = disassemble(compiled.asm["cubin"])
    lines = normalize(sass, compiled.metadata.name)
    return {
        "kernel": launch.kernel.fn.__name__,
        "module": launch.kernel.fn.__module__,
        "options": launch.text,
        "cases": launch.cases,
        "instructions": len(lines),
        "registers": int(re.findall(r"REG:(\d+)", sass)[0]),
        "stack": int(re.findall(r"STACK:(\d+)", sass)[0]),
        "spills": sum(bool(re.search(r"\b(LDL|STL)\b", line)) for line in lines),
        "shared": compiled.metadata.shared,
        "hash": digest("\n".join(lines)),
        "encoding": digest("\n".join(ENCODING.findall(sass))),
    }, "\n".join(lines)


# -- commands


def link_tree(tree: Path, at: Path) -> None:
    """Make `import bedouin` mean the checkout's: its three folders are one package."""
    package = at / "bedouin"
    package.mkdir()
    for source in [*(tree / "src" / "bedouin").iterdir(), tree / "kernels", tree / "solvers"]:
        (package / source.name).symlink_to(source.resolve())
    sys.path.insert(0, str(at))


_LAUNCHES: list[Launch] = []
"""For the processes forked from this one: a launch cannot be sent to them."""


def _measure_at(index: int) -> tuple[Entry, str, float]:
    start = sum(os.times()[:4])
    return *measure(_LAUNCHES[index]), sum(os.times()[:4]) - start


def dump(tree: Path, out: Path, cases: dict[str, Case], jobs: int, sass: Path | None) -> None:
    """Compile what the checkout launches, and write `out`."""
    os.environ.pop("TRITON_INTERPRET", None)  # read when a kernel is defined
    entries: list[Entry] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "cache")
        link_tree(tree, Path(folder))
        _LAUNCHES[:] = capture(cases)
        with multiprocessing.get_context("fork").Pool(jobs) as pool:
            for entry, text, seconds in pool.imap(_measure_at, range(len(_LAUNCHES))):
                entries.append(entry)
                say(f"{len(entries)}/{len(_LAUNCHES)} {seconds:.1f} s of CPU: {describe(entry)}")
                if sass is not None:
                    sass.mkdir(parents=True, exist_ok=True)
                    (sass / f"{entry['kernel']}-{digest(entry['options'])}.txt").write_text(text)
    versions = {"triton": triton.__version__, "ptxas": triton.knobs.nvidia.ptxas.version}
    out.write_text(json.dumps({"versions": versions, "entries": entries}, indent=1) + "\n")


def describe(entry: Entry) -> str:
    numbers = ", ".join(f"{entry[name]} {name}" for name in SIZES)
    return f"{entry['module']}.{entry['kernel']}: {numbers} [{'; '.join(entry['cases'])}]"


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201


def compare(before: list[Entry], after: list[Entry], renames: dict[str, str]) -> bool:
    """Report what differs; whether nothing does."""
    names = [_renamed(entry, renames) for entry in before]
    left = [entry | {"kernel": name} for entry, name in zip(before, names, strict=True)]
    pairs, left, right = _match(left, after, ("kernel", "options"))
    differing = [pair for pair in pairs if pair[0]["hash"] != pair[1]["hash"]]
    same = [pair for pair in pairs if pair[0]["hash"] == pair[1]["hash"]]
    # several launches may have become one, so any launch with the same code will do
    codes = {entry["hash"]: entry for entry in before}, {entry["hash"]: entry for entry in after}
    moved = [(entry, codes[1][entry["hash"]]) for entry in left if entry["hash"] in codes[1]]
    moved += [(codes[0][entry["hash"]], entry) for entry in right if entry["hash"] in codes[0]]
    left = [entry for entry in left if entry["hash"] not in codes[1]]
    right = [entry for entry in right if entry["hash"] not in codes[0]]
    changed, left, right = _match(left, right, ("kernel", "cases"))
    for a, b in moved:
        say(f"same code under another name or with other arguments: {describe(a)} -> {_name(b)}")
    for a, b in [*differing, *changed]:
        sizes = ", ".join(f"{name} {a[name]} -> {b[name]}" for name in SIZES)
        say(f"DIFFERS: {_name(b)}: {sizes} [{'; '.join(a['cases'])}]\n  {a['options']}")
        if a["options"] != b["options"]:
            say(f"  -> {b['options']}")
    for only, entries in (("BEFORE", left), ("AFTER", right)):
        for entry in entries:
            say(f"ONLY {only}: {describe(entry)}\n  {entry['options']}")
    elsewhere = sum(a["encoding"] != b["encoding"] for a, b in [*same, *moved])
    say(
        f"{len(same)} the same, {len(moved)} under another name, {len(differing) + len(changed)} "
        f"differ, {len(left)} only before, {len(right)} only after; of the same, {elsewhere} have "
        "arguments in other places or another schedule"
    )
    return not (differing or changed or left or right)


def _match(
    left: list[Entry], right: list[Entry], keys: tuple[str, ...]
) -> tuple[list[tuple[Entry, Entry]], list[Entry], list[Entry]]:
    """Pairs that agree in all keys, those of equal code first, and what is left of both."""
    pairs: list[tuple[Entry, Entry]] = []
    for wanted in ((*keys, "hash"), keys):
        alone = []
        for a in left:
            found = next((b for b in right if all(a[key] == b[key] for key in wanted)), None)
            if found is None:
                alone.append(a)
                continue
            pairs.append((a, found))
            right = [b for b in right if b is not found]
        left = alone
    return pairs, left, right


def _name(entry: Entry) -> str:
    return f"{entry['module']}.{entry['kernel']}"


def _renamed(entry: Entry, renames: dict[str, str]) -> str:
    for old, new in renames.items():
        if f".{_name(entry)}".endswith(f".{old}"):
            return new
    return str(entry["kernel"])


def read(before: Path, after: Path) -> tuple[list[Entry], list[Entry]]:
    a, b = (json.loads(path.read_text()) for path in (before, after))
    if a["versions"] != b["versions"]:
        raise ValueError(
            f"{before} and {after} must come from the same compilers, got {a['versions']} and "
            f"{b['versions']}: dump both trees on one machine"
        )
    return a["entries"], b["entries"]


def main() -> int:
    parser = argparse.ArgumentParser(description="Compiled kernels of two checkouts.")
    commands = parser.add_subparsers(dest="command", required=True)
    dumping = commands.add_parser("dump")
    dumping.add_argument("--tree", type=Path, required=True)
    dumping.add_argument("--out", type=Path, required=True)
    dumping.add_argument("--quick", action="store_true", help="small sizes and default options")
    dumping.add_argument("--only", default="", help="calls whose name has this in it")
    dumping.add_argument("--jobs", type=int, default=1, help="processes that compile")
    dumping.add_argument("--sass", type=Path, help="folder for the instructions as text")
    comparing = commands.add_parser("compare")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--rename", action="append", default=[], metavar="[MODULE.]OLD=NEW")
    given = parser.parse_args()
    if given.command == "dump":
        chosen = QUICK if given.quick else CASES
        cases = {name: case for name, case in chosen.items() if given.only in name}
        dump(given.tree, given.out, cases, given.jobs, given.sass)
        return 0
    renames = dict(rename.split("=", 1) for rename in given.rename)
    return 0 if compare(*read(given.before, given.after), renames) else 1


if __name__ == "__main__":
    sys.exit(main())
