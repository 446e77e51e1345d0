"""The feedback of one token, raw^x + W^y norm(y), in memory that is allocated once.

Letters: b batch, t time, d channels, f raw values with feedback, F rows of W^y, f or with feedback
of x f + d, H heads (kernels/heads.py), whose samples are an axis of their own here: (H, b / H, ...)
stands for (b, ...) where W^y has heads.
"""

import torch
from torch import Tensor

from bedouin.kernels.linear import weight_gradient
from bedouin.kernels.norms import overflow_to_nan_
from bedouin.kernels.operands import Parameterization


class Feedback:
    """Products with W^y and its transpose, computed in the dtype of W^y as everywhere."""

    def __init__(
        self,
        W_y: Tensor,  # (F, d) or (H, F, d)
        options: Parameterization,
        like: Tensor,  # (b, 1, d)
    ) -> None:
        """`like` gives the shape and the dtype of y."""
        (b, _, d), (H, F) = like.shape, (W_y.shape[:-2].numel(), W_y.shape[-2])
        eps, self.feeds_x = options.feedback_norm_eps, options.feeds_x
        self.num_heads, self.has_heads, self.has_norm = H, W_y.dim() == 3, eps is not None
        self.vector, self.normed = like.new_empty(b, 1, d), like.new_empty(b, 1, d)
        self.vector_by_head, self.normed_by_head = map(self.by_head, (self.vector, self.normed))
        self.norm, self.eps = like.new_empty(b, 1, 1), like.new_full((1, 1, 1), eps or 0.0)
        self.copies = self.feeds_x or W_y.dtype != like.dtype
        self.W_y, self.W_columns = W_y, W_y.mT
        if self.copies:
            self.own_vector, self.own_raw = (self.by_head(W_y.new_empty(b, 1, v)) for v in (d, F))

    def by_head(
        self,
        v: Tensor,  # (b, 1, c)
    ) -> Tensor:  # (b, c) or (H, b / H, c)
        """v as the products with W^y take it."""
        v = v.squeeze(1)
        return v.unflatten(0, (self.num_heads, -1)) if self.has_heads else v

    def add(
        self,
        y: Tensor,  # (b, 1, d)
        raw: Tensor,  # (b, f) or (H, b / H, f), overwritten
        x: Tensor,  # (b, d) or (H, b / H, d), with feedback of x overwritten
    ) -> None:
        """raw^x + W^y norm(y), and x^."""
        if self.has_norm:
            norm = torch.linalg.vector_norm(y, 2, -1, True, out=self.norm)
            torch.addcmul(self.eps, norm, norm, value=1 / y.shape[-1], out=norm)
            overflow_to_nan_(norm).rsqrt_()
            torch.mul(y, norm, out=self.normed)
        else:
            self.normed.copy_(y)
        if self.copies:
            self.own_vector.copy_(self.normed_by_head)
            fed = torch.matmul(self.own_vector, self.W_columns, out=self.own_raw)
            raw.add_(fed[..., : raw.shape[-1]])
            if self.feeds_x:
                x.add_(fed[..., raw.shape[-1] :])
        elif self.has_heads:
            raw.baddbmm_(self.normed_by_head, self.W_columns)
        else:
            raw.addmm_(self.normed_by_head, self.W_columns)

    def transpose(
        self,
        grad_raw: Tensor,  # (b, F) or (H, b / H, F)
    ) -> Tensor:  # (b, 1, d), valid until the next call
        """The cotangent of norm(y)."""
        if self.copies:
            self.own_raw.copy_(grad_raw)
            torch.matmul(self.own_raw, self.W_y, out=self.own_vector)
            self.vector_by_head.copy_(self.own_vector)
        else:
            torch.matmul(grad_raw, self.W_y, out=self.vector_by_head)
        return self.vector


class NormedTokens:
    """norm(y_{t-1}) of all tokens, as the adjoint of the feedback reads it."""

    def __init__(
        self,
        y: Tensor,  # (b, t, d)
        y0: Tensor,  # (b, d), the y before the first token
        eps: float | None,
    ) -> None:
        b, _, d = y.shape
        before = torch.cat([y0.unsqueeze(0), y.transpose(0, 1)[:-1]])
        self.factors = None
        if eps is not None:
            norm = torch.linalg.vector_norm(before, 2, -1, True)
            factor = torch.addcmul(y.new_full((), eps), norm, norm, value=1 / d)
            overflow_to_nan_(factor).rsqrt_()
            before.mul_(factor)
            self.factors = factor.unsqueeze(2).unbind(0)
        self.normed = before  # (t, b, d)
        self.each = before.unsqueeze(2).unbind(0)
        self.product, self.sum = y.new_empty(b, 1, d), y.new_empty(b, 1, 1)

    def add_cotangent(
        self,
        t: int,
        grad: Tensor,  # (b, 1, d), of norm(y_{t-1}), overwritten
        grad_y: Tensor,  # (b, 1, d)
        out: Tensor,  # (b, 1, d)
    ) -> None:
        """grad_y and the cotangent of y_{t-1} as `normalize_feedback_vjp` gives it."""
        if self.factors is None:
            torch.add(grad_y, grad, out=out)
            return
        normed = self.each[t]
        torch.mul(grad, normed, out=self.product)
        torch.sum(self.product, -1, keepdim=True, out=self.sum)
        grad.addcmul_(normed, self.sum, value=-1 / grad.shape[-1])
        torch.addcmul(grad_y, grad, self.factors[t], out=out)

    def weight_gradient(
        self,
        grad_raw: Tensor,  # (t, b, F)
        W_y: Tensor,  # (F, d) or (H, F, d)
    ) -> Tensor:  # as W_y
        """The gradient of W^y."""
        rows, normed = grad_raw.to(W_y.dtype), self.normed.to(W_y.dtype)
        if W_y.dim() == 3:
            rows, normed = (v.unflatten(1, (len(W_y), -1)).transpose(0, 1) for v in (rows, normed))
        return weight_gradient(rows, normed, W_y)
