"""TrackingDeltaNet, Tracker and GatedDeltaNet: the recurrence, token by token, and its laws.

Letters: b batch, t time, m d_model, h heads, p key channels and v value channels of a head of the
memory, H trackers, c channels of a tracker, n states of a channel.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.equations import delta_rule
from tests.messages import of, refused
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bedouin import Decoder, GatedDeltaNet, SequenceModel, Tracker, TrackingDeltaNet

M = 8
FLOAT64: dict[str, Any] = {"dtype": torch.float64}
TRACKER: dict[str, Any] = {"tracker_dim": 4, "tracker_state": 3}
LAYERS: dict[str, Callable[..., Any]] = {
    "tracking": partial(TrackingDeltaNet, M, **TRACKER),
    "two trackers": partial(TrackingDeltaNet, M, num_trackers=2, num_heads=1, **TRACKER),
    "tracker": partial(Tracker, M, **TRACKER),
    "two trackers alone": partial(Tracker, M, num_trackers=2, **TRACKER),
    "memory": partial(GatedDeltaNet, M, num_heads=3, head_dim=4, expand_v=1.5),
}
layers = pytest.mark.parametrize("name", LAYERS)


def make(name: str, **options: Any) -> Any:
    """A layer in which what begins at zero, or small, does not."""
    layer = LAYERS[name](**FLOAT64 | options)
    with torch.no_grad():
        for parameter_name, parameter in layer.named_parameters():
            if "read_proj" in parameter_name:
                parameter.normal_(std=0.3)
            if "y_proj" in parameter_name:
                parameter.mul_(5)
    return layer


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, **FLOAT64)


def convolved(window: list[Tensor], weight: Tensor, v: Tensor) -> Tensor:
    """The convolution at a token, with the inputs before it in `window`, which moves on."""
    window.append(v)
    out: Tensor = sum(weight[:, i] * w for i, w in enumerate(window))  # type: ignore[assignment]
    window.pop(0)
    return out


def tracker_by_hand(layer: Any, u: Tensor, read: Tensor | None) -> Tensor:
    """The output (b, t, m) of every token."""
    b, H, c, n = len(u), layer.num_trackers, layer.tracker_dim, layer.tracker_state
    W = layer.y_proj.weight.view(H, 3, c, c)  # of Delta, x and the gate
    h, y = u.new_zeros(b, H, c, n), u.new_zeros(b, H, c)
    window = [u.new_zeros(b, layer.conv.channels) for _ in range(3)]
    outputs = []
    for i, u_t in enumerate(u.unbind(1)):
        x, B, C, delta, erase, gate = layer.in_proj(u_t).split(
            [H * c, H * n, H * n, H * c, H, H * c], -1
        )
        convolutions = convolved(window, layer.conv.weight, torch.cat([x, B, C], -1))
        x_conv, B, C = (w.view(b, H, -1) for w in convolutions.split([H * c, H * n, H * n], -1))
        skip = x = F.silu(x_conv)
        B, C = F.silu(B), F.silu(C)
        if read is not None:
            of_x, of_delta = layer.read_proj(read[:, i]).chunk(2, -1)
            x, delta = F.silu(x_conv + of_x.view(b, H, c)), delta + of_delta
        B, C = (w * torch.rsqrt(w.square().sum(-1, keepdim=True) + n * 1e-6) for w in (B, C))
        fed = y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5)
        of_delta, of_x, of_gate = torch.einsum("hkij,bhj->kbhi", W, fed)
        step = F.softplus((delta + layer.dt_bias).view(b, H, c) + of_delta)
        beta = torch.sigmoid(erase + layer.erase_bias)[..., None, None]
        h = torch.exp(-layer.A_log.exp().view(H, c, n) * step[..., None]) * h
        h = h - beta * (h * B[:, :, None]).sum(-1, keepdim=True) * B[:, :, None]
        h = h + (step * (x + of_x))[..., None] * B[:, :, None]
        y = (h * C[:, :, None]).sum(-1)
        v = y + layer.D.view(H, c) * skip
        normed = v / torch.sqrt(v.square().mean(-1, keepdim=True) + layer.norm_eps)
        out = F.silu(gate.view(b, H, c) + of_gate) * normed * layer.norm_weight.view(H, c)
        outputs.append(layer.out_proj(out.flatten(1)))
    return torch.stack(outputs, 1)


def by_hand(layer: Any, u: Tensor) -> Tensor:
    if isinstance(layer, GatedDeltaNet):
        return delta_rule(layer, u, layer.init_state(len(u)))[1]
    if isinstance(layer, Tracker):
        return tracker_by_hand(layer, u, None)
    recalled, output = delta_rule(layer.memory, u, layer.memory.init_state(len(u)))
    return output + tracker_by_hand(layer.tracker, u, recalled)


def gradients(layer: Any, y: Tensor, u: Tensor) -> list[Tensor]:
    along = torch.linspace(-1, 1, y.numel(), **FLOAT64).view(y.shape)
    return list(torch.autograd.grad((y * along).sum(), [u, *layer.parameters()]))


@layers
@pytest.mark.parametrize("t", [1, 2, 63, 64, 65, 130])
def test_values_and_gradients_are_those_of_the_recurrence(name: str, t: int) -> None:
    layer, u = make(name).eval(), draw(2, t, M).requires_grad_()
    actual, expected = layer(u), by_hand(layer, u)
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-10)
    for ours, theirs in zip(
        gradients(layer, actual, u), gradients(layer, expected, u), strict=True
    ):
        scale = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9 * scale)


def test_many_tokens_stay_finite() -> None:
    layer = TrackingDeltaNet(M, **TRACKER).eval()
    with torch.no_grad():
        layer.memory.A_log.fill_(-12)  # hardly any decay
        layer.memory.b_proj.weight.mul_(30)  # beta near 0 and 2
        layer.tracker.A_log.sub_(6)
    output = layer(torch.randn(1, 6000, M))
    assert output.isfinite().all() and output.abs().max() < 100


def test_defaults_fit_every_width() -> None:
    for d_model in (16, 17, 64, 100):
        layer = TrackingDeltaNet(d_model)
        assert layer(torch.randn(1, 3, d_model)).isfinite().all()
        assert layer.tracker.tracker_state == 64
    with torch.device("meta"):
        memory, wide = TrackingDeltaNet(256).memory, TrackingDeltaNet(512)
    assert (memory.num_heads, memory.head_dim, memory.value_dim) == (2, 128, 256)
    assert (wide.memory.num_heads, wide.tracker.tracker_state) == (4, 128)


ANY: Any = TrackingDeltaNet
READING: Any = Tracker
U = torch.randn(2, 3, M)
test_bad_input_is_named = refused(
    [
        (of(ANY, M, num_head=2), TypeError, "did you mean 'num_heads'"),
        (of(ANY, M, head_dim=True), TypeError, "head_dim must be an int"),
        (of(ANY, M, expand_v=0), ValueError, "expand_v"),
        (of(ANY, M, num_trackers=0), ValueError, "num_trackers must be"),
        (of(ANY, M, tracker_dim=-1), ValueError, "tracker_dim must be"),
        (of(ANY, M, tracker_state=0), ValueError, "tracker_state must be"),
        (of(ANY, M, feedback_noise=-1.0), ValueError, "feedback_noise"),
        (of(ANY, M, norm_eps=0.0), ValueError, "norm_eps must be"),
        (of(ANY(M, backend="triton"), U), ValueError, "backend='triton' needs"),
        (of(READING(M, read_size=4, **TRACKER), U), ValueError, "read must be given"),
        (of(READING(M, **TRACKER), U, read=U), ValueError, "read must be given"),
        (of(READING(M, read_size=4), U, read=U), ValueError, "read must have shape"),
        (of(READING(M, read_size=M), U, read=U.double()), ValueError, "use read.to"),
        (of(READING, M, read_size=False), TypeError, "read_size must be an int"),
    ]
)


def test_a_tracker_takes_what_it_reads() -> None:
    layer = make("tracker", read_size=5).eval()
    u, read = draw(2, 7, M), draw(2, 7, 5)
    expected = tracker_by_hand(layer, u, read)
    torch.testing.assert_close(layer(u, read=read), expected, rtol=1e-9, atol=1e-10)
    _, state = layer(u[:, :6], read=read[:, :6], return_state=True)
    torch.testing.assert_close(layer.step(u[:, 6], state, read=read[:, 6])[0], expected[:, 6])
    mask = torch.tensor([[True] * 7, [True] * 4 + [False] * 3])
    masked = layer(u, read=read.masked_fill(~mask.unsqueeze(-1), torch.nan), mask=mask)
    torch.testing.assert_close(masked[1, :4], expected[1, :4])


# -- the noise of `feedback_noise` in training mode


def noisy(noise: float = 0.3, name: str = "two trackers alone") -> Any:
    torch.manual_seed(0)
    return make(name, feedback_noise=noise)


of_noise = pytest.mark.parametrize("name", ["two trackers alone", "tracking"])


def test_evaluation_has_no_noise() -> None:
    layer, plain, u = noisy(), noisy(0.0), draw(2, 7, M)
    assert not torch.equal(layer(u), plain(u))
    torch.testing.assert_close(layer.eval()(u), plain.eval()(u), rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recomputation_has_the_same_noise(use_reentrant: bool) -> None:
    found = []
    for checkpointed in (False, True):
        layer, u = noisy(), draw(2, 9, M).requires_grad_()
        y = checkpoint(layer, u, use_reentrant=use_reentrant) if checkpointed else layer(u)
        y.square().sum().backward()
        found.append([y, u.grad, *(p.grad for p in layer.parameters())])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-14)


def test_padding_stays_without_influence_whatever_noise_it_gets() -> None:
    """The memory passes through tokens of padding, whatever noise they get."""
    mask = torch.tensor([[True] * 4 + [False] * 5, [True] * 9])
    found = []
    for padding in (0.0, 3.0):
        layer, u = noisy(), draw(2, 9, M)
        u[~mask] = padding
        y, after = layer(u, mask=mask, return_state=True)
        found.append([y[mask], *after.tensors])
    torch.testing.assert_close(*found, rtol=1e-12, atol=1e-12)


@of_noise
def test_single_tokens_have_no_noise_in_training_mode(name: str) -> None:
    layer, u = noisy(name=name), draw(2, M)
    state = layer.init_state(2)
    stepped, decoded = layer.step(u, state)[0], Decoder(layer, 2)(u)
    expected, _ = layer.eval().step(u, state)
    torch.testing.assert_close(stepped, expected, rtol=0, atol=0)
    torch.testing.assert_close(decoded, expected, rtol=1e-12, atol=1e-12)


@of_noise
def test_generation_has_no_noise_its_prompt_included(name: str) -> None:
    model = SequenceModel(12, 8, [noisy(name=name)], dtype=torch.float64)
    prompt = torch.randint(12, (3, 6))
    generated = model.generate(prompt, 20)
    assert torch.equal(generated, model.eval().generate(prompt, 20))


def test_a_compiled_step_has_no_noise() -> None:
    layer, u = noisy(), draw(2, M)
    state = layer.init_state(2)
    step: Any = torch.compile(layer.step, fullgraph=True, backend="aot_eager")
    assert torch.equal(step(u, state)[0], step(u, state)[0])
    call: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert not torch.equal(call(draw(2, 3, M)), call(draw(2, 3, M)))
