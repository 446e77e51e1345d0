"""Operations of torch.library, of which torch.compile sees the result and not the code, and errors
for second derivatives and for forward mode, which bedouin does not support.

torch.compile takes the registered gradient. In eager mode an autograd.Function with the same
gradient calls the implementation: for twenty arguments the dispatcher's route to a registered
gradient takes 250 microseconds on the host, a Function 20, and the dispatcher below it as many.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from bedouin.kernels.backend import is_batched, is_forward_mode, is_transformed

NAMESPACE = "bedouin"

PLAIN = {Tensor, torch.nn.Parameter, type(None), bool, int, float, str, tuple, torch.dtype}
"""Types of arguments with which the dispatcher would only call the implementation; tuples are of
numbers."""

OPERATIONS: dict[str, "Operation"] = {}
"""All operations by their qualified names."""

SECOND_DERIVATIVE = (
    "this gradient, which bedouin computes itself, is once differentiable: second derivatives "
    "(double backward, create_graph=True, torch.func.hessian) are not supported; for a small "
    "problem, use finite differences of the gradient"
)

FORWARD_MODE = (
    "bedouin's fixed point has no forward-mode derivative (torch.func.jvp, jacfwd and hessian, "
    "torch.autograd.forward_ad): use reverse mode (torch.func.jacrev, vjp and grad), or "
    "adjoint=UnrolledAdjoint(), through which forward mode passes"
)


def refuse_forward_mode(
    ctx: Any,
    *tangents: Tensor,  # any shapes
) -> Any:
    """A `jvp` for autograd.Functions without forward mode; raises RuntimeError."""
    raise RuntimeError(FORWARD_MODE)


class _Once(torch.autograd.Function):
    """Returns copies of the first `count` tensors, whose differentiation raises RuntimeError.

    torch's own `once_differentiable` raises its error in a node that a second `torch.autograd.grad`
    with explicit inputs never visits, so that a wrong second derivative is returned silently. Here
    the node lies in the graph between the gradients and the tensors that they depend on.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        count: int,
        *tensors: Tensor,  # any shapes
    ) -> tuple[Tensor, ...]:
        return tuple(tensor.clone() for tensor in tensors[:count])

    @staticmethod
    def setup_context(
        ctx: Any,
        inputs: tuple[Any, ...],
        output: tuple[Tensor, ...],  # any shapes
    ) -> None:
        pass

    @staticmethod
    def backward(
        ctx: Any,
        *grads: Tensor,  # any shapes
    ) -> Any:
        raise RuntimeError(SECOND_DERIVATIVE)


class _OnceEager(_Once):
    """`_Once` with an error in forward mode, too. A class of its own, because torch.compile cannot
    trace a Function that has a jvp."""

    jvp = staticmethod(_Once.backward)


def refuse_second_derivative(
    grads: Sequence[Tensor | None],  # any shapes
    depends_on: Sequence[Tensor | None],  # any shapes
) -> tuple[Tensor | None, ...]:
    """`grads`, marked so that their derivative with respect to `depends_on` raises RuntimeError.

    Returns `grads` unchanged unless the backward pass itself is recorded or runs in forward mode.
    """
    forward_mode = is_forward_mode()
    if not forward_mode and not torch.is_grad_enabled():
        return tuple(grads)
    sources = [t for t in depends_on if t is not None and (forward_mode or t.requires_grad)]
    if not sources:
        return tuple(grads)
    present = [grad for grad in grads if grad is not None]
    function = _Once if torch.compiler.is_compiling() else _OnceEager
    marked = iter(function.apply(len(present), *present, *sources))  # type: ignore[no-untyped-call]
    return tuple(None if grad is None else next(marked) for grad in grads)


