"""DeltaNet and Gated DeltaNet: DeltaProduct with one Householder step a token."""

import torch

from bedouin.checks import check_bool, known_options
from bedouin.kernels.delta_rule import DeltaBackend
from bedouin.kernels.scan import Eigenvalues
from bedouin.layers.delta_product import DeltaProduct


class DeltaNet(DeltaProduct):
    """DeltaNet, (b, t, m) -> (b, t, m): `DeltaProduct` with num_householder = 1.

    Sources: DeltaNet (arXiv 2406.06484) and, where `gated`, Gated DeltaNet (arXiv 2412.06464), with
    the defaults of flash-linear-attention's layers: expand_v is 1 and there is no output gate, or
    with `gated` 2 and a gate, and eigenvalues are in [0, 1]. Other options are those of
    `DeltaProduct`.

    Args:
        expand_v: value channels for each key channel of a head; None: 1, or 2 where `gated`.
        output_gate: whether there is an output gate; None: where `gated`.
    """

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        gated: bool = False,
        eigenvalues: Eigenvalues = "positive",
        num_heads: int = 4,
        head_dim: int | None = None,
        expand_v: float | None = None,
        output_gate: bool | None = None,
        d_conv: int | None = 4,
        conv_bias: bool = False,
        norm_eps: float = 1e-5,
        backend: DeltaBackend = "auto",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_bool("gated", gated)
        default_expand_v = 2.0 if gated else 1.0
        super().__init__(
            d_model,
            num_householder=1,
            gated=gated,
            eigenvalues=eigenvalues,
            num_heads=num_heads,
            head_dim=head_dim,
            expand_v=default_expand_v if expand_v is None else expand_v,
            output_gate=gated if output_gate is None else output_gate,
            d_conv=d_conv,
            conv_bias=conv_bias,
            norm_eps=norm_eps,
            backend=backend,
            device=device,
            dtype=dtype,
        )
