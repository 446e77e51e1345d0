"""The options erase, projection, d_conv, feedback of x and feedback_scope, and `Bedouin.recall`."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bedouin import Bedouin, Decoder, FixedPointRNN, Initialization, param_groups
from bedouin.kernels.householder import unit
from bedouin.layer import FixedPointLayer
from bedouin.mixers import LowRank
from bedouin.solvers import Direct, ImplicitAdjoint, Jacobi, Picard, UnrolledAdjoint
from bedouin.state import BedouinState
from bedouin.testing import assert_close, decode_gap, layer_gradients, log_growth

M, T = 8, 6

RECALL: dict[str, Any] = {
    "projection": "input",
    "d_conv": 3,
    "erase": 1.0,
    "feedback": ("delta", "x"),
    "num_householder": 0,
    "num_heads": 4,
    "feedback_scope": "layer",
    "feedback_heads": 1,
}

CASES: list[dict[str, Any]] = [
    {"erase": 1.0},
    {"erase": 2.0, "num_heads": 2, "feedback": ("delta", "B", "C", "mixer", "erase")},
    {"erase": 1.0, "input_scale": "one_minus_decay", "eigenvalues": "full", "feedback": ()},
    {"erase": 1.0, "mixer": LowRank(2), "num_heads": 2},
    {"feedback": ("x",)},
    {"feedback": ("delta", "x"), "num_heads": 2, "decay": "griffin"},
    {"feedback": ("B", "x"), "feedback_norm": False, "erase": 1.0},
    {"feedback": ("delta", "x"), "num_heads": 2, "feedback_scope": "layer"},
    {"feedback": ("delta", "B", "C", "mixer"), "num_heads": 2, "feedback_scope": "layer"},
    {
        "feedback": ("delta", "x"),
        "num_heads": 4,
        "feedback_scope": "layer",
        "feedback_heads": 3,
        "bounded_x": True,
    },
    {"num_heads": 2, "feedback_heads": 1},
    RECALL | {"initialization": Initialization(memory_heads=3)},
    {"d_conv": 3, "num_heads": 2},
    {"d_conv": 1},
    {"projection": "input", "num_heads": 2},
    {"projection": "input", "d_conv": 1, "num_householder": 0, "feedback": ()},
    {"projection": "input", "d_conv": 4, "output": "paper", "bias": False},
    RECALL | {"num_groups": 2},
    {
        "projection": "input",
        "num_heads": 2,
        "feedback": (),
        "num_householder": 1,
        "num_groups": 1,
    },
    {
        "projection": "input",
        "d_conv": 3,
        "erase": 1.0,
        "feedback": ("delta", "mixer", "erase", "x"),
        "num_heads": 2,
        "feedback_scope": "layer",
        "input_scale": "delta",
    },
]

cases = pytest.mark.parametrize("options", CASES, ids=lambda v: "-".join(map(str, v)))


def make(options: dict[str, Any], **others: Any) -> Bedouin:
    """Feedback is as large as other weights, so that its gradients are, too."""
    torch.manual_seed(0)
    known: dict[str, Any] = {"d_state": 3, "feedback_init": 1.0, "dtype": torch.float64}
    return Bedouin(M, **(known | options | others))


def random_state(layer: FixedPointLayer, b: int = 2) -> BedouinState:
    return BedouinState(*(0.3 * torch.randn_like(v) for v in layer.init_state(b)))


@cases
def test_all_ways_to_compute_agree(options: dict[str, Any]) -> None:
    """The sweep, one token after the other, chunks, a Decoder, and Jacobi, exact in t steps."""
    layer = make(options)
    x, state = torch.randn(2, T, M, dtype=torch.float64), random_state(layer)
    y, after = layer(x, state=state, return_state=True)
    assert layer.stats is not None and bool(layer.stats.converged.all())
    first, middle = layer(x[:, :2], state=state, return_state=True)
    second, end = layer(x[:, 2:], state=middle, return_state=True)
    assert_close("chunks", torch.cat([first, second], 1), y, 1e-10)
    for ours, theirs in zip(end, after, strict=True):
        assert_close("state", ours, theirs, 1e-10, atol=1e-14)
    assert decode_gap(layer, x) < 1e-10
    decoder = Decoder(layer, batch_size=2, state=state)
    assert_close("decoder", torch.stack([decoder(v).clone() for v in x.unbind(1)], 1), y, 1e-10)
    layer.solver = Jacobi(rtol=1e-13)
    assert_close("Jacobi", layer(x, state=state), y, 1e-10)
    assert int(layer.stats.num_steps.max()) <= T + 1
    assert log_growth(layer, x).isfinite().all()


@cases
def test_gradients(options: dict[str, Any]) -> None:
    """Of all parameters, the input and the state: the reverse sweep and its iterative solve against
    back-propagation through the plain loop."""
    layer = make(options)
    x, state = torch.randn(2, 4, M, dtype=torch.float64), random_state(layer)
    expected = layer_gradients(layer, x, UnrolledAdjoint(), solver=Direct(), state=state)
    jacobi = Jacobi(rtol=1e-13)
    ours = {
        "sweep": layer_gradients(layer, x, ImplicitAdjoint(), solver=Direct(), state=state),
        "exact": layer_gradients(layer, x, ImplicitAdjoint(), solver=jacobi, state=state),
        "iterative": layer_gradients(layer, x, ImplicitAdjoint(jacobi), solver=jacobi, state=state),
    }
    for way, grads in ours.items():
        for name, grad in grads.items():
            assert_close(f"{way}: {name}", grad, expected[name], 1e-8, atol=1e-12)


def test_gradients_are_those_of_finite_differences() -> None:
    layer = make(CASES[-1]).requires_grad_(False)
    x = torch.randn(1, 3, M, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(layer, (x,))


@cases
def test_padding_and_documents(options: dict[str, Any]) -> None:
    """Padding neither erases nor enters the window, and a document starts with an empty one."""
    layer, x = make(options), torch.randn(2, T, M, dtype=torch.float64)
    mask = torch.tensor([[0, 1, 1, 0, 1, 0], [1, 1, 1, 1, 1, 1]], dtype=torch.bool)
    for solver in (Direct(), Jacobi(rtol=1e-13), Picard(rtol=1e-12)):
        layer.solver = solver
        y, after = layer(x, mask=mask, return_state=True)
        for i in range(2):
            alone, end = layer(x[i : i + 1, mask[i]], return_state=True)
            assert_close("row", y[i : i + 1, mask[i]], alone, 1e-9)
            for ours, theirs in zip(after[i : i + 1], end, strict=True):
                assert_close("state", ours, theirs, 1e-9, atol=1e-12)
    layer.solver = Direct()
    packed = layer(x[:1], cu_seqlens=torch.tensor([0, 2, 2, T]))
    assert_close("documents", packed, torch.cat([layer(x[:1, :2]), layer(x[:1, 2:])], 1), 1e-10)


def delta_rule(
    layer: Any,
    u: Tensor,  # (b, t, m)
) -> Tensor:  # (b, t, m)
    """The layer without feedback and without Q as a loop of its own: the delta rule with decays
    for each channel and state, and a strength of the write of its own."""
    sizes, H, n, w = layer.projected_sizes, layer.num_heads, layer.d_state, layer.conv.width
    p, b = layer.head_dim, len(u)
    x, delta, B, C, erase, _, gate = (u @ layer.in_proj.weight.T).split(list(sizes.values()), -1)
    v = F.pad(torch.cat([x, B, C], -1), (0, 0, w - 1, 0))
    v = F.silu(sum(v[:, i : i + u.shape[1]] * layer.conv.weight[:, i] for i in range(w)))
    x, B, C = v.split([H * p, H * n, H * n], -1)
    delta = F.softplus(delta + layer.dt_bias).unflatten(-1, (H, p))
    erase = layer.erase * torch.sigmoid(erase + layer.raw_bias)
    x, B, C = x.unflatten(-1, (H, p)), *(unit(q.unflatten(-1, (H, n))) for q in (B, C))
    rates, h, ys = -layer.A_log.exp().unflatten(0, (H, p)), u.new_zeros(b, H, p, n), []
    for t in range(u.shape[1]):
        h = torch.exp(delta[:, t, :, :, None] * rates) * h
        held = torch.einsum("bhpn,bhn->bhp", h, B[:, t])
        write = delta[:, t] * x[:, t] - erase[:, t, :, None] * held
        h = h + torch.einsum("bhp,bhn->bhpn", write, B[:, t])
        ys.append(torch.einsum("bhpn,bhn->bhp", h, C[:, t]))
    y = torch.stack(ys, 1) + layer.D.unflatten(0, (H, p)) * x
    normed = F.rms_norm(y, (p,), eps=layer.norm.eps).flatten(-2) * layer.norm.weight
    output: Tensor = (F.silu(gate) * normed) @ layer.out_proj.weight.T
    return output


@pytest.mark.parametrize("erase", [0.5, 1.0, 2.0])
def test_without_feedback_and_mixing_it_is_the_delta_rule(erase: float) -> None:
    layer = Bedouin.recall(
        16, d_state=4, num_heads=2, erase=erase, feedback=(), dtype=torch.float64
    )
    u = torch.randn(2, 7, 16, dtype=torch.float64, requires_grad=True)
    leaves = [u, *layer.parameters()]
    ours, theirs = layer(u), delta_rule(layer, u)
    assert_close("value", ours, theirs, 1e-12)
    weight = torch.randn_like(ours)
    grads = (torch.autograd.grad((v * weight).sum(), leaves) for v in (ours, theirs))
    for i, (a, e) in enumerate(zip(*grads, strict=True)):
        assert_close(f"gradient {i}", a, e, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 63), (1, 64), (1, 100), (0, 3), (2, 0)])
@pytest.mark.parametrize(
    "options",
    [
        {
            **{"num_householder": 1, "input_scale": "bounded_delta"},
            **{"feedback_scope": "head", "feedback_heads": None},
        },
        {"feedback_scope": "layer", "feedback_heads": 1},
    ],
    ids=["reflections", "one head with feedback"],
)
def test_lower_precision(
    options: dict[str, Any], shape: tuple[int, int], dtype: torch.dtype
) -> None:
    wide = Bedouin.recall(16, num_heads=2, d_state=8, feedback_noise=0.0, **options)
    layer, x = wide.to(dtype), torch.randn(*shape, 16).to(dtype).mT.contiguous().mT
    y, state = layer(x.requires_grad_(), return_state=True)
    y.sum().backward()
    assert x.grad is not None and x.grad.dtype == y.dtype == dtype
    assert {v.dtype for v in state} == {torch.float32}
    expected = wide.double()(x.detach().double())
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    assert_close("output", y.double(), expected, tolerance, atol=tolerance)


@pytest.mark.parametrize("number", [11, -1], ids=["one head with feedback", "all heads"])
def test_compiled_and_under_vmap(number: int) -> None:
    layer, x = make(CASES[number]), torch.randn(2, 2, M, dtype=torch.float64)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_close("compiled", compiled(x), layer(x), 1e-10)
    stacked = {name: torch.stack([p, 0.9 * p]) for name, p in layer.named_parameters()}

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        output: Tensor = torch.func.functional_call(layer, parameters, (x,))
        return output.square().sum()

    found = torch.func.vmap(torch.func.grad(loss))(stacked)
    for name, grad in torch.func.grad(loss)({k: v[1] for k, v in stacked.items()}).items():
        assert_close(name, found[name][1], grad, 1e-8, atol=1e-12)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"erase": 1.0}, "erase"),
        ({"feedback": ("B", "x")}, "feedback of x"),
        ({"num_heads": 2, "feedback_scope": "layer"}, "feedback_scope='layer'"),
    ],
    ids=str,
)
@pytest.mark.parametrize("solver", [Direct(), Jacobi()], ids=["direct", "jacobi"])
def test_kernels_refuse_what_they_lack(options: dict[str, Any], reason: str, solver: Any) -> None:
    layer = Bedouin(M, backend="triton", solver=solver, **options)
    with pytest.raises(ValueError, match=f"backend='triton' does not support {reason}"):
        layer(torch.randn(1, 2, M))


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "options", [CASES[12], CASES[14], CASES[-3]], ids=["conv", "input", "groups"]
)
def test_kernels_take_projections_and_convolutions(options: dict[str, Any]) -> None:
    layer = make(options, dtype=torch.float32)
    x, state = torch.randn(2, 3, M), random_state(layer)
    expected = layer_gradients(layer, x, state=state)
    layer.backend = "triton"
    for name, grad in layer_gradients(layer, x, state=state).items():
        assert_close(name, grad, expected[name], 1e-4, atol=1e-5)


@pytest.mark.parametrize("num_groups", [1, 2, 3, 4])
def test_heads_of_a_group_share_their_keys(num_groups: int) -> None:
    """The layer is that of a key for each head in which those of a group are equal."""
    shared: dict[str, Any] = {"num_heads": 5, "expand": 5, "d_state": 3, "feedback_noise": 0.0}
    layer = Bedouin.recall(M, num_groups=num_groups, **shared).double()
    whole = Bedouin.recall(M, **shared).double()
    x = torch.randn(2, T, M, dtype=torch.float64)
    heads = [0] + [1 + i for i, group in enumerate(torch.arange(4).tensor_split(num_groups))
                   for _ in group]  # fmt: skip
    columns = torch.cat([torch.arange(3) + 3 * head for head in heads])

    def spread(weight: Tensor, sizes: dict[str, int]) -> Tensor:
        parts = dict(zip(sizes, weight.split(list(sizes.values())), strict=True))
        parts |= {name: parts[name][columns] for name in ("B", "C")}
        return torch.cat(list(parts.values()))

    given: dict[str, Tensor] = dict(layer.named_parameters())
    sizes = {"in_proj.weight": layer.projected_sizes, "conv.weight": layer._convolved_sizes()}
    given |= {name: spread(given[name], of) for name, of in sizes.items()}
    expected = torch.func.functional_call(whole, given, (x,))
    y = layer(x)
    assert_close("output", y, expected, 1e-12)
    leaves = [*layer.parameters()]
    grads = (torch.autograd.grad(v.sin().sum(), leaves) for v in (y, expected))
    for ours, theirs in zip(*grads, strict=True):
        assert_close("gradient", ours, theirs, 1e-10, atol=1e-13)


def test_one_head_reads_all_channels_in_both_scopes() -> None:
    head, whole = (make({"feedback_scope": scope}) for scope in ("head", "layer"))
    x = torch.randn(2, 5, M, dtype=torch.float64)
    assert torch.equal(head(x), whole(x))


def test_heads_that_read_all_channels_are_coupled() -> None:
    """A change of one head's channels reaches the others in the scope "layer" alone."""
    changed = {}
    for scope in ("head", "layer"):
        layer = make({"num_heads": 2, "feedback_scope": scope})
        x = torch.randn(1, 4, M, dtype=torch.float64)
        state = layer.init_state(1)
        other = BedouinState(state.ssm, state.y.clone())
        other.y[:, : layer.head_dim] += 1.0
        ends = [layer(x, state=s, return_state=True)[1].y for s in (state, other)]
        changed[scope] = (ends[0] - ends[1])[:, layer.head_dim :].abs().max().item()
    assert changed["head"] == 0 and changed["layer"] > 1e-6