class Operation:
    """One operation of torch.library: its implementation for all devices, and a gradient, if any.

    The implementation must not return its arguments or views of these. `like` returns tensors like
    its results, uninitialized.
    """

    def __init__(
        self, name: str, function: Callable[..., Any], schema: str, like: Callable[..., Any]
    ) -> None:
        self.name, self.function, self.schema = f"{NAMESPACE}::{name}", _on_device(function), schema
        torch.library.define(self.name, schema, tags=(torch.Tag.pt2_compliant_tag,))
        torch.library.impl(self.name, "default", self.function)
        torch.library.register_fake(self.name, like)
        self.overload = getattr(getattr(torch.ops, NAMESPACE), name).default
        self._eager: type[torch.autograd.Function] | None = None
        OPERATIONS[self.name] = self

    def register_autograd(
        self,
        backward: Callable[..., Any],
        *,
        setup_context: Callable[..., None],
    ) -> None:
        """Give the operation a gradient, as `torch.library.register_autograd` does."""
        torch.library.register_autograd(self.name, backward, setup_context=setup_context)

        # torch binds the arguments of a Function with a setup_context by inspection in every call
        def forward(ctx: Any, *inputs: Any) -> Any:
            output = self._below_autograd(*inputs)
            setup_context(ctx, inputs, output)
            return output

        methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
        self._eager = type(self.name.partition("::")[2], (torch.autograd.Function,), methods)

    def register_vjp(
        self, *, kept: int = 0, optional: Collection[int] = (), constant: Collection[int] = ()
    ) -> Callable[[Callable[..., tuple[Tensor, ...]]], "Operation"]:
        """Decorator: the function computes the gradient, as an operation that is once
        differentiable.

        The tensors come first among the arguments; an argument `keep`, the last one, must be True
        where gradients are recorded. The last `kept` outputs serve the backward alone. The function
        takes the cotangents of the other outputs, zeros where there are none, or None for those
        with the numbers `optional`, the kept outputs, and all arguments but `keep`; it returns a
        cotangent of each tensor, like it and contiguous, of no size for None and for those with the
        numbers `constant`, which have no gradient.
        """
        taken, _, returned = self.schema[1:].partition(") -> ")
        taken, keeps = taken.removesuffix(", bool keep"), taken.endswith(", bool keep")
        count, outputs = taken.count("Tensor"), returned.count("Tensor")
        end, behind = outputs - kept, len(self.overload._schema.arguments) - count
        first = [f"Tensor{'?' if i in optional else ''} grad_{i}" for i in range(end)]
        first += [f"Tensor kept_{i}" for i in range(kept)]
        schema = f"({', '.join([*first, taken])}) -> ({', '.join(['Tensor'] * count)})"

        def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            found = output if isinstance(output, tuple) else (output,)
            if keeps and not inputs[-1]:
                raise ValueError("keep must be True where gradients are recorded, got False")
            ctx.mark_non_differentiable(*found[end:])
            # zeros for what is kept would be written and not read
            ctx.set_materialize_grads(False)
            ctx.like = [(v.shape, v.dtype) for v in found[:end]]
            ctx.options = inputs[count : len(inputs) - keeps]
            ctx.save_for_backward(*found[end:], *inputs[:count])

        def like(*flat: Any) -> tuple[Tensor, ...]:
            tensors = enumerate(flat[outputs : outputs + count])
            return empty_like(*[None if i in constant else v for i, v in tensors])

        def register(function: Callable[..., tuple[Tensor, ...]]) -> Operation:
            backward = operation(f"{self.name.partition('::')[2]}_backward", schema, like)(function)

            def vjp(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
                saved = ctx.saved_tensors
                given = list(grads[:end])
                for i, (shape, dtype) in enumerate(ctx.like):
                    if given[i] is None and i not in optional:
                        given[i] = saved[-count].new_zeros(shape, dtype=dtype)
                with torch.no_grad():
                    found = backward(*given, *saved, *ctx.options)
                every = [
                    None if v is None or i in constant else grad
                    for i, (v, grad) in enumerate(zip(saved[kept:], found, strict=True))
                ]
                return *refuse_second_derivative(every, [*given, *saved]), *[None] * behind

            self.register_autograd(vjp, setup_context=save)
            return backward

        return register

    def __call__(self, *inputs: Any) -> Any:
        if torch.compiler.is_compiling() or is_transformed():
            return self.overload(*inputs)
        if self._eager is not None and is_recorded(*inputs):
            return self._eager.apply(*inputs)
        return self._below_autograd(*inputs)

    def _below_autograd(self, *inputs: Any) -> Any:
        # the dispatcher would only call the implementation for plain tensors, unless a mode or the
        # profiler is to see the operation
        is_seen = torch._C._len_torch_dispatch_stack() or torch._C._autograd._profiler_enabled()
        tensors = [v for v in inputs if isinstance(v, Tensor)]
        is_plain = PLAIN.issuperset(map(type, inputs)) and not is_batched(*tensors)
        return (self.function if is_plain and not is_seen else self.overload)(*inputs)


def is_recorded(*inputs: Any) -> bool:
    """Whether the gradient of a tensor among `inputs` is recorded."""
    # a generator takes longer
    wanted = [isinstance(v, Tensor) and v.requires_grad for v in inputs]
    return torch.is_grad_enabled() and any(wanted)


def _on_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function on the device of its first tensor, which is the first argument."""

    def run(first: Tensor, *others: Any) -> Any:
        if not first.is_cuda:
            return function(first, *others)
        with torch.cuda.device_of(first):
            return function(first, *others)

    return run


def operation(
    name: str, schema: str, like: Callable[..., Any]
) -> Callable[[Callable[..., Any]], Operation]:
    """Decorator: register a function, which changes none of its arguments, as the operation `name`.
    `like` returns tensors like its results, uninitialized."""
    return lambda function: Operation(name, function, schema, like)


@contextmanager
def recording() -> Iterator[None]:
    """A context in which autograd records within an operation, which torch runs below it.

    torch has no public interface for that: torch.func.vjp, which also records there, raises under
    hooks on saved tensors such as those of save_on_cpu.
    """
    include = torch._C._dispatch_tls_local_include_set()
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in ("AutogradFunctionality", "AutogradOther", "AutogradNestedTensor"):
        exclude = exclude.remove(getattr(torch._C.DispatchKey, key))
    with torch._C._ForceDispatchKeyGuard(include, exclude), torch.enable_grad():
        yield


def empty_like(*tensors: Tensor | None) -> tuple[Tensor, ...]:
    """Contiguous tensors of the same shapes and dtypes, uninitialized; of no size for None."""
    first = next(v for v in tensors if v is not None)
    return tuple(first.new_empty(0) if v is None else v.new_empty(v.shape) for v in tensors)


def plain_operation(
    name: str,
    schema: str,
    function: Callable[..., tuple[Tensor, ...]],
    like: Callable[..., tuple[Tensor, ...]],
) -> Operation:
    """`function` of plain torch, which torch.compile would otherwise unroll over time, as an
    operation. Autograd within a second operation computes the gradient. `like` returns tensors like
    the results, uninitialized."""
    count, results = (part.count("Tensor") for part in schema.split("->"))

    @operation(name, schema, like)
    def forward(*inputs: Any) -> tuple[Tensor, ...]:
        return tuple(v.contiguous() for v in function(*inputs))

    @forward.register_vjp()
    def backward(*flat: Any) -> tuple[Tensor, ...]:
        """Cotangents of the results, then what `forward` takes."""
        given, inputs = flat[:results], flat[results:]
        with recording():
            leaves: list[Any] = [
                v.detach().requires_grad_() if isinstance(v, Tensor) else v for v in inputs
            ]
            present = [v for v in leaves if isinstance(v, Tensor)]
            found = function(*leaves)
            grads = iter(torch.autograd.grad(found, present, given, materialize_grads=True))
        return tuple(
            given[0].new_empty(0) if v is None else next(grads).contiguous() for v in leaves[:count]
        )

    return forward
