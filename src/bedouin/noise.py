"""Where layers draw the noise of `feedback_noise`: in training calls of `forward` alone."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class _OfThread(threading.local):
    def __init__(self) -> None:
        # not of the class: guards of torch.compile expect it among the attributes of the object
        self.is_off = False


_of_thread = _OfThread()


@contextmanager
def without_noise() -> Iterator[None]:
    """Calls inside, single tokens and the prompt of a generation, compute without noise."""
    before = _of_thread.is_off
    _of_thread.is_off = True
    try:
        yield
    finally:
        _of_thread.is_off = before


def draws_noise(layer: Any) -> bool:
    """Whether this call of a layer with `feedback_noise` draws it."""
    return bool(layer.training and layer.feedback_noise and not _of_thread.is_off)
