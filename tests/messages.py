"""Tables of what is refused: what is called, the kind of the error, and its message."""

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest

Row = tuple[Any, type[Exception], str]


def of_kind(kind: type[Exception], rows: Sequence[tuple[Any, str]]) -> list[Row]:
    """Rows of what is wrong, the kind of the error, and its message."""
    return [(wrong, kind, message) for wrong, message in rows]


def of(call: Callable[..., Any], *arguments: Any, **options: Any) -> Callable[[], Any]:
    """A call that is not made yet."""
    return partial(call, *arguments, **options)


def raises(kind: type[Exception], message: str) -> Any:
    """Three dots stand for any text."""
    return pytest.raises(kind, match=re.escape(message).replace(re.escape("..."), ".*"))


def refused(rows: Sequence[Row], *calls: Callable[..., Any]) -> Any:
    """A test of every row: of what each of `calls` gets, options if it is a dictionary; without
    them of the calls that are the rows."""

    @pytest.mark.parametrize("call", calls or [lambda wrong: wrong()])
    @pytest.mark.parametrize(("wrong", "kind", "message"), rows, ids=range(len(rows)))
    def test(wrong: Any, kind: type[Exception], message: str, call: Callable[..., Any]) -> None:
        with raises(kind, message):
            call(**wrong) if isinstance(wrong, dict) else call(wrong)

    return test
