"""Train a layer on a finite automaton: data, model, loop, evaluation, figure, saving.

    python train_your_own.py                                # half a minute on two cores
    python train_your_own.py --layer tracking
    python train_your_own.py --solver jacobi --length 16    # iterations take longer

For another automaton change NEXT_STATE, for another task `sample` and the two sizes. Needs torch,
bedouin and matplotlib; writes automaton.png, and options and weights to automaton.pt.
"""

import argparse
import time

import matplotlib.pyplot as plt
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bedouin import Bedouin, FixedPointRNN, SequenceModel, TrackingDeltaNet, param_groups
from bedouin.solvers import Direct, Jacobi, Picard

# NEXT_STATE[letter][state]: letter 0 rotates five states, letter 1 exchanges the first two
NEXT_STATE = torch.tensor([[1, 2, 3, 4, 0], [1, 0, 2, 3, 4]])
NUM_LETTERS, NUM_STATES = NEXT_STATE.shape

LAYERS: dict[str, type[nn.Module]] = {  # `Bedouin.from_paper` becomes NaN before it learns this
    "bedouin": Bedouin,
    "rnn": FixedPointRNN,
    "tracking": TrackingDeltaNet,
}
SOLVERS = {"direct": Direct(), "jacobi": Jacobi(), "picard": Picard()}


def sample(b: int, t: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random letters (b, t), and the state after each of them (b, t), from state 0 on."""
    letters = torch.randint(NUM_LETTERS, (b, t), generator=generator)
    state, states = torch.zeros(b, dtype=torch.long), []
    for i in range(t):
        state = NEXT_STATE[letters[:, i], state]
        states.append(state)
    return letters, torch.stack(states, 1)


def make_model(args: argparse.Namespace) -> SequenceModel:
    if args.solver is not None and args.layer == "tracking":
        raise SystemExit("--solver needs a fixed-point layer: TrackingDeltaNet solves nothing")
    options = {} if args.solver is None else {"solver": SOLVERS[args.solver]}
    layer = LAYERS[args.layer](args.d_model, **options)
    return SequenceModel(NUM_LETTERS, args.d_model, [layer], output_size=NUM_STATES)


def accuracy(model: SequenceModel, t: int, device: str) -> float:
    """The share of states that are right in new sequences of t letters."""
    letters, states = sample(64, t, torch.Generator().manual_seed(t))
    model.eval()  # without the noise that some layers have in training
    with torch.no_grad():
        right = model(letters.to(device)).argmax(-1) == states.to(device)
    model.train()
    return right.float().mean().item()


def train(args: argparse.Namespace, model: SequenceModel, device: str) -> list[float]:
    """The loss of every step."""
    optimizer = torch.optim.AdamW(param_groups(model, weight_decay=0.01), lr=args.lr)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=100)
    generator, losses, start = torch.Generator().manual_seed(args.seed), [], time.monotonic()
    for step in range(1, args.steps + 1):
        # in the first half of the steps the length grows from 4 letters to args.length
        t = min(args.length, 4 + 2 * step * args.length // args.steps)
        letters, states = (v.to(device) for v in sample(args.batch, t, generator))
        loss = F.cross_entropy(model(letters).flatten(0, 1), states.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warmup.step()
        losses.append(loss.item())
        if not loss.isfinite():
            raise SystemExit(f"The loss is {losses[-1]} at step {step}: use a lower --lr.")
        if step % 50 == 0 or step == args.steps:
            left = (time.monotonic() - start) / step * (args.steps - step)
            right = accuracy(model, args.length, device)
            print(f"step {step}: loss {losses[-1]:.3f}, accuracy {right:.3f}, {left:.0f} s left")
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layer", choices=LAYERS, default="bedouin")
    parser.add_argument("--solver", choices=SOLVERS, help="default: the layer's own")
    parser.add_argument("--d-model", type=int, default=64)
    parser.add_argument("--length", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = make_model(args).to(device)
    losses = train(args, model, device)

    lengths = [args.length * factor for factor in (1, 2, 4, 8, 16)]
    right = [accuracy(model, t, device) for t in lengths]
    print(f"guessing: {1 / NUM_STATES:.3f}")
    for t, share in zip(lengths, right, strict=True):
        print(f"{t} letters: {share:.3f} of the states right")
    figure, (left, beside) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    left.plot(losses)
    left.set(xlabel="step", ylabel="loss", ylim=0)
    beside.semilogx(lengths, right, base=2, marker="o")
    beside.axhline(1 / NUM_STATES, color="gray", linestyle=":")
    beside.set(xlabel="letters", ylabel="states right (dotted: guessing)", ylim=(0, 1.02))
    beside.set_xticks(lengths, lengths)
    figure.savefig("automaton.png", dpi=150)
    torch.save({"args": vars(args), "model": model.state_dict()}, "automaton.pt")


if __name__ == "__main__":
    main()