@pytest.mark.parametrize("scope", ["head", "layer"])
@pytest.mark.parametrize("number", [1, 2])
def test_heads_without_feedback_have_a_w_y_of_zero(scope: str, number: int) -> None:
    options = {"num_heads": 4, "feedback_scope": scope}
    some, whole = make(options | {"feedback_heads": number}), make(options)
    assert some.y_proj is not None and whole.y_proj is not None
    # with feedback_scope="layer" what is read of the others is multiplied by the share of the heads
    factor = torch.ones(whole.y_proj.weight.shape[-1], dtype=torch.float64)
    factor[number * whole.head_dim :] = number / 4
    with torch.no_grad():
        some.y_proj.weight.uniform_(-1, 1)
        whole.y_proj.weight[:number] = factor * some.y_proj.weight
        whole.y_proj.weight[number:] = 0
    state = {k: v for k, v in some.state_dict().items() if k != "y_proj.weight"}
    whole.load_state_dict(state | {"y_proj.weight": whole.y_proj.weight})
    x = torch.randn(2, T, M, dtype=torch.float64)
    expected = layer_gradients(whole, x)
    for name, grad in layer_gradients(some, x).items():
        wanted = expected[name]
        if name == "y_proj.weight":
            wanted = (factor * wanted[:number]).view_as(grad)
        assert_close(name, grad, wanted, 1e-10, atol=1e-14)
    assert torch.equal(make(options | {"feedback_heads": 4})(x), make(options)(x))


