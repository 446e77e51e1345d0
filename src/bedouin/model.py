"""A sequence model around any mixing layer, and a layer that reads a sequence from both ends.

Letters: b batch, t time, m d_model, v classes (output_size).
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Self, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bedouin import checks
from bedouin.generation import Sampling, generate
from bedouin.layers import common
from bedouin.packing import find_packing
from bedouin.state import SequenceCall

CallKind = Literal["whole", "chunk", "token"]
"""What a call of a `Block` computes: a sequence, a sequence from a state, one token."""
ModelState = tuple[Any, ...]  # one state for each layer, of the type that its mixer returns


class _Embedding(nn.Embedding):
    """An embedding whose initial values have a standard deviation of its own."""

    def __init__(self, vocab_size: int, d_model: int, std: float, **factory: Any) -> None:
        self.std = std  # torch's constructor draws a weight
        super().__init__(vocab_size, d_model, **factory)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class _TiedHead(nn.Linear):
    """A head with the weight of an embedding, which is also drawn as there."""

    def __init__(self, embedding: _Embedding) -> None:
        self.std = embedding.std
        classes, m = embedding.weight.shape
        super().__init__(m, classes, bias=False, device="meta")
        self.weight = embedding.weight

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=self.std)


class GatedMLP(nn.Module):
    """SwiGLU (arXiv 2002.05202), W_2 (SiLU(W_g x) ⊙ W_1 x), of expand * d_model hidden units."""

    def __init__(self, d_model: int, expand: float, **factory: Any) -> None:
        super().__init__()
        hidden = max(1, round(expand * d_model))
        self.in_proj = nn.Linear(d_model, 2 * hidden, bias=False, **factory)
        self.out_proj = nn.Linear(hidden, d_model, bias=False, **factory)

    def forward(self, x: Tensor) -> Tensor:  # (..., m) -> (..., m)
        gate, value = self.in_proj(x).chunk(2, dim=-1)
        output: Tensor = self.out_proj(F.silu(gate) * value)
        return output


class ResidualBlock(nn.Module):
    """A pre-norm block: x + mixer(norm(x)), then x + mlp(norm(x)) with an mlp_expand."""

    def __init__(
        self,
        d_model: int,
        mixer: nn.Module,
        mlp_expand: float | None,
        norm_eps: float,
        **factory: Any,
    ) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(d_model, eps=norm_eps, **factory)
        self.mixer = mixer
        self.mlp: nn.Sequential | None = None
        if mlp_expand is not None:
            norm = nn.RMSNorm(d_model, eps=norm_eps, **factory)
            self.mlp = nn.Sequential(norm, GatedMLP(d_model, mlp_expand, **factory))

    def _residual(self, x: Tensor, mixed: Tensor) -> Tensor:  # (..., m), (..., m) -> (..., m)
        """x with the mixer's output, and then the MLP's, added."""
        x = x + mixed
        return x if self.mlp is None else x + self.mlp(x)


class Block(ResidualBlock):
    """A block of a `SequenceModel`."""

    def forward(
        self, x: Tensor, state: Any = None, run: CallKind = "whole", mask: Tensor | None = None
    ) -> Any:  # (b, t, m), (b, t)
        """(b, t, m) -> (b, t, m), and with another `run` than "whole" also the state after it.
        Chunks and tokens (b, m) are calls, as hooks such as those of FSDP run in calls alone."""
        normed, mixer = self.norm(x), self.mixer
        options = {} if mask is None else {"mask": mask}
        if mask is not None:
            checks.check_takes_mask(mixer)
        if run == "whole":
            return self._residual(x, _mixed(mixer, mixer(normed, **options), x))
        if run == "chunk":
            checks.find_method(mixer, "init_state")
            output, state = mixer(normed, state=state, return_state=True, **options)
        else:
            output, state = checks.find_method(mixer, "step")(normed, state)
        return self._residual(x, _mixed(mixer, output, x)), state


class SequenceModel(nn.Module):
    """An embedding, pre-norm residual blocks around the given mixers, RMSNorm and a linear head.

        model = SequenceModel(60, 128, [Bedouin(128)])                                  # one layer
        model = SequenceModel(60, 128, lambda i: Bedouin(128, layer_idx=i), num_layers=2)
        model = SequenceModel(60, 128, [Bedouin(128), Attention(128), Bedouin(128)])    # a hybrid
        logits = model(tokens)                                           # (b, t) -> (b, t, v)

    A mixer is any module (b, t, m) -> (b, t, m), here also `bedouin.baselines.Attention`; if it
    returns a tuple, as flash-linear-attention's layers do, the first entry is used. `init_state`,
    `step` and states in `forward` work if every mixer has `init_state(batch_size)`,
    `step(x, state)` and `forward(x, state=…, return_state=True)`, as `bedouin.Bedouin` has.

    The model does not synchronize with the device and does not write in place, so it runs under
    `torch.func.functional_call` and `vmap` over stacked parameters if its mixers do.

    Args:
        vocab_size, d_model: number of input ids, and width m of the residual stream.
        mixers: the mixing layers, or a function from the index of a layer to its mixer, which
            requires `num_layers`. They keep their device and dtype.
        num_layers: number of layers, only if `mixers` is a function.
        output_size: number of classes v; None: `vocab_size`.
        mlp_expand: hidden width of a gated MLP after every mixer, times d_model; None: no MLP.
        norm_eps: epsilon of every RMSNorm.
        embedding_std: standard deviation of the initial embedding.
        tie_embeddings: share the embedding's weight with the head. Use a smaller `embedding_std`
            (d_model**-0.5) in this case, or the first logits are large.
        device, dtype: of all parameters except the mixers'.

    Raises TypeError for arguments of another type and a missing `num_layers`, ValueError for a
    number out of range, no mixer, an unneeded `num_layers`, and a tied head with other classes.
    """

    saved_options = ("norm_eps", "tie_embeddings")
    settable_options = ()
    num_calls = 0

    __setattr__, _load_from_state_dict = common.set_attribute, common.load_parameters
    get_extra_state, set_extra_state = common.save_options, common.load_options
    number_options = common.number_options

    @checks.known_options
    def __init__(
        self,
        vocab_size: int,
        d_model: int,
        mixers: Sequence[nn.Module] | Callable[[int], nn.Module],
        *,
        num_layers: int | None = None,
        output_size: int | None = None,
        mlp_expand: float | None = None,
        norm_eps: float = 1e-5,
        embedding_std: float = 1.0,
        tie_embeddings: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        output_size = vocab_size if output_size is None else output_size
        sizes = {"vocab_size": vocab_size, "d_model": d_model, "output_size": output_size}
        for name, size in sizes.items():
            checks.positive_int(name, size)
        if mlp_expand is not None:
            checks.check_number("mlp_expand", mlp_expand, 0, 1e3, open_low=True)
        checks.check_number("norm_eps", norm_eps, 0, 1, open_low=False)
        checks.check_number("embedding_std", embedding_std, 0, 1e3, open_low=False)
        checks.check_bool("tie_embeddings", tie_embeddings)
        self.norm_eps, self.tie_embeddings = norm_eps, tie_embeddings
        checks.check_dtype(dtype)
        if tie_embeddings and vocab_size != output_size:
            raise ValueError(
                f"tie_embeddings needs output_size = vocab_size = {vocab_size}, got {output_size}"
            )
        layers = _make_mixers(mixers, num_layers, d_model)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.embedding = _Embedding(vocab_size, d_model, embedding_std, **factory)
        blocks = (Block(d_model, mixer, mlp_expand, norm_eps, **factory) for mixer in layers)
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(d_model, eps=norm_eps, **factory)
        self.head: nn.Linear
        if tie_embeddings:
            self.head = _TiedHead(self.embedding)
        else:
            self.head = nn.Linear(d_model, output_size, bias=False, **factory)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """As torch's, which replaces parameters one module at a time: a tied weight stays so."""
        is_tied = isinstance(self.head, _TiedHead) and self.head.weight is self.embedding.weight
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if is_tied:
            self.head.weight = self.embedding.weight
        return self

    def forward(
        self,
        tokens: Tensor,  # (b, t) integer ids
        state: ModelState | None = None,
        return_state: bool = False,
        one_token: bool = False,
        *,
        mask: Tensor | None = None,  # (b, t)
        cu_seqlens: Tensor | None = None,  # (documents + 1,)
        seq_idx: Tensor | None = None,  # (b, t)
    ) -> Any:
        """Logits (b, t, v); with `return_state` also the state after the last token.

        Chunks, mask, cu_seqlens and seq_idx are as in `Bedouin`. Padding may be any number; its
        logits are 0. `step` is a call with `one_token`, so that hooks of the model run for it, too.

        Raises TypeError for tokens that are not int64 or int32, for states, padding or documents
        that a mixer does not take, ValueError for another rank or number of states.
        """
        if one_token:
            _check_tokens(tokens, 1, "(b,)")
            x, state = self._run_blocks(self.embedding(tokens), cast(ModelState, state), "token")
            return self._logits(x), state
        _check_tokens(tokens, 2, "(b, t)")
        packing = find_packing(tokens, mask, cu_seqlens, seq_idx)
        ids, real = packing.take(tokens), packing.mask_of_sequences
        if packing.lengths is not None and real is None:
            for mixer in self.mixers:
                checks.check_takes_mask(mixer)
        x = self.embedding(ids)  # (b, t, m)
        if state is None and not return_state:
            for block in self.blocks:
                x = block(x, mask=real)
            return packing.put(self._logits(x), tokens.shape)
        if state is None:
            state = self.init_state(ids.shape[0])
        elif packing.first is not None:
            pairs = zip(self._checked_states(state), self.init_state(1), strict=True)
            state = tuple(packing.before(*pair) for pair in pairs)
        x, state = self._run_blocks(x, state, "chunk", real)
        logits = packing.put(self._logits(x), tokens.shape)
        state = tuple(packing.after(after) for after in state)
        return (logits, state) if return_state else logits

    if TYPE_CHECKING:
        __call__: SequenceCall[ModelState]  # torch's is a Callable[..., Any]

    def generate(
        self,
        prompt: Tensor,  # (b, t) integer ids
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        eos: int | None = None,
        mask: Tensor | None = None,  # (b, t)
        generator: torch.Generator | None = None,
    ) -> Tensor:  # (b, t + max_new_tokens)
        """The prompt and new tokens, one step of the model for each.

        temperature: 0 takes the most probable token; otherwise logits are divided by it, and a
            token is drawn. top_k: from the k most probable ones; top_p: from the fewest that have
            this probability together. generator: of the draws, on the model's device.
        eos: a sample that has produced this id goes on with it. mask: True for the real tokens of
            the prompt; padding stays where it is in the result.

        Raises TypeError for a prompt that is not a tensor of ids and mixers without states,
        ValueError for a prompt of another shape, or with a row without real tokens, options that
        do not fit, and a model whose classes are not its input ids.
        """
        sampling = Sampling(temperature, top_k, top_p, generator)
        return generate(self, prompt, max_new_tokens, sampling, eos=eos, mask=mask)

    def init_state(self, batch_size: int) -> ModelState:
        """The state before the first token, one entry a layer; TypeError for a mixer without."""
        return tuple(checks.find_method(mixer, "init_state")(batch_size) for mixer in self.mixers)

    def step(self, tokens: Tensor, state: ModelState) -> tuple[Tensor, ModelState]:  # (b,)
        """The logits (b, v) at one token, and the next state. Raises as a call."""
        found: tuple[Tensor, ModelState] = self(tokens, state, True, one_token=True)
        return found

    @property
    def mixers(self) -> list[nn.Module]:
        """The mixing layers, first to last."""
        # blocks not by their type, since FSDP1 and wrappers for checkpointing take their place
        return [cast(Block, block).mixer for block in self.blocks]

    @property
    def stats(self) -> list[Any]:
        """The `stats` of the last call of every mixer that has any, such as `SolveStats`."""
        kept = (getattr(mixer, "stats", None) for mixer in self.mixers)
        return [stats for stats in kept if stats is not None]

    def _run_blocks(
        self, x: Tensor, state: ModelState, run: CallKind, mask: Tensor | None = None
    ) -> tuple[Tensor, ModelState]:  # (..., m), (b, t) -> (..., m) and the states
        """Each block in turn, with its entry of `state`."""
        states: list[Any] = []
        for block, before in zip(self.blocks, self._checked_states(state), strict=True):
            x, after = block(x, before, run, mask)
            states.append(after)
        return x, tuple(states)

    def _checked_states(self, state: ModelState) -> ModelState:
        """`state`; TypeError or ValueError unless it has one entry for each layer."""
        start = "start from model.init_state(batch_size)"
        if not isinstance(state, tuple | list) or hasattr(state, "_fields"):
            raise TypeError(
                "state must be a tuple with one entry for each layer, got "
                f"{type(state).__name__}: {start}"
            )
        if len(state) != len(self.blocks):
            raise ValueError(
                f"state must have one entry for each of the {len(self.blocks)} layers, got "
                f"{len(state)}: {start}"
            )
        return state

    def _logits(self, x: Tensor) -> Tensor:  # (..., m) -> (..., v)
        logits: Tensor = self.head(self.norm(x))
        return logits


