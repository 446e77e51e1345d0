"""`Bidirectional`: two layers that read a sequence from both ends.

Letters: b batch, t time, m d_model.
"""

from typing import Any

from torch import Tensor, nn

from bedouin.checks import check_takes_mask, output_tensor


class Bidirectional(nn.Module):
    """The sum of a layer on x and of another on x reversed in time, (b, t, m) -> (b, t, m).

        layer = Bidirectional(Bedouin(64), Bedouin(64))

    The result of the second layer is reversed back, so that both belong to the same token. With
    padding or documents, the tokens of each row or document are reversed among themselves. There
    is no state and no `step`, because the second layer begins with the last token.

    Args:
        forwards: the layer that reads from the first token on.
        backwards: the layer that reads from the last token on; `forwards` itself shares weights.

    Raises TypeError for arguments that are not modules, ValueError for layers of different d_model.
    """

    def __init__(self, forwards: nn.Module, backwards: nn.Module) -> None:
        super().__init__()
        for name, layer in (("forwards", forwards), ("backwards", backwards)):
            if not isinstance(layer, nn.Module):
                raise TypeError(f"{name} must be a module, got {type(layer).__name__}")
        widths = [getattr(layer, "d_model", None) for layer in (forwards, backwards)]
        if widths[0] != widths[1] and None not in widths:
            raise ValueError(
                f"forwards and backwards must have one d_model, got {widths[0]} and {widths[1]}"
            )
        self.forwards, self.backwards = forwards, backwards

    def forward(
        self,
        x: Tensor,  # (b, t, m)
        *,
        mask: Tensor | None = None,  # (b, t)
        cu_seqlens: Tensor | None = None,  # (documents + 1,)
        seq_idx: Tensor | None = None,  # (b, t)
    ) -> Tensor:  # (b, t, m)
        """mask, cu_seqlens and seq_idx as in `Bedouin`.

        Raises the errors of the layers, and TypeError where one takes no mask and one is given.
        """
        options = {"mask": mask, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        given = {name: value for name, value in options.items() if value is not None}
        if given:
            for layer in (self.forwards, self.backwards):
                check_takes_mask(layer)
        ahead = output_tensor(self.forwards(x, **given))
        # the same for x reversed in time
        behind_options = {
            name: x.shape[1] - value.flip(0) if name == "cu_seqlens" else value.flip(1)
            for name, value in given.items()
        }
        behind = output_tensor(self.backwards(x.flip(1), **behind_options))
        return ahead + behind.flip(1)

    @property
    def stats(self) -> tuple[Any, Any] | None:
        """The `stats` of the last call of both layers; None before any call."""
        both = tuple(getattr(layer, "stats", None) for layer in (self.forwards, self.backwards))
        return None if both == (None, None) else (both[0], both[1])