def test_a_width_of_one_is_silu_alone() -> None:
    layer = make({"d_conv": 1})
    plain = make({})
    plain.load_state_dict({n: v for n, v in layer.state_dict().items() if "extra" not in n})
    assert layer.conv is not None and not list(layer.conv.parameters())
    x = torch.randn(2, 5, M, dtype=torch.float64)
    window = layer(x, return_state=True)[1].conv
    assert window is not None and window.shape == (2, 0, 2 * M)
    assert not torch.allclose(layer(x), plain(x))


def parts(layer: FixedPointLayer) -> Iterator[str]:
    yield from (name for name, size in layer.projected_sizes.items() if size)


def test_the_parts_of_the_projection() -> None:
    assert list(parts(make({}))) == ["x", "z"]
    everything = make({"projection": "input", "erase": 1.0, "num_heads": 2, "d_conv": 2})
    assert list(parts(everything)) == ["x", "delta", "B", "C", "erase", "mixer", "gate"]
    assert everything.in_proj.out_features == sum(everything.projected_sizes.values())
    assert everything.x_proj is None and everything.conv is not None
    assert everything.conv.bias is None and everything.conv.channels == 2 * M + 2 * 2 * 3
    vector = FixedPointRNN(M, projection="input", d_conv=2)
    assert list(parts(vector)) == ["x", "b", "decay", "mixer", "gate"]
    assert make({"d_conv": 2}).conv.bias is not None  # type: ignore[union-attr]


