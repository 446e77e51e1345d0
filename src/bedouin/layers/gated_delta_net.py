"""Gated DeltaNet with slow decay: the memories of `TrackingDeltaNet`, and a layer of its own.

Letters: b batch, t time, m d_model, h heads, p key channels and v value channels of a head.
"""

import math

import torch

from bedouin.checks import check_layer_idx, known_options, positive_int
from bedouin.kernels.delta_rule import DeltaBackend
from bedouin.layers.delta_net import DeltaNet

HEAD_DIM = 128
"""Most key channels of a head that is not told how many to have."""

SLOW_RATES = 0.01
"""Factor on the usual initial decay rates: memories that forget less at first learn associative
recall (examples/results/table)."""


class GatedDeltaNet(DeltaNet):
    """Gated DeltaNet, (b, t, m) -> (b, t, m), with eigenvalues in [-1, 1] and slow initial decay.

        S_t = e^{g_t} (I - beta_t k_t k_t^T) S_{t-1} + beta_t k_t v_t^T,   o_t = S_t^T q_t / sqrt(p)
        out = out_proj(norm(o) * SiLU(g_proj(x)))

    with q, k, v = SiLU(conv(proj(x))), q and k of unit length, beta = 2 sigmoid(b_proj(x)) and
    g = -exp(A_log) softplus(a_proj(x) + dt_bias) for each head, whose rates exp(A_log) begin at a
    hundredth of the usual ones. Sources: Gated DeltaNet (arXiv 2412.06464), and for eigenvalues
    below 0 Grazzi et al. (2411.12537).

    Args:
        num_heads: h; None: d_model // head_dim.
        head_dim: p; None: d_model // num_heads, or without num_heads min(128, d_model // 2).
        expand_v: v is expand_v * p.
        d_conv: width of the short convolution; None: no convolution, SiLU stays.
        norm_eps: of the norm of each head's outputs.
        backend: of the delta rule, as in `bedouin.baselines.DeltaProduct`.
        layer_idx: kept as an attribute, as users of transformers expect.

    Raises TypeError or ValueError for options of another type or out of range.
    """

    captures_step = True

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        num_heads: int | None = None,
        head_dim: int | None = None,
        expand_v: float = 2,
        d_conv: int | None = 4,
        norm_eps: float = 1e-5,
        backend: DeltaBackend = "auto",
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        num_heads, head_dim = choose_heads(d_model, num_heads, head_dim)
        super().__init__(
            d_model,
            gated=True,
            eigenvalues="full",
            num_heads=num_heads,
            head_dim=head_dim,
            expand_v=expand_v,
            d_conv=d_conv,
            norm_eps=norm_eps,
            backend=backend,
            device=device,
            dtype=dtype,
        )
        self.layer_idx = check_layer_idx(layer_idx)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            self.A_log.add_(math.log(SLOW_RATES))


def choose_heads(d_model: int, num_heads: int | None, head_dim: int | None) -> tuple[int, int]:
    """The heads and their key channels; what is None is chosen so that they fill d_model.

    Raises TypeError or ValueError for a value that is no positive int.
    """
    positive_int("d_model", d_model)
    if num_heads is not None:
        positive_int("num_heads", num_heads, " or None")
    if head_dim is not None:
        positive_int("head_dim", head_dim, " or None")
    elif num_heads is not None:
        head_dim = max(1, d_model // num_heads)
    else:
        head_dim = max(1, min(HEAD_DIM, d_model // 2))
    return max(1, d_model // head_dim) if num_heads is None else num_heads, head_dim