class Bidirectional(nn.Module):
    """The sum of a layer on x and of another on x reversed in time, (b, t, m) -> (b, t, m).

        layer = Bidirectional(Bedouin(64), Bedouin(64))

    The result of the second layer is reversed back, and the tokens of each row or document are
    reversed among themselves. There is no state and no `step`, because `backwards` begins with the
    last token; `forwards` itself as `backwards` shares weights.

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
        """mask, cu_seqlens and seq_idx as in `Bedouin`; TypeError where a layer takes no mask."""
        options = {"mask": mask, "cu_seqlens": cu_seqlens, "seq_idx": seq_idx}
        given = {name: value for name, value in options.items() if value is not None}
        if given:
            for layer in (self.forwards, self.backwards):
                checks.check_takes_mask(layer)
        # the same for x reversed in time
        reversed_options = {
            name: x.shape[1] - value.flip(0) if name == "cu_seqlens" else value.flip(1)
            for name, value in given.items()
        }
        ahead = _mixed(self.forwards, self.forwards(x, **given), x)
        behind = _mixed(self.backwards, self.backwards(x.flip(1), **reversed_options), x)
        return ahead + behind.flip(1)

    @property
    def stats(self) -> tuple[Any, Any] | None:
        """The `stats` of the last call of both layers; None before any call."""
        both = tuple(getattr(layer, "stats", None) for layer in (self.forwards, self.backwards))
        return None if both == (None, None) else (both[0], both[1])


def _mixed(mixer: nn.Module, output: object, x: Tensor) -> Tensor:  # x: (..., m)
    """The tensor that `mixer` returned; TypeError or ValueError unless it is like x."""
    tensor = output[0] if isinstance(output, tuple) and output else output
    must = f"mixer {type(mixer).__name__} must return"
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{must} a tensor of the shape of its input, or a tuple that begins with one, got "
            f"{type(output).__name__}"
        )
    if tensor.shape != x.shape:
        raise ValueError(
            f"{must} the shape of its input, {tuple(x.shape)}, got {tuple(tensor.shape)}"
        )
    return tensor


def _check_tokens(tokens: Tensor, rank: int, shape: str) -> None:
    """Raise TypeError or ValueError unless `tokens` are integer ids of `rank` axes."""
    checks.check_tensor("tokens", tokens, shape)
    if tokens.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"tokens must be int64 or int32 ids, got {tokens.dtype}")
    if tokens.ndim != rank:
        raise ValueError(f"tokens must have shape {shape}, got {tuple(tokens.shape)}")


def _make_mixers(
    mixers: Sequence[nn.Module] | Callable[[int], nn.Module], num_layers: int | None, d_model: int
) -> list[nn.Module]:
    """The mixers as a list. Raises TypeError or ValueError for invalid arguments."""
    if isinstance(mixers, Sequence | nn.ModuleList):
        if not mixers:
            raise ValueError("mixers must contain at least one layer, got none")
        if num_layers is not None:
            raise ValueError(
                f"num_layers must be None if mixers is a sequence, got {num_layers} and "
                f"{len(mixers)} mixers: leave it out"
            )
        made = list(mixers)
    elif callable(mixers) and not isinstance(mixers, nn.Module):
        made = [mixers(index) for index in range(checks.positive_int("num_layers", num_layers))]
    else:
        raise TypeError(
            "mixers must be a sequence of modules, as [Bedouin(64)], or a function that makes one, "
            f"got {type(mixers).__name__}"
        )
    for mixer in made:
        if not isinstance(mixer, nn.Module):
            raise TypeError(f"mixers must be nn.Modules, got {type(mixer).__name__}")
        width = getattr(mixer, "d_model", d_model)
        if isinstance(width, int) and width != d_model:
            raise ValueError(
                f"mixers must have the model's d_model={d_model}, got "
                f"{type(mixer).__name__} with d_model={width}"
            )
    return made