@pytest.mark.parametrize("projection", ["inner", "input"])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_little_is_erased_at_first(num_heads: int, projection: str) -> None:
    layer = make({"projection": projection, "erase": 2.0, "num_heads": num_heads})
    call = layer._project(torch.zeros(1, 1, M, dtype=torch.float64), None, layer.solve_options)
    f: Any = call.f
    erased = f.split(f.operands.raw).erase
    assert_close("erase", erased, torch.full_like(erased, 2 * 0.04743), 1e-3)


def test_biases_of_the_projection_are_not_decayed() -> None:
    layer = make({"projection": "input", "erase": 1.0, "num_heads": 2})
    assert layer.raw_bias is not None and layer.raw_bias.shape == (2 * (2 + 1),)
    _, exempt = param_groups(layer, weight_decay=0.1)
    assert {id(layer.raw_bias), id(layer.dt_bias)} <= {id(p) for p in exempt["params"]}
    assert hasattr(layer.raw_bias, "_no_weight_decay") and hasattr(
        layer.dt_bias, "_no_weight_decay"
    )


@pytest.mark.parametrize("projection", ["inner", "input"])
@pytest.mark.parametrize("decay", ["sigmoid", "griffin"])
@pytest.mark.parametrize("num_heads", [1, 2])
def test_the_vector_state(num_heads: int, decay: Any, projection: Any) -> None:
    layer = FixedPointRNN(
        M, num_heads=num_heads, decay=decay, projection=projection, d_conv=3, dtype=torch.float64
    )
    x = torch.randn(2, 4, M, dtype=torch.float64)
    expected = layer_gradients(layer, x, UnrolledAdjoint())
    for name, grad in layer_gradients(layer, x).items():
        assert_close(name, grad, expected[name], 1e-8, atol=1e-12)
    assert decode_gap(layer, x) < 1e-10


