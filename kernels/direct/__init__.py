"""The exact solve: local equation, direct sweep, reverse sweep.

`local`         the equation of one token
`reference`     the sweep over all tokens in plain torch, for every mixer: the specification
`reverse`       its adjoint, likewise
`autograd`      both as a differentiable function, for custom mixers and transforms of torch.func
`cpu`           both for Householder layouts in plain torch, with few calls for each token
`registered`    `cpu` and the kernels as operations of torch.library
`launch`        Triton kernels for heads of at most 1,024 channels with 16 states: `triton_forward`
                and `triton_reverse`, whose programs hold the memory of a few samples, and
                `triton_prepare` for what y alone determines; heads of more than 128 channels with
                feedback take a launch and a product of cuBLAS for each token

Letters: b batch, t time, d channels, n state per channel, r raw values.
"""

import torch
from torch import Tensor

from bedouin.kernels.backend import Backend, is_transformed
from bedouin.kernels.direct.autograd import loop_sweep, uncompiled_sweep
from bedouin.kernels.direct.layout import is_covered
from bedouin.kernels.direct.limits import choose_sweep
from bedouin.kernels.direct.local import (
    LocalFactors,
    factor_local,
    smallest_pivot,
    solve_local,
    solve_local_transposed,
)
from bedouin.kernels.direct.reference import (
    Sweep,
    direct_sweep_reference,
    gain_gap,
    input_gain,
)
from bedouin.kernels.direct.registered import sweep_operation
from bedouin.kernels.direct.reverse import ReportBackward
from bedouin.kernels.operands import Bind, Operands, Parameterization

__all__ = [
    "LocalFactors",
    "ReportBackward",
    "Sweep",
    "direct_sweep",
    "direct_sweep_reference",
    "factor_local",
    "gain_gap",
    "input_gain",
    "smallest_pivot",
    "solve_local",
    "solve_local_transposed",
]


def direct_sweep(
    operands: Operands,
    parameterization: Parameterization,
    bind: Bind | None = None,
    bind_parameters: tuple[Tensor, ...] = (),
    *,
    y_star: Tensor | None = None,  # (b, t, d)
    report: ReportBackward | None = None,
    backend: Backend = "auto",
) -> Sweep:
    """The exact fixed point with the exact implicit gradient.

    `bind` computes the coefficients from raw values and `bind_parameters`, which get gradients;
    None: the layout of the parameterization describes it. With `y_star`, a fixed point found
    elsewhere, nothing is solved: the result is y_star with that gradient (the
    statistics are then zero). `report` gets defect and scale of the adjoint equation, but not under
    torch.compile, whose graphs call no Python functions. There the sweep is one operation if the
    parameterization has a layout, else it runs outside of the graph; torch.export writes a single
    token out.
    With several heads the batch is head by head, as `Operands` says. `limits` says what the Triton
    kernels take; raises ValueError where `backend="triton"` cannot run, or heads and batch do not
    fit.
    Once differentiable. Saves O(b t (d + r)) and h at every CHUNK-th token. Without a layout, and
    under transforms of torch.func, the backward is autograd through one chunk of tokens after the
    other.
    """
    operands.check()
    plain = choose_sweep(backend, operands, parameterization, bind_parameters) == "reference"
    if plain:
        if torch.compiler.is_exporting() and operands.x.shape[1] == 1 and y_star is None:
            # in elementary operations, so that other runtimes can decode
            return direct_sweep_reference(operands, parameterization, bind, bind_parameters)
        covered = is_covered(parameterization.layout, operands.raw, operands.A, bind_parameters)
        if not covered or is_transformed():
            sweep_by_loop = uncompiled_sweep if torch.compiler.is_compiling() else loop_sweep
            return sweep_by_loop(operands, parameterization, bind, bind_parameters, y_star, report)
    y, h, _, statistics = sweep_operation(*operands, y_star, *parameterization.scalars(), plain)
    if report is not None and not torch.compiler.is_compiling() and y.grad_fn is not None:
        # an operation takes no functions: the backward finds this one on its node
        y.grad_fn.report = report
    return Sweep(y, h, *statistics.unbind())
