"""Layers as mixers of mamba-ssm's `Block`, `MixerModel` and `MambaLMHeadModel`.

    Block(dim, partial(BedouinMixer, layer_idx=0), nn.Identity)

    for i, block in enumerate(model.backbone.layers):  # of MambaLMHeadModel
        block.mixer = BedouinMixer(512, layer_idx=i)
    model.generate(ids, max_length=100, cg=True)

Tested with mamba-ssm 2.3 (pip install ".[mamba]"), which it does not import.

Letters: b batch, t time, m d_model.
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from bedouin.integrations.layers import make_layer, mix
from bedouin.layers.common import without_noise
from bedouin.state import RecurrentState

States = tuple[Tensor, ...]  # the tensors of a layer's state


class BedouinMixer(nn.Module):
    """A layer, its attribute `layer`, with the constructor, call and cache of mamba-ssm's mixers.

    Args:
        d_model, layer_idx, device, dtype: as of `mamba_ssm.Mamba`. inference_params need the index.
        d_state, expand: as of `mamba_ssm.Mamba`, for a layer that has them; None: its defaults.
        d_conv: width of the layer's convolution; None for none, "default" for the layer's default.
        layer: the layer: "bedouin", "paper" (`Bedouin.from_paper`), "rnn" (`FixedPointRNN`),
            "tracking" (`TrackingDeltaNet`), these names themselves, "GatedDeltaNet" or "Tracker".
        options: other options of the layer.

    Raises what the layer raises.
    """

    def __init__(
        self,
        d_model: int,
        d_state: int | None = None,
        d_conv: int | Literal["default"] | None = "default",
        expand: float | None = None,
        *,
        layer: str = "Bedouin",
        layer_idx: int | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        sizes = {"d_state": d_state, "expand": expand}
        options |= {name: size for name, size in sizes.items() if size is not None}
        options |= {} if d_conv == "default" else {"d_conv": d_conv}
        options |= {"device": device, "dtype": dtype, "layer_idx": layer_idx}
        self.layer, self.layer_idx = make_layer(layer, d_model, **options), layer_idx

    def forward(
        self,
        hidden_states: Tensor,  # (b, t, m)
        inference_params: Any = None,  # mamba_ssm.utils.generation.InferenceParams
        *,
        mask: Tensor | None = None,  # (b, t)
        seq_idx: Tensor | None = None,  # (b, t)
        cu_seqlens: Tensor | None = None,  # (documents + 1,)
    ) -> Tensor:  # (b, t, m)
        """The mixed sequence, as of `Bedouin.forward`. With inference_params, the states that they
        hold for this layer are those before the sequence, or zeros if seqlen_offset is 0, and
        become those after it, in place, without the noise of feedback_noise. Raises ValueError for
        inference_params without a layer_idx, with cu_seqlens, or with states of too few rows."""
        if inference_params is None:
            packing = {"mask": mask, "seq_idx": seq_idx, "cu_seqlens": cu_seqlens}
            output: Tensor = self.layer(hidden_states, **packing)
            return output
        if cu_seqlens is not None:
            raise ValueError("cu_seqlens must be None with inference_params: use seq_idx")
        states = self._get_states_from_cache(inference_params, hidden_states.shape[0])
        before = self._read(states) if inference_params.seqlen_offset else None
        with without_noise():
            output, after = mix(self.layer, hidden_states, before, mask, seq_idx=seq_idx)
        _write(states, after)
        return output

    def step(self, hidden_states: Tensor, *states: Tensor) -> tuple[Tensor, ...]:  # (b, 1, m)
        """One token. The states are updated in place, and keep their addresses."""
        if hidden_states.dim() != 3 or hidden_states.shape[1] != 1:
            raise ValueError(
                f"hidden_states must have shape (b, 1, m), got {tuple(hidden_states.shape)}: "
                "call the mixer for more than one token"
            )
        output, after = self.layer.step(hidden_states.squeeze(1), self._read(states))
        _write(states, after)
        return output.unsqueeze(1), *states

    def allocate_inference_cache(
        self, batch_size: int, max_seqlen: int, dtype: torch.dtype | None = None, **unused: Any
    ) -> States:
        """The states before the first token, in the dtype of the solve, at least float32."""
        states: States = self.layer.init_state(batch_size).tensors
        return states

    def _read(self, states: States) -> RecurrentState:
        state: RecurrentState = self.layer.state_type._make(states)
        # autograd may save it, and `_write` overwrites it
        return state.clone() if torch.is_grad_enabled() else state

    def _get_states_from_cache(self, params: Any, batch_size: int) -> States:
        """This layer's states of the batch at batch_size_offset, made where there are too few."""
        if self.layer_idx is None:
            raise ValueError(
                "layer_idx must be an int for calls with inference_params, got None: use "
                "partial(BedouinMixer, layer_idx=i)"
            )
        start, kept = params.batch_size_offset, params.key_value_memory_dict
        states: States = kept.get(self.layer_idx, ())
        count, needed = len(states[0]) if states else 0, start + batch_size
        if states and count < needed and params.seqlen_offset:
            raise ValueError(
                f"hidden_states must have at most {max(count - start, 0)} rows, as many as "
                f"inference_params has states of layer {self.layer_idx} at batch_size_offset="
                f"{start}, got {batch_size}: a larger batch starts with seqlen_offset=0"
            )
        if not states or count < needed:
            made = self.allocate_inference_cache(needed, 0)
            # the rows before are those of other parts of the batch
            for new, old in zip(made, states, strict=False):
                new[:count] = old
            kept[self.layer_idx] = states = made
        return tuple(state[start:needed] for state in states)


@torch.no_grad()
def _write(states: States, state: RecurrentState) -> None:
    for kept, new in zip(states, state.tensors, strict=True):
        kept.copy_(new)
