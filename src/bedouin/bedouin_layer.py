"""Bedouin, the layer with a matrix-valued state, and the parameterization of its paper.

Letters: b batch, t time, m d_model, d d_inner, n d_state, p head_dim.
"""

from collections.abc import Collection, Mapping
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor, nn

from bedouin.checks import inner_size, known_options, one_of, ordered_subset, positive_int
from bedouin.heads import by_head, choose_fed_heads
from bedouin.kernels.backend import Backend
from bedouin.kernels.operands import Activation
from bedouin.kernels.scan import Eigenvalues, InputScale
from bedouin.layer import FixedPointLayer
from bedouin.mixers import ChannelMixer, HouseholderProduct
from bedouin.parameterization import (
    Decay,
    FeedbackScope,
    Initialization,
    OutputStage,
    Projection,
    SolveArguments,
    X,
    griffin_omega,
    make_mixer,
    warn_of_singular_systems,
)
from bedouin.parameters import (
    DELTA_RANGE,
    ERASE_BIAS,
    at_least_float32,
    factory_options,
    inverse_softplus,
    log_uniform,
)
from bedouin.solvers import Adjoint, Cap, OneStepAdjoint, Picard, Solver
from bedouin.solvers.base import check_number
from bedouin.solvers.reporting import OnUnconverged

RECALL_HEAD, RECALL_RATES, RECALL_SHARED_FROM = 64, (1.0, 0.01), 256
MEMORY_RATES, MEMORY_DELTA, MEMORY_NOISE = (0.01, 0.0001), 10.0, 0.1
"""Of `Bedouin.recall`: the channels of a head, the factors on the decay rates of the first and the
last head where all have feedback, and the d_model from which on memories share keys; where not all
heads have feedback, those factors of the heads without, the factor on their Delta, and the noise of
feedback; chosen by the trials (examples/results/history)."""


