"""Mamba: a selective diagonal state-space model.

Letters: b batch, t time, m d_model, d d_inner, n d_state, r dt_rank, w convolution width.
"""

import math
from collections import namedtuple
from typing import Any, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin.checks import check_bool, known_options, one_of, positive_int
from bedouin.kernels.backend import Backend, check_backend, without_autocast
from bedouin.kernels.scan import Eigenvalues, selective_scan
from bedouin.layers import common
from bedouin.layers.convolution import ShortConvolution
from bedouin.packing import tokens_before, zero_outside
from bedouin.state import RecurrentState, StateShapes
from bedouin.wrapped import is_untouched


class MambaState(RecurrentState, namedtuple("_MambaState", "conv ssm")):  # type: ignore[misc]
    """conv: (b, w - 1, d), the last inputs of the convolution; ssm: (b, d, n); at least float32."""

    __slots__ = ()
    axes = (2, 2)


class _DeltaProjection(nn.Linear):
    """The linear map to Delta. Its bias is marked `_no_reinit`; the module itself keeps that mark,
    because `load_state_dict(assign=True)` replaces parameters one module at a time."""

    __setattr__, __setstate__ = common.set_attribute, common.set_state
    _apply = common.apply_to_parameters

    def reset_parameters(self) -> None:
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        common.reset_dt_bias(self.bias)

    def _mark_parameters(self) -> None:
        common.mark(self, "_no_reinit", "bias")


class Mamba(common.RecurrentLayer[MambaState]):
    """Mamba-1's block on Bedouin's selective scan, (b, t, m) -> (b, t, m).

        x, z = in_proj(u);  x = SiLU(conv(x));  dt, B, C = x_proj(x);  Delta = softplus(dt_proj(dt))
        h_t = lambda_t * h_{t-1} + (Delta_t * x_t) B_t^T,  lambda_t = exp(-exp(A_log) Delta_t)
        out = out_proj(SiLU(z) * (h C + D * x))

    Source: Mamba (arXiv 2312.00752); parameters, their names and initial values are the authors'.

    Args:
        expand: d_inner is expand * d_model.
        d_conv: width of the short convolution; None: no convolution, SiLU stays.
        dt_rank: rank of the projection to Delta; None: ceil(d_model / 16).
        eigenvalues: "positive": lambda in [0, 1]; "full": 2 lambda - 1 in [-1, 1] (2411.12537).
        backend: implementation of the scan: "auto", "triton" or "reference".
    """

    state_type = MambaState
    saved_options = ("eigenvalues",)
    shown_options = ("d_inner", "d_state", "dt_rank", "eigenvalues")

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        d_conv: int | None = 4,
        expand: float = 2,
        dt_rank: int | None = None,
        eigenvalues: Eigenvalues = "positive",
        conv_bias: bool = True,
        bias: bool = False,
        backend: Backend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(d_model, dtype)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        check_bool("bias", bias)
        check_backend(backend)
        self.eigenvalues = one_of("eigenvalues", eigenvalues, get_args(Eigenvalues))
        self.backend, self.d_state = backend, positive_int("d_state", d_state)
        default_rank = math.ceil(d_model / 16)
        self.dt_rank = default_rank if dt_rank is None else positive_int("dt_rank", dt_rank)
        d = self.d_inner = common.expanded("expand", expand, "d_model", d_model)
        self.in_proj = nn.Linear(d_model, 2 * d, bias=bias, **factory)
        self.conv = ShortConvolution(d, d_conv, bias=conv_bias, **factory)
        self.x_proj = nn.Linear(d, self.dt_rank + 2 * d_state, bias=False, **factory)
        self.dt_proj = _DeltaProjection(self.dt_rank, d, **factory)
        self.A_log = nn.Parameter(torch.empty(d, d_state, **factory))
        self.D = nn.Parameter(torch.empty(d, **factory))
        self.out_proj = nn.Linear(d, d_model, bias=bias, **factory)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for module in (self.in_proj, self.conv, self.x_proj, self.out_proj, self.dt_proj):
            module.reset_parameters()
        with torch.no_grad():
            n = torch.arange(1, self.d_state + 1, device=self.D.device)
            self.A_log.copy_(common.at_least_float32(n).log().expand_as(self.A_log))
            self.D.fill_(1.0)
        self._mark_parameters()

    def _mark_parameters(self) -> None:
        common.mark(self, "_no_weight_decay", "A_log", "D")

    def _state_sizes(self) -> StateShapes:
        return {"conv": self.conv.window_size, "ssm": (self.d_inner, self.d_state)}

    def _run(
        self, x: Tensor, state: MambaState, lengths: Tensor | None
    ) -> tuple[Tensor, MambaState]:  # (b, t, m), (b,) -> (b, t, m)
        x, z = self.in_proj(x).chunk(2, -1)
        x, window = self.conv(x, state.conv, lengths)
        x = F.silu(x)
        n = self.d_state
        dt, B, C = self.x_proj(x).split([self.dt_rank, n, n], -1)
        raw, bias = self._project_dt(dt)
        with without_autocast(x.device):
            raw = common.at_least_float32(raw)
            delta = F.softplus(raw if bias is None else raw + common.at_least_float32(bias))
            if lengths is not None:
                # the memory passes through padding
                delta = zero_outside(tokens_before(lengths, x.shape[1]), delta)
            A = -torch.exp(common.at_least_float32(self.A_log))
            options: Any = {"eigenvalues": self.eigenvalues, "backend": self.backend}
            y, ssm = selective_scan(x, delta, A, B, C, state.ssm, self.D, **options)
        return self.out_proj(y.to(z.dtype) * F.silu(z)), MambaState(window, ssm)

    def _project_dt(self, dt: Tensor) -> tuple[Tensor, Tensor | None]:  # (b, t, r) -> (b, t, d)
        """dt_proj(dt), and its bias (d,), added in float32; None where a changed module adds it."""
        proj = self.dt_proj
        if type(proj) is _DeltaProjection and is_untouched(proj):
            return F.linear(dt, proj.weight), proj.bias
        return proj(dt), None
