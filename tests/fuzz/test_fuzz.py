"""Laws of the layers for random combinations of everything that a caller chooses.

Constructor options, shapes, dtypes, solvers, adjoints, masks, documents, chunks and heads are drawn
together. `make fuzz` runs FUZZ_CASES cases; the default run has a few for each law.

Letters: b batch, t time.
"""

import copy
from collections.abc import Callable
from typing import Any

import hypothesis
import pytest
import torch
from fuzz_cases import (
    ATOL,
    CASES,
    FEW,
    ROUNDING,
    TOLERANCE,
    Case,
    Draw,
    call,
    cases,
    compare,
    digits,
    random_state,
    sample,
)
from hypothesis import strategies as st
from torch import Tensor

from bedouin import BedouinState
from bedouin.solvers import (
    ConvergenceError,
    Direct,
    FixedCap,
    GammaCap,
    Jacobi,
    Picard,
)
from bedouin.testing import assert_close, find_fixed_point


def law_shapes_and_gradients(case: Case, draw: Draw) -> None:
    """Shapes, dtypes and statistics; a finite value has a finite gradient; a call can be
    repeated."""
    layer, x = case.layer, case.x.requires_grad_()
    parameters, generator = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
    (b, t), keeps = x.shape[:2], draw(st.booleans())
    layer.record_history = keeps
    output, state = layer(x, case.state, return_state=True)
    assert output.shape == x.shape and output.dtype == x.dtype
    like = layer.init_state(b)
    assert all(v.shape == w.shape and v.dtype == w.dtype for v, w in zip(state, like, strict=True))
    stats = layer.stats
    assert stats is not None and stats.num_steps.shape == (b,) and not stats.residual.requires_grad
    assert (stats.num_steps <= (1 if isinstance(layer.solver, Direct) else 150)).all()
    if isinstance(layer.solver, Jacobi):
        assert (stats.num_steps <= t + 1).all() and stats.converged.all()
    assert (stats.history is not None) == keeps
    if stats.history is not None:
        assert stats.history.shape[1:] == (b,)
    good = stats.converged if t else torch.ones(b, dtype=torch.bool)
    assert output[good].isfinite().all() and state.ssm[good].isfinite().all()
    total = output.double().sum() + state.ssm.double().sum() + state.y.double().sum()
    total.backward()
    backward = stats.backward
    # in float16 cotangents of raw values may overflow: a convolution adds them up, and the product
    # with an x of zero is NaN
    overflows = case.dtype == torch.float16 and (layer.conv is not None or not bool(x.all()))
    if good.all() and (backward is None or bool(backward.converged.all())) and not overflows:
        # the gradient of a solve that has not converged may overflow, and says so
        limit = torch.finfo(x.dtype).max
        for name, value in {"x": x, **dict(layer.named_parameters())}.items():
            if value.grad is not None:
                assert not value.grad.isnan().any(), f"{name} (largest {limit})"
    assert torch.equal(torch.get_rng_state(), generator)
    for name, value in parameters.items():
        if name != "_extra_state":
            assert torch.equal(layer.state_dict()[name], value), name
    layer.draws.count = 0
    again = layer(x, case.state)
    assert torch.equal(again[good], output[good])


def law_chunks(case: Case, draw: Draw) -> None:
    """A sequence in chunks, and token by token, gives what it gives in one call."""
    t = case.x.shape[1]
    cuts = sorted(draw(st.lists(st.integers(0, t), max_size=3)))
    output, state, stats = call(case, case.x, case.state)
    parts, after, seen = [], case.state, [stats]
    for start, stop in zip([0, *cuts], [*cuts, t], strict=True):
        part, after, stats = call(case, case.x[:, start:stop], after)
        parts.append(part)
        seen.append(stats)
    assert after is not None
    of_tokens, tokens = case.layer.init_state(len(case.x)) if case.state is None else case.state, []
    with torch.no_grad():
        for x_t in case.x.unbind(1):
            y_t, of_tokens = case.layer.step(x_t, of_tokens)
            tokens.append(y_t)
            assert case.layer.stats is not None
            seen.append(case.layer.stats)
    error = digits(case, case.x, *seen)
    found = torch.stack(tokens, 1) if tokens else output
    for outputs, last in ((torch.cat(parts, 1), after), (found, of_tokens)):
        compare(case, "output ssm y", (outputs, *last), (output, *state), error)