def test_recall_and_what_replaces_its_options() -> None:
    expected: dict[int, Any] = {24: (2, 1, 64, None), 64: (2, 1, 64, None)}
    expected |= {256: (7, 1, 128, 2), 768: (21, 2, 128, 6)}
    for d_model, (heads, fed, states, groups) in expected.items():
        with torch.device("meta"):
            layer = Bedouin.recall(d_model)
        assert (layer.num_heads, layer.head_dim) == (heads, 64)
        assert (layer.d_state, layer.num_groups) == (states, groups)
        assert layer.feedback == ("delta", "x") and layer.mixer.raw_size(64) == 0
        assert (layer.feedback_scope, layer.fed_heads) == ("layer", fed)
        assert layer.feedback_noise == 0.1 and not layer.bounded_x
        assert layer.initialization == Initialization(
            memory_heads=heads - fed, memory_rates=(0.01, 0.0001), memory_delta=10.0
        )
    one = Bedouin.recall(24, expand=2)
    assert (one.num_heads, one.fed_heads, one.initialization) == (1, 1, Initialization(rates=0.1))
    by_head = Bedouin.recall(64, expand=2, feedback_scope="head", feedback_heads=None)
    assert by_head.fed_heads == 2 and by_head.initialization == Initialization(rates=(1.0, 0.01))
    without = Bedouin.recall(64, feedback=())
    assert without.fed_heads == 0 and without.initialization.memory_heads == 2
    assert one.feedback_noise == by_head.feedback_noise == without.feedback_noise == 0
    assert isinstance(Bedouin.recall(64, mixer=LowRank(1)).mixer, LowRank)
    other = Bedouin.recall(64, num_householder=1, erase=0.0, d_conv=None, decay="griffin")
    assert other.mixer.raw_size(64) == 65 and other.conv is None and other.erase == 0
    with pytest.raises(TypeError, match="Bedouin has no option 'foo'"):
        Bedouin.recall(64, foo=1)


