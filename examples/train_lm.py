"""Train a language model of bytes on the source of Python's library, or on other text.

    python examples/train_lm.py                             # on a GPU if there is one, else the CPU
    python examples/train_lm.py --preset cpu --out runs/lm  # six minutes on two cores
    python examples/train_lm.py --text book.txt             # or a folder
    python examples/train_lm.py --resume                    # after Ctrl-C or a kill: continues
    python examples/train_lm.py --mixer-layer mamba --match-parameters 25000000
    accelerate launch examples/train_lm.py                  # several GPUs (--shard: FSDP2)
    torchrun --nproc-per-node 2 examples/train_lm.py        # the same, also on CPUs
    python examples/generate.py --run runs/lm               # text from the checkpoint

A row of a batch is a place in the files, one after the other: it holds parts of several, and the
state is reset at the begin of each (`seq_idx`). metrics.json has the bits per byte of held-out
files, cut into pieces of --length and of --eval-lengths, which are packed (`cu_seqlens`), and the
tokens per second in training, the median over the intervals between evaluations, of all processes;
bits_per_byte.png shows the former against the steps; sample.txt is a text from the model.
The step is not captured as a CUDA graph, because the host reads where documents begin.
`--help` lists all options.
"""

from dataclasses import replace

from common.lm_options import LanguageConfig
from common.lm_training import train
from common.script import run_script

# `Bedouin` with feedback of Delta alone and without mixing, which is fast on a CPU.
CPU = LanguageConfig(
    preset="cpu",
    device="cpu",
    steps=1200,
    batch_size=16,
    length=128,
    lr=1e-2,
    warmup_steps=50,
    d_model=64,
    num_layers=2,
    mlp_expand=2,
    num_heads=4,
    num_householder=0,
    feedback=("delta",),
    d_conv=4,
    eval_every=200,
    checkpoint_every=200,
    log_every=10,
    eval_bytes=2**13,
    final_bytes=2**14,
    eval_tokens=2**12,
)

# `TrackingDeltaNet`, the layer for language.
GPU = replace(
    CPU,
    preset="gpu",
    device="auto",
    mixer_layer="tracking",
    autocast="bf16",
    steps=5000,
    batch_size=64,
    length=1024,
    lr=1e-3,
    warmup_steps=200,
    weight_decay=0.1,
    d_model=512,
    num_layers=6,
    num_heads=None,
    num_householder=2,
    feedback=("delta", "B", "C", "mixer"),
    d_conv=None,
    eval_every=500,
    checkpoint_every=500,
    log_every=20,
    eval_lengths=(1024, 8192),
    eval_bytes=2**17,
    final_bytes=2**22,
    eval_tokens=2**16,
)

PRESETS = {"cpu": CPU, "gpu": GPU}


def main(config: LanguageConfig) -> None:
    """Train and write the results."""
    train(config)


if __name__ == "__main__":
    run_script(main, PRESETS)