def law_masks(case: Case, draw: Draw) -> None:
    """Padding, NaN in it included, changes nothing; its output is zero."""
    b, t = case.x.shape[:2]
    rows = st.lists(st.booleans(), min_size=t, max_size=t)
    mask = torch.tensor(draw(st.lists(rows, min_size=b, max_size=b)), dtype=torch.bool).view(b, t)
    hypothesis.note(f"mask={mask.tolist()}")
    x = case.x.masked_fill(~mask.unsqueeze(-1), torch.nan)
    output, state, stats = call(case, x, case.state, mask=mask)
    assert not output[~mask].any() and output.shape == x.shape
    seen, expected, states = [stats], torch.zeros_like(output), []
    for i in range(b):
        alone, after, stats = call(case, x[i][mask[i]].unsqueeze(0), sample(case.state, i))
        expected[i, mask[i]] = alone[0]
        states.append(after)
        seen.append(stats)
    error = digits(case, case.x, *seen)
    if b:
        after = BedouinState.cat(states)
        compare(case, "output ssm y", (output, *state), (expected, *after), error)


def law_documents(case: Case, draw: Draw) -> None:
    """Documents in one row, with cu_seqlens or seq_idx, are what each is alone, without padding."""
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    by_index = draw(st.booleans())
    lengths = [n for n in lengths if n] or [1] if by_index else lengths
    hypothesis.note(f"lengths={lengths}, by_index={by_index}")
    x = torch.randn(1, sum(lengths), case.layer.d_model).to(case.dtype)
    num_states = 1 if by_index else len(lengths)
    before = random_state(case.layer, num_states)
    if by_index:
        where = {
            "seq_idx": torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))[None]
        }
    else:
        where = {"cu_seqlens": torch.tensor([0, *lengths]).cumsum(0)}
    real = torch.ones(1, x.shape[1], dtype=torch.bool)
    if draw(st.booleans()):
        drawn = draw(st.lists(st.booleans(), min_size=x.shape[1], max_size=x.shape[1]))
        real = torch.tensor(drawn, dtype=torch.bool).unsqueeze(0)
        if by_index:  # padding alone is no document
            real[0, torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
        hypothesis.note(f"real={real.tolist()}")
        x, where["mask"] = x.masked_fill(~real.unsqueeze(-1), torch.nan), real
    output, state, stats = call(case, x, before, **where)
    assert not output[~real].any()
    output = output[real].unsqueeze(0)
    assert stats.num_steps.shape == (len(lengths),)
    seen, outputs, states, errors = [stats], [], [], [0.0]
    zero: Any = case.layer.init_state(1)
    incoming: Any
    documents = zip(x.split(lengths, 1), real.split(lengths, 1), strict=True)
    for i, (padded, kept) in enumerate(documents):
        document = padded[kept].unsqueeze(0)
        incoming = before[[i]] if i < num_states else zero
        alone, after, stats = call(case, document, incoming)
        outputs.append(alone)
        states.append(after)
        seen.append(stats)
        errors.append(digits(Case(case.layer, document, incoming), document, *seen))
    after = states[-1] if by_index else BedouinState.cat(states)
    expected = torch.cat(outputs, 1), *after
    compare(case, "output ssm y", (output, *state), expected, max(errors))


def law_gradients_of_padding(case: Case, draw: Draw) -> None:
    """With any solver and adjoint, gradients with padding are those of the rows without it."""
    layer, (b, t) = case.layer, case.x.shape[:2]
    hypothesis.assume(case.dtype == torch.float64 and t > 0)
    _, _, stats = call(case, case.x, case.state)
    error = 100 * digits(case, case.x, stats)
    hypothesis.assume(error < 1e-3)
    lengths = draw(st.lists(st.integers(0, t), min_size=b, max_size=b))
    left = draw(st.booleans())
    hypothesis.note(f"lengths={lengths}, left={left}")
    places, count = torch.arange(t), torch.tensor(lengths, dtype=torch.int64).view(b, 1)
    mask = places >= t - count if left else places < count
    x = case.x.masked_fill(~mask.unsqueeze(-1), torch.inf).requires_grad_()
    inputs, weight = [x, *layer.parameters()], torch.randn(case.x.shape).double()
    found, seen = of_sum(layer(x, case.state, mask=mask) * weight, inputs), [layer.stats]
    assert not found[0][~mask].any()
    alone = torch.zeros(())
    for i in range(b):
        y = layer(x[i][mask[i]].unsqueeze(0), sample(case.state, i))
        alone = alone + (y[0] * weight[i][mask[i]]).sum()
        seen.append(layer.stats)
    expected = of_sum(alone, inputs)
    for solve in seen:
        assert solve is not None
        backward = solve.backward
        hypothesis.assume(solve.converged.all())
        hypothesis.assume(backward is None or bool(backward.converged.all()))
    for a, e in zip(found, expected, strict=True):
        assert_close("gradient", a, e, error, error)


def of_sum(total: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """The gradients of the sum, zeros included."""
    total = total.sum()
    if not total.requires_grad:
        return [torch.zeros_like(v) for v in inputs]
    found = torch.autograd.grad(total, inputs, allow_unused=True, retain_graph=True)
    return [torch.zeros_like(v) if g is None else g for v, g in zip(inputs, found, strict=True)]


def law_autocast(case: Case, draw: Draw) -> None:
    """Under autocast a float32 layer gives finite values of autocast's dtype, state at least
    float32; chunks agree to its rounding."""
    hypothesis.assume(case.dtype == torch.float32)
    t, layer = case.x.shape[1], case.layer
    cut = draw(st.integers(0, t))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state, stats = call(case, case.x, case.state)
        first, between, of_first = call(case, case.x[:, :cut], case.state)
        second, after, of_second = call(case, case.x[:, cut:], between)
    assert output.dtype == torch.bfloat16 and all(v.dtype == torch.float32 for v in state)
    narrow = Case(layer, case.x.bfloat16(), case.state)
    error = digits(narrow, case.x, stats, of_first, of_second)
    found = torch.cat([first, second], 1), *after
    compare(narrow, "output ssm y", found, (output, *state), error)


def law_isolation(case: Case, draw: Draw) -> None:
    """A token that is not finite, or huge, changes no other sample and no earlier token."""
    (b, t), layer = case.x.shape[:2], case.layer
    hypothesis.assume(b > 0 and t > 0)
    i, now = draw(st.integers(0, b - 1)), draw(st.integers(0, t - 1))
    x = case.x.clone()
    healthy, _, stats = call(case, x, case.state)
    x[i, now:] = draw(st.sampled_from([torch.nan, torch.inf, torch.finfo(x.dtype).max]))
    x.requires_grad_()
    found = layer(x, case.state)
    assert layer.stats is not None
    others = torch.arange(b) != i
    assert torch.equal(layer.stats.converged[others], stats.converged[others])
    (grad,) = torch.autograd.grad(found[others].double().sum(), x)
    # an iterative solver may find a fixed point of a singular local system, whose adjoint has none
    pivots = None
    if layer.is_structured:
        exact = find_fixed_point(layer, case.x, solver=Direct(), state=case.state)
        pivots = exact.stats.conditioning
    is_regular = pivots is None or bool((pivots[others] > ROUNDING[case.dtype]).all())
    if is_regular and stats.converged[others].all():
        found_nan = grad[others].isnan()
        if case.dtype == torch.float16 and found_nan.any():
            # a gradient may overflow in float16: then it does so without the changed sample, too
            given = case.x.clone().requires_grad_()
            healthy_sum = layer(given, case.state)[others].double().sum()
            found_nan &= ~torch.autograd.grad(healthy_sum, given)[0][others].isnan()
        assert not found_nan.any()
    error = digits(case, case.x, stats)
    assert_close("others", found[others], healthy[others], error, ATOL[case.dtype])
    # what is not causal is documented: these mix tokens, or stop a sample as a whole
    solver = layer.solver
    whole = isinstance(solver, Picard) and (solver.patience or solver.stop_rule == "paper")
    if isinstance(solver, Direct | Jacobi | Picard) and not whole:
        assert_close("earlier", found[i, :now], healthy[i, :now], error, ATOL[case.dtype])


def law_reports(case: Case, draw: Draw) -> None:
    """on_unconverged="raise" raises if and only if a sample has not converged."""
    layer = case.layer
    caps = [FixedCap(1), FixedCap(3), GammaCap(4.0, 1.0, 20)]
    layer.cap = draw(st.sampled_from(caps))
    layer.on_unconverged = "raise"
    raised = False
    try:
        with torch.no_grad():
            layer(case.x, case.state)
    except ConvergenceError as error:
        raised = True
        assert error.stats is layer.stats and type(layer).__name__ in str(error)
    assert layer.stats is not None
    # an input of 1e-7 or a drive of SiLU(-100) makes y smaller than atol, and then any relative
    # size of the defect is accepted
    moderate = case.x.numel() > 0 and 0.01 < case.x.abs().max() < 20
    if moderate and not isinstance(layer.solver, Direct) and "paper" not in str(layer.solver):
        rtol = 1.001 * TOLERANCE[case.dtype]
        assert (layer.stats.residual[layer.stats.converged] <= rtol).all()
    if raised or not layer.cap.is_random or not layer.training:
        assert raised == (not bool(layer.stats.converged.all()))


def other_dtype(case: Case) -> torch.dtype:
    return torch.float32 if case.dtype == torch.float16 else torch.float16


WRONG: list[tuple[str, Callable[[Any], Any], type[Exception]]] = [
    ("x", lambda c: c.layer(c.x[..., 0]), ValueError),
    ("x", lambda c: c.layer(torch.cat([c.x, c.x], -1)), ValueError),
    ("x", lambda c: c.layer(c.x.long()), TypeError),
    ("x", lambda c: c.layer(c.x.to(other_dtype(c))), TypeError),
    ("x", lambda c: c.layer(c.x.tolist()), TypeError),
    ("state", lambda c: c.layer(c.x, c.layer.init_state(len(c.x) + 2)), ValueError),
    ("state", lambda c: c.layer(c.x, c.layer.init_state(len(c.x)).to(torch.int64)), ValueError),
    ("state", lambda c: c.layer(c.x, tuple(c.layer.init_state(len(c.x)))), TypeError),
    ("mask", lambda c: c.layer(c.x, mask=c.x[..., 0]), TypeError),
    ("mask", lambda c: c.layer(c.x, mask=torch.ones(len(c.x), 99).bool()), ValueError),
    ("cu_seqlens", lambda c: c.layer(c.x, cu_seqlens=torch.tensor([0, 99])), ValueError),
    ("seq_idx", lambda c: c.layer(c.x, seq_idx=c.x[..., 0]), TypeError),
    ("x", lambda c: c.layer.step(c.x, c.layer.init_state(len(c.x))), ValueError),
]


def law_errors(case: Case, draw: Draw) -> None:
    """A wrong argument raises an error that names it, and leaves no trace."""
    name, wrong, kind = draw(st.sampled_from(WRONG))
    with pytest.raises(kind, match=name):
        wrong(case)
    assert case.layer.stats is None


LAWS = [value for name, value in globals().items() if name.startswith("law_")]
of_laws = pytest.mark.parametrize("law", LAWS, ids=lambda law: law.__name__[4:])


def fuzzed(number: int) -> Any:
    """A test of each law for a number of cases."""

    def test(law: Any, case: Case, data: st.DataObject) -> None:
        law(case, data.draw)

    drawn = hypothesis.given(case=cases(), data=st.data())(test)
    checks = [*hypothesis.HealthCheck]
    return of_laws(hypothesis.settings(max_examples=number, suppress_health_check=checks)(drawn))


test_law = fuzzed(FEW)
test_law_at_length = pytest.mark.fuzz(fuzzed(-(-CASES // len(LAWS))))