@pytest.mark.parametrize(
    ("options", "states", "groups"),
    [
        ({"d_state": 64}, 64, None),
        ({"feedback_heads": 7}, 64, None),
        ({"num_groups": 2}, 64, 2),
        ({"num_groups": None}, 64, None),
        ({"projection": "inner", "d_conv": None}, 64, None),
        ({"feedback": ()}, 128, 2),
        ({"num_heads": 2}, 128, 1),
    ],
)
def test_the_state_of_recall_and_what_replaces_it(
    options: dict[str, Any], states: int, groups: int | None
) -> None:
    with torch.device("meta"):
        layer = Bedouin.recall(256, **options)
    assert (layer.d_state, layer.num_groups) == (states, groups)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"d_model": 0}, ValueError, "d_model must be at least 1, got 0"),
        ({"d_model": "64"}, TypeError, "d_model must be an int >= 1, got '64'"),
        ({"num_heads": 4.0}, TypeError, "num_heads must be an int >= 1, got 4.0"),
        ({"num_heads": "4"}, TypeError, "num_heads must be an int >= 1, got '4'"),
        ({"feedback_heads": 3}, ValueError, "feedback_heads must be at most num_heads = 2"),
        ({"feedback_heads": "1"}, TypeError, "feedback_heads must be an int >= 1 or None, got '1'"),
    ],
)
def test_errors_of_recall_name_what_was_given(
    options: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Bedouin.recall(**{"d_model": 64, **options})


def test_recall_takes_what_bedouin_takes_for_feedback() -> None:
    without = Bedouin.recall(64, feedback=iter(()))
    assert without.feedback == () and without.initialization.memory_heads == 2


def test_errors_of_options() -> None:
    with pytest.raises(ValueError, match="erase must lie in .0, 2., got 2.5"):
        Bedouin(M, erase=2.5)
    with pytest.raises(ValueError, match='feedback of "erase" needs erase > 0'):
        Bedouin(M, feedback=("erase",))
    with pytest.raises(ValueError, match="feedback_scope must be one of"):
        Bedouin(M, feedback_scope="all")  # type: ignore[arg-type]
    fixed: dict[str, Any] = {"erase": 1.0, "projection": "input", "d_conv": 4}
    for name, value in fixed.items():
        with pytest.raises(TypeError, match=f"{name} of from_paper is fixed by the paper"):
            Bedouin.from_paper(M, **{name: value})
    layer, plain = make({"d_conv": 3}), make({})
    with pytest.raises(ValueError, match="state.conv must be None, since the layer has no conv"):
        plain.step(torch.randn(2, M, dtype=torch.float64), layer.init_state(2))
    with pytest.raises(ValueError, match=r"state.conv must be a tensor of shape \(2, 2, 16\)"):
        layer.step(torch.randn(2, M, dtype=torch.float64), plain.init_state(2))
    with pytest.raises(ValueError, match="states of one layer, got one with 2 and one with 3"):
        BedouinState.cat([plain.init_state(1), layer.init_state(1)])
