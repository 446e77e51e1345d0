"""Activation checkpointing: whether a call is the recomputation of an earlier one."""

import torch


def in_backward() -> bool:
    """Whether autograd is running a backward pass in this thread."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._current_graph_task_id() != -1


def is_recomputation() -> bool:
    """Whether a call recomputes an earlier one with its graph, as activation checkpointing does in
    a backward pass. Backward passes of other functions run without gradients by default."""
    return in_backward() and torch.is_grad_enabled()
