"""Launches that the core of a layer can reach pass through its `Launcher`, or it is told of them.

A tape has what its launcher reports, so that of another launch it would know nothing. The source is
read, because a call takes few of all ways.
"""

import ast
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

import bedouin.kernels

FOLDER, PREFIX = Path(bedouin.kernels.__path__[0]), "bedouin.kernels."

ROOTS = ["core_forward", "core_backward"]

Functions = dict[str, list[ast.FunctionDef]]
"""Functions of modules by their names, of which several modules may have the same."""


@lru_cache
def tree_of(module: str) -> ast.Module:
    path = FOLDER.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text())


def all_functions() -> Functions:
    """Those of the modules of kernels that the core imports, directly or not."""
    found: Functions = {}
    seen, waiting = set(), ["core.forward", "core.backward"]
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        tree = tree_of(module)
        for statement in tree.body:
            if isinstance(statement, ast.FunctionDef):
                found.setdefault(statement.name, []).append(statement)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(PREFIX):
                waiting.append(str(node.module).removeprefix(PREFIX))
    return found


def calls(node: ast.AST) -> Iterator[ast.Call]:
    return (v for v in ast.walk(node) if isinstance(v, ast.Call))


def calls_of(functions: list[ast.FunctionDef]) -> Iterator[ast.Call]:
    return (call for function in functions for call in calls(function))


def is_launch(call: ast.Call) -> bool:
    """Whether it launches a kernel by itself: `kernel[grid](...)` or `KERNEL.launch(...)`."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr == "launch" and ast.unparse(function.value) != "launcher"
    return isinstance(function, ast.Subscript)


def launching(functions: Functions) -> set[str]:
    """The names of functions that launch by themselves, or may call one that does."""
    found = {name for name, many in functions.items() if any(map(is_launch, calls_of(many)))}
    used = {
        name: {v.id for one in many for v in ast.walk(one) if isinstance(v, ast.Name)}
        for name, many in functions.items()
    }
    while True:
        more = {name for name in used if name not in found and not used[name].isdisjoint(found)}
        if not more:
            return found
        found |= more


def takes_launcher(function: ast.FunctionDef) -> bool:
    return any(v.arg == "launcher" for v in (*function.args.args, *function.args.kwonlyargs))


def passes_launcher(call: ast.Call, inside: ast.FunctionDef) -> bool:
    """As an argument, or in a tuple of the function whose entries are arguments."""
    if any(keyword.arg == "launcher" for keyword in call.keywords):
        return True
    given = {v.id for arg in call.args for v in ast.walk(arg) if isinstance(v, ast.Name)}
    holding = {"launcher"}
    for node in ast.walk(inside):
        if isinstance(node, ast.Assign) and "launcher" in ast.unparse(node.value):
            holding |= {v.id for v in ast.walk(node.targets[0]) if isinstance(v, ast.Name)}
    return not given.isdisjoint(holding)


def is_announced(call: ast.Call, inside: ast.FunctionDef) -> bool:
    """Whether the launcher is told before, by a statement beside that of the call."""
    for node in ast.walk(inside):
        for body in (getattr(node, "body", []), getattr(node, "orelse", [])):
            told = False
            for statement in body if isinstance(body, list) else []:
                if told and any(v is call for v in calls(statement)):
                    return True
                told |= ast.unparse(statement) == "launcher.goes_around()"
    return False


def unknown_launches(functions: Functions) -> list[str]:
    """Calls that a launcher is not told of."""
    launches = launching(functions)
    found, seen, waiting = [], set(), list(ROOTS)
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for one in functions[name]:
            for call in calls(one):
                called = call.func.id if isinstance(call.func, ast.Name) else ""
                takers = [takes_launcher(v) for v in functions.get(called, [])]
                if any(takers) and passes_launcher(call, one):
                    waiting.append(called)
                elif any(takers) or called in launches or is_launch(call):
                    if not is_announced(call, one):
                        found.append(f"{name}: {ast.unparse(call)}")
    return found


def test_all_launches_are_known() -> None:
    functions = all_functions()
    assert {"launch_sweep", "launch_head_reverse", "launch_open_sweep", "_replay"} <= set(functions)
    assert unknown_launches(functions) == []


def test_a_launch_that_is_not_known() -> None:
    """Each change to a function of the core, or behind it, is found."""
    for name, before, after in (
        ("core_forward", "launcher=launcher", "max_tokens=3"),
        ("launch_reverse", "launcher.goes_around()", "pass"),
        ("launch_sweep", "launcher.goes_around()", "pass"),
        ("_at_each_token", "return", "clear_kernel[1,](flat)\n    return"),
        ("_raw_with_feedback", "return", "CLEAR.launch((1,), (), (), {})\n    return"),
        ("launch_head_reverse", "launcher)", "AFRESH)"),
    ):
        functions = all_functions()
        (one,) = functions[name]
        source = ast.unparse(one)
        assert before in source
        changed = ast.parse(source.replace(before, after)).body[0]
        assert isinstance(changed, ast.FunctionDef)
        functions[name] = [changed]
        assert unknown_launches(functions), name
