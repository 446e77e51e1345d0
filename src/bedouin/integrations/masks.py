"""Masks as transformers and flash-linear-attention pass them. Letters: b batch, t time."""

from torch import Tensor


def row_mask(
    attention_mask: Tensor | None,  # (b, t) or (b, tokens before + t)
    x: Tensor,  # (b, t, m)
) -> Tensor | None:  # (b, t) bool
    """The columns of a mask of ones and zeros that belong to x, which are the last ones.

    Raises ValueError for another shape.
    """
    if attention_mask is None:
        return None
    b, t = x.shape[:2]
    shape = tuple(attention_mask.shape)
    if len(shape) != 2 or shape[0] != b or shape[1] < t:
        raise ValueError(
            f"attention_mask must have shape (b, t) = {(b, t)}, or more columns with a cache, got "
            f"{shape}: 1 for real tokens, 0 for padding"
        )
    return attention_mask[:, shape[1] - t :].bool()