class Bedouin(FixedPointLayer):
    """A dense, selective RNN defined as the fixed point of channel mixing and a diagonal scan.

        layer = Bedouin(d_model)                          # in the place of Mamba(d_model)
        out = layer(u)                                    # (b, t, m) -> (b, t, m)
        out, state = layer(u, return_state=True)          # continue with layer(later, state)
        out_t, state = layer.step(u_t, state)             # one token, (b, m) -> (b, m)
        layer.stats                                       # of the last solve, for each sample

    With x, z = in_proj(u), the sequence y is the fixed point of

        x~_t = Q_t (x_t - y_t) + y_t                      mix the channels
        h_t  = lambda_t * h_{t-1} + (s_t * x~_t) B_t^T    scan over time, h: (d, n)
        y_t  = h_t C_t

    where Q, lambda, s, B, C and gate follow from raw_t = W^x x_t + W^y norm(y_{t-1}), and the layer
    returns out_proj(SiLU(gate_t + z_t) * norm(y_t + D * x_t)). Lengths b, t >= 0 are free; `mask`
    marks padding, `cu_seqlens` and `seq_idx` mark packed documents.

    Begin with num_heads (speed), d_state (size of the memory), num_householder (expressivity) and
    solver; d_model alone gives one sweep over time with the exact gradient.

    Source: Fixed-Point RNNs (arXiv 2503.10799), sections 4 and 5. `Bedouin.from_paper` is its
    exact parameterization. The defaults were chosen on the word problem of A5, by the accuracy of
    the worst seeds at the training length and the conditioning of the local systems; the input
    scale "delta" has the better medians at eight times that length (examples/results/history).

    Size:
        d_model: m, the width of input and output.
        d_state: n, the states of a channel. Parameters and time grow with it.
        expand: d = expand * m inner channels.
        num_heads: H, a divisor of d. The channels are H groups, each with Q_t, B_t, C_t, gate and
            both norms of its own, projected from its own x and y alone; the products with W^x and
            W^y have d / H columns and about 1 / H of the weights. in_proj and out_proj mix the
            heads. A layer of H heads is H layers of one head side by side; each converges by
            itself, and `stats` has the worst of a sample's heads. 1 is the layer of the paper.
            None: heads of 128 channels if d is a multiple of 128 and at least 512, else 1.

    Recurrence:
        num_householder: k, the reflections of Q_t; short for mixer=HouseholderProduct(k, beta_max).
            None: 2; 0: NoMixing().
        beta_max: the largest beta of a reflection I - beta u u^T. None: 1; 2 allows eigenvalues of
            Q down to -1.
        mixer: HouseholderProduct(...), LowRank(...), NoMixing() or another ChannelMixer. Its
            parameters are used in the dtype of the solve, at least float32, and all heads share
            them.
        decay: "mamba": Delta = softplus(raw), lambda = exp(-exp(A_log) Delta); "griffin": Delta =
            sigmoid(raw), lambda = exp(-8 softplus(omega) Delta).
        input_scale: s_t = "delta": Delta; "bounded_delta": Delta / (1 + Delta); "one_minus_decay":
            1 - |lambda|. With mamba decay, "delta" and mixing, local systems can become singular in
            training (SolveStats.conditioning), since Delta is unbounded: the constructor issues a
            UserWarning, unless k beta_max <= 0.01, with which Delta would have to exceed 100.
        eigenvalues: "positive": the decay is lambda; "full": it is 2 lambda - 1, in [-1, 1].
        projection: "inner": the raw values and the gate are projected from x of the head, as in the
            paper and in Mamba-1. "input": x, the raw values and the gate are one product of the
            layer's input, `in_proj`, whose parts are in `projected_sizes`, as in Mamba-2; there is
            then no z, and only Delta, alpha and beta^e have a bias, which is not decayed.
        d_conv: the width of a causal convolution of each channel by itself, with SiLU, over x, or
            with projection="input" over x, B and C; feedback is added after it. 1: SiLU alone.
            None: neither.
        output: "norm" as above, or "paper": gate * SiLU(y + D * x) without z and norm.
        bias: whether the projections of x other than that to Delta have a bias.
        initialization: other initial values of Delta, the decay rates, D and W^y; None:
            Initialization().

    Feedback:
        feedback: which of "delta", "B", "C", "mixer", "erase" and "x" depend on y_{t-1}; ()
            switches all feedback off, also that of the gate. "x": x_t + W^y norm(y_{t-1}) takes the
            place of x_t in mixing and scan.
        feedback_norm: whether RMSNorm is applied to y_{t-1} before W^y.
        feedback_init: factor on W^y at initialization.
        feedback_scope: "head": W^y of a head reads the y_{t-1} of that head; "layer": those of all
            heads, so that a sample's heads converge together.
        feedback_heads: how many heads, the first ones, have feedback; None: all. The others have no
            parameters W^y: what they write, erase and read depends on the input alone, and they
            are swept before the first heads. With feedback_scope="layer" these read the outputs of
            the others, too, times feedback_heads / num_heads and at first with weights of zero:
            without the factor associative recall is often not learned
            (examples/results/feedback-heads).
        feedback_noise: standard deviation of Gaussian noise that training calls of `forward` add,
            in heads with feedback, to x and the raw values that have it, which stands for an error
            in what is fed back. `step`, `Decoder` and `generate`, its prompt included, draw none.
            With bounded_x and two heads of seven, models of A5 were then right at 128 times the
            training length (examples/results/feedback-heads). The noise comes from torch's default
            generator, so that activation checkpointing needs preserve_rng_state=True.
        bounded_x: whether x of heads with feedback of x becomes tanh(x_t + W^y norm(y_{t-1})).
            Without it errors in the state that such a head tracks were found neither to grow nor to
            fade, so that they add up beyond the training length. With it they faded on S3, while
            A5 needed feedback_noise, too (examples/results/feedback-heads).

    Memories:
        erase: the largest beta^e = erase sigmoid(raw), in [0, 2], one number a head and token: the
            share of what the memory holds under the token's key B that it gives up before the token
            is written, as in the delta rule. a_t - beta^e_t (a_t B_t) B_t^T then takes the place of
            a_t = lambda_t * h_{t-1}. Above 1 it may be negated. It begins near 0.05 erase, with
            bias=False at 0.5 erase. 0: none, and no raw value. Kernels for erase and for feedback
            of x are those of the exact sweep of heads with at most 64 channels (without feedback
            256 with a memory of at most 4,096 values) and 128 states, k <= 4, another input scale
            than "one_minus_decay" and feedback of nothing but Delta and x, and with
            feedback_scope="layer" without reflections; other layers with these options run in plain
            PyTorch on a GPU, too.
        num_groups: in how many groups the heads without feedback share B and C, and with erase
            their keys, as Mamba-2's ngroups; None: every head has its own. It needs
            projection="input". A memory of 64 channels and 128 states then costs about as many
            parameters as one of 64 channels and 64 states with keys of its own.

    Solve:
        solver: a solver object such as Picard(rtol=1e-4), or "auto": Direct where the mixer has the
            form (e, U, M), else Picard.
        adjoint: the gradient, such as OneStepAdjoint(); None: ImplicitAdjoint(), the exact one.
        max_steps: an int or a Cap. Direct needs none.
        on_unconverged: "warn" issues a ConvergenceWarning at the 1st, 10th, 100th, ... call of this
            layer that does not converge, "raise" raises a ConvergenceError, "ignore" does neither.
            Applies to the forward solve and to the adjoint solve in the backward pass (see
            ImplicitAdjoint).
        backend: "auto", "triton" or "reference". On a GPU "auto" warns of a layer whose sweep has
            no Triton kernel.

    Precision:
        dtype, device: of the parameters; the solve and the state are at least float32.
        norm_eps: eps of the output norm.
        layer_idx: stored for callers that keep a cache per layer.

    Raises TypeError for unknown options and values of the wrong type, ValueError for values that do
    not fit.
    """

    components = ("delta", "B", "C", "mixer", "erase")
    projected_components = ("delta", "B", "C", "erase", "mixer")
    fed_names = (*components, X)
    selective = True
    absent_options: ClassVar[dict[str, str]] = {
        "delta_from_x_init": "use initialization=Initialization(delta_from_x=...)",
        "rate_scale": "use initialization=Initialization(rates=...)",
    }
    delta_activations: ClassVar[dict[str, Activation]] = {"mamba": "softplus", "griffin": "sigmoid"}

    A_log: nn.Parameter

    @known_options
    def __init__(
        self,
        d_model: int,
        *,
        d_state: int = 16,
        expand: float = 2,
        num_heads: int | None = None,
        num_householder: int | None = None,
        beta_max: float | None = None,
        mixer: ChannelMixer | None = None,
        decay: Decay = "mamba",
        input_scale: InputScale = "bounded_delta",
        eigenvalues: Eigenvalues = "positive",
        erase: float = 0.0,
        projection: Projection = "inner",
        d_conv: int | None = None,
        feedback: Collection[str] = ("delta", "B", "C", "mixer"),
        feedback_norm: bool = True,
        feedback_init: float = 0.1,
        feedback_scope: FeedbackScope = "head",
        feedback_heads: int | None = None,
        num_groups: int | None = None,
        bounded_x: bool = False,
        feedback_noise: float = 0.0,
        norm_eps: float = 1e-5,
        solver: Solver | Literal["auto"] = "auto",
        adjoint: Adjoint | None = None,
        max_steps: int | Cap = 100,
        backend: Backend = "auto",
        on_unconverged: OnUnconverged = "warn",
        output: OutputStage = "norm",
        bias: bool = True,
        initialization: Initialization | None = None,
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        self.decay = one_of("decay", decay, tuple(self.delta_activations))
        self.initialization = Initialization() if initialization is None else initialization
        if not isinstance(self.initialization, Initialization):
            raise TypeError(
                "initialization must be None or an Initialization such as Initialization(rates="
                f"0.1), got {initialization!r}"
            )
        for name in ("rates", "memory_rates", "memory_delta"):
            factor = getattr(self.initialization, name)
            if self.decay != "mamba" and factor not in (None, 1, (1, 1)):
                raise ValueError(
                    f"initialization.{name} must be 1 with decay {decay!r}, got {factor!r}: use "
                    "decay='mamba', whose rates -A or Delta it multiplies"
                )
        check_number("erase", erase, 0, 2, open_low=False)
        self.erase = float(erase)
        mixer = make_mixer(mixer, num_householder, beta_max)
        super().__init__(
            d_model,
            d_state=d_state,
            expand=expand,
            num_heads=num_heads,
            mixer=mixer,
            input_scale=input_scale,
            eigenvalues=eigenvalues,
            feedback=feedback,
            feedback_norm=feedback_norm,
            feedback_init=feedback_init,
            feedback_scope=feedback_scope,
            feedback_heads=feedback_heads,
            num_groups=num_groups,
            bounded_x=bounded_x,
            feedback_noise=feedback_noise,
            d_conv=d_conv,
            projection=projection,
            norm_eps=norm_eps,
            output=output,
            bias=bias,
            solve=SolveArguments(solver, adjoint, max_steps, on_unconverged, backend),
            layer_idx=layer_idx,
            device=device,
            dtype=dtype,
        )
        if self.initialization.memory_heads > self.num_heads:
            raise ValueError(
                f"initialization.memory_heads must be at most num_heads = {self.num_heads}, got "
                f"{self.initialization.memory_heads}: give fewer, or more heads"
            )
        warn_of_singular_systems(mixer, self.decay, self.input_scale)
        if decay == "mamba":
            size, factory = (self.d_inner, self.d_state), factory_options(device, dtype)
            self.A_log = nn.Parameter(torch.empty(size, **factory))
        self.reset_parameters()

    @classmethod
    def recall(cls, d_model: int, **options: Any) -> Self:
        """A layer that tracks a state and recalls what a sequence contains.

        It has seven heads of 64 channels for each 256 of d_model, at least two. One head in eight,
        at least one, has feedback, of Delta and x, and reads the outputs of all
        (feedback_scope="layer"). The others are memories that the input alone writes, erases and
        reads: they begin without D, with ten times the usual Delta, and with decay rates whose
        factor falls from 0.01 in the first to 0.0001 in the last. In training mode, noise of
        standard deviation 0.1 is added to Delta and x of the heads with feedback (feedback_noise),
        so that they track states over more tokens. x, raw values and gate are projected from the
        input with a convolution of width 4, erase is at most 1, the input scale is Delta, and
        Q = I. The trials behind it: examples/results/feedback-heads and many-states.

        From a d_model of 256 on it has 128 states, and the memories share B, C and keys of erase in
        d_model // 128 groups (num_groups). Where d_model is smaller, or `d_state` or `num_groups`
        is given, or no head is a memory, it has 64 states and every head has its own keys, unless
        the arguments say otherwise. d_state=64 has 1 to 7 % more parameters than 128 states with
        shared keys, trains 1.6 to 1.9 times as fast, and tracks and recalls less reliably at a
        d_model of 256 (`recall_n64` in examples/results/table). At 512, with the rates of 256, it
        copied further; at equal rates, with one seed, less far (examples/results/table-wide).

        The other arguments are those of Bedouin; one that is given replaces the value named here.
        With `expand` the heads have 64 channels where these divide d, else one head has all; with
        `num_heads` they have d / num_heads. Where every head has feedback, as with
        feedback_heads=num_heads, the factor falls from 1 in the first to 0.01 in the last, and is
        0.1 of one head; there is no noise.
        """
        return cls(d_model, **recall_options(d_model, options))

    @classmethod
    def from_paper(
        cls,
        d_model: int,
        *,
        num_householder: int = 1,
        solver: Solver | Literal["auto"] | None = None,
        adjoint: Adjoint | None = None,
        **options: Any,
    ) -> Self:
        """FP-Mamba exactly as in its paper (arXiv 2503.10799, section 5.3).

        It has one head, Griffin decay, input scale Delta, beta = 2 sigmoid(alpha), feedback to B,
        C, mixer and gate but not to Delta, no feedback norm, the output gate * SiLU(y* + D x)
        without norm, and a bias on Delta only. solver None: Picard with the paper's stop rule at
        0.1, which returns the last evaluation. adjoint None: the one-step gradient.

        For the paper's random caps, pass max_steps=GammaCap(4.0, 1.0, 100); for its initialization
        in the copying task, where the weights from x to Delta are zero (v1, section 4.5), pass
        initialization=Initialization(delta_from_x=0.0). `options` are other options of Bedouin; one
        that is fixed above raises TypeError.
        """
        fixed: dict[str, Any] = {
            "num_heads": 1,
            "mixer": HouseholderProduct(num_householder, beta_max=2.0),
            "decay": "griffin",
            "input_scale": "delta",
            "feedback": ("B", "C", "mixer"),
            "feedback_norm": False,
            "feedback_init": 1.0,
            "output": "paper",
            "bias": False,
            "erase": 0.0,
            "projection": "inner",
            "d_conv": None,
            "feedback_scope": "head",
            "feedback_heads": None,
            "num_groups": None,
            "bounded_x": False,
            "feedback_noise": 0.0,
        }
        named = fixed | {"beta_max": 2.0}
        for name in named.keys() & options.keys():
            raise TypeError(
                f"{name} of from_paper is fixed by the paper, here to {named[name]!r}, got "
                f"{options[name]!r}: leave it out, or make a Bedouin({name}=...)"
            )
        return cls(
            d_model,
            **fixed,
            solver=Picard(rtol=0.1, stop_rule="paper") if solver is None else solver,
            adjoint=OneStepAdjoint() if adjoint is None else adjoint,
            **options,
        )

    def reset_parameters(self) -> None:
        super().reset_parameters()
        with torch.no_grad():
            if self.erase and self.raw_bias is not None:
                # the last raw value; with x_proj the gate's biases follow
                last = -1 if self.x_proj is None else -1 - self.head_dim
                by_head(self.raw_bias, self.num_heads)[..., last] = ERASE_BIAS
            if memory := self.initialization.memory_heads:
                first = self.num_heads - memory
                self.D.view(self.num_heads, -1)[first:] = 0
            if self.decay == "mamba":
                like = self.num_heads, self.head_dim, self.A_log
                self.A_log.copy_(self.initialization.A_log(*like))
                delta = log_uniform(self.dt_bias, *DELTA_RANGE)
                first = self.num_heads - self.initialization.memory_heads
                delta.view(self.num_heads, -1)[first:] *= self.initialization.memory_delta
                self.dt_bias.copy_(inverse_softplus(delta))
            else:
                self.omega.copy_(griffin_omega(self.omega))
                self.dt_bias.zero_()

    def _A(self) -> Tensor:
        if self.decay == "mamba":
            return -torch.exp(at_least_float32(self.A_log))
        return super()._A()


def recall_options(d_model: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `Bedouin.recall(d_model, **options)`, those given among them."""
    chosen: dict[str, Any] = {
        "d_state": 64,
        "projection": "input",
        "d_conv": 4,
        "erase": 1.0,
        "feedback": ("delta", "x"),
        "feedback_scope": "layer",
        "input_scale": "delta",
    }
    given = dict(options)
    # checked here because the values chosen below depend on them
    positive_int("d_model", d_model)
    if given.get("num_heads") is None:
        if given.get("expand") is None:
            given["num_heads"] = max(2, 7 * d_model // 256)
            given["expand"] = given["num_heads"] * RECALL_HEAD / d_model
        else:
            d = inner_size(given["expand"], d_model)
            given["num_heads"] = d // RECALL_HEAD if d % RECALL_HEAD == 0 else 1
    if given.get("mixer") is None and given.get("num_householder") is None:
        given["num_householder"] = 0
    heads = positive_int("num_heads", given["num_heads"])
    names = given.get("feedback", chosen["feedback"])
    feedback = given["feedback"] = ordered_subset("feedback", names, Bedouin.fed_names)
    if heads > 1 and feedback:
        chosen["feedback_heads"] = max(1, heads // 8)
    memory = heads - choose_fed_heads((chosen | given).get("feedback_heads"), heads, feedback)
    if feedback and memory:
        chosen["feedback_noise"] = MEMORY_NOISE
    is_sized = "d_state" in given or "num_groups" in given
    can_share_keys = memory > 0 and (chosen | given)["projection"] == "input"
    if d_model >= RECALL_SHARED_FROM and can_share_keys and not is_sized:
        chosen |= {"d_state": 128, "num_groups": min(memory, d_model // 128)}
    if given.get("decay", "mamba") != "mamba":
        initialization = Initialization(memory_heads=memory)
    elif memory:
        initialization = Initialization(
            memory_heads=memory, memory_rates=MEMORY_RATES, memory_delta=MEMORY_DELTA
        )
    else:
        initialization = Initialization(rates=RECALL_RATES if heads > 1 else 0.1)
    return {**chosen, "initialization": initialization, **given}
