"""flash-linear-attention is imported before the tests, in which a warning is an error."""

import warnings
from importlib import import_module
from importlib.util import find_spec

import torch

if torch.cuda.is_available() and find_spec("fla") is not None:
    with warnings.catch_warnings():
        # at its import it warns of packages that it can do without
        warnings.simplefilter("ignore")
        import_module("fla")
