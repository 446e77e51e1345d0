"""Where the loops of a kernel wait for their loads, read from its machine code.

A warp counts its unfinished loads on one of six counters (scoreboards), and waits until a counter
is zero: for the load that it needs and for every later one on the same counter. A load just before
such a wait is therefore waited for as a whole, whatever it loads.
"""

import re
import subprocess
import tempfile
from pathlib import Path
from typing import NamedTuple

import triton
from triton.compiler import CompiledKernel

NO_SCOREBOARD = 7


class Instruction(NamedTuple):
    """An instruction of compute capability 7 to 9, with a part of its control bits."""

    address: int
    text: str
    scoreboard: int  # that its result is counted on
    waits: int  # the mask of the scoreboards that it waits for


class Wait(NamedTuple):
    """A wait of a loop for loads from global memory."""

    loads: int  # that are waited for
    distance: int  # instructions since the last of them


def cuobjdump(kernel: CompiledKernel, *options: str) -> str:
    """What the tool of this name, which comes with Triton, prints of the kernel."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(kernel.asm["cubin"])
        shown = subprocess.run(
            [tool, *options, file.name], capture_output=True, text=True, check=True
        )
    return shown.stdout + shown.stderr


def instructions(kernel: CompiledKernel) -> list[Instruction]:
    """The machine code. Each instruction has 128 bits, of which bits 110 to 112 name the scoreboard
    and bits 116 to 121 are the mask of waits."""
    words = r"/\*([0-9a-f]{4,})\*/\s+(.*?);\s+/\* 0x[0-9a-f]{16} \*/\s+/\* 0x([0-9a-f]{16}) \*/"
    return [
        Instruction(int(at, 16), text, int(high, 16) >> 46 & 7, int(high, 16) >> 52 & 63)
        for at, text, high in re.findall(words, cuobjdump(kernel, "-sass"))
    ]


def loops(code: list[Instruction], shortest: int) -> list[list[Instruction]]:
    """The loops without loops in them that have at least so many instructions."""
    place = {instruction.address: i for i, instruction in enumerate(code)}
    found = []
    for end, (address, text, _, _) in enumerate(code):
        target = re.search(r"\bBRA\b.*0x([0-9a-f]+)", text)
        start = place.get(int(target[1], 16)) if target else None
        if start is not None and code[start].address < address and end - start >= shortest:
            found.append((start, end + 1))
    inner = [
        (a, b)
        for a, b in found
        if not any(a <= c and d <= b and (c, d) != (a, b) for c, d in found)
    ]
    return [code[start:end] for start, end in inner]


def waits(loop: list[Instruction]) -> list[Wait]:
    """The waits for loads of a pass of the loop, in its order; branches are taken as not taken."""
    found: list[Wait] = []
    pending: dict[int, tuple[int, int]] = {}  # number of loads of a scoreboard, time of the last
    for turn in range(3):  # the last one finds what the ones before have left
        found.clear()
        for i, instruction in enumerate(loop):
            time = turn * len(loop) + i
            for scoreboard in range(6):
                if instruction.waits >> scoreboard & 1 and scoreboard in pending:
                    number, last = pending.pop(scoreboard)
                    found.append(Wait(number, time - last))
            is_load = re.match(r"(@!?U?P\d+\s+)?LDG\b", instruction.text)
            if is_load and instruction.scoreboard != NO_SCOREBOARD:
                number = pending.get(instruction.scoreboard, (0, 0))[0]
                pending[instruction.scoreboard] = number + 1, time
    return found
