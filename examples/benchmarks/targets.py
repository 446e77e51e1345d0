"""Targets for the times, and the times of other implementations that they are derived from.

The paper's code (k = 4, at most 16 and at most 100 iterations), mamba-ssm's CUDA scan (forward and
forward + backward) and cuDNN's LSTM were measured on an H100 80GB in bfloat16: one layer of d_model
512, forward + backward, in ms; PAPER_GIB is the peak memory of the paper's code in GiB.
"""

from dataclasses import dataclass

from benchmarks.measure import Numbers, best_ms

PAPER_16 = {"128x16": 39.6, "64x256": 98.6, "16x1024": 98.3, "8x4096": 186.0}
PAPER_100 = {"128x16": 59.8, "64x256": 508.0, "16x1024": 509.0, "8x4096": 953.0}
PAPER_GIB = {"128x16": 0.49, "64x256": 2.29, "16x1024": 2.48, "8x4096": 4.64}
LSTM = {"128x16": 1.49, "64x256": 7.61, "16x1024": 26.5, "8x4096": 102.0}
SCAN_FORWARD = {"128x16": 0.60, "64x256": 0.33, "16x1024": 0.32, "8x4096": 0.61}
SCAN_BOTH = {"128x16": 2.05, "64x256": 1.94, "16x1024": 1.73, "8x4096": 3.46}
AT_MOST = {"128x16": 1.5, "64x256": 12.0, "16x1024": 26.0, "8x4096": 100.0}
AIM = {"128x16": 0.6, "64x256": 6.0, "16x1024": 12.0, "8x4096": 45.0}
ONE_HEAD_GIB = {"128x16": 0.25, "64x256": 0.92, "16x1024": 0.85, "8x4096": 1.59}
"""The peak memory of the layer with one head."""
HEADS_AT_MOST = {
    8: {"128x16": 0.48, "64x256": 4.0, "16x1024": 9.0, "8x4096": 25.0},
    16: {"128x16": 0.40, "64x256": 3.0, "16x1024": 6.0, "8x4096": 16.0},
}
OVER_PADDED = 1.2
"""The time of documents in one row over that of the same documents as padded rows."""
HEADS_AIM = {"128x16": 0.3, "64x256": 1.5, "16x1024": 3.5, "8x4096": 10.0}


@dataclass(frozen=True)
class Target:
    """An upper bound on a number of a row."""

    text: str
    case: str
    shape: str
    key: str
    at_most: float
    aim: float | None = None

    def reached(self, numbers: Numbers) -> float | None:
        """The measured number, for a time the faster of eager and captured; None: not measured."""
        if self.key in ("forward", "both"):
            return best_ms(numbers, self.key)
        value = numbers.get(self.key)
        return None if value is None else float(value)

    def verdict(self, numbers: Numbers) -> str:
        """Whether the target was met, in a few words."""
        value = self.reached(numbers)
        if value is None:
            return "not measured"
        if self.aim is not None and value <= self.aim:
            return "aim reached"
        return "met" if value <= self.at_most else f"missed ({value / self.at_most:.2f}x)"


def _by_shape() -> list[Target]:
    found = []
    for shape, at_most in AT_MOST.items():
        found += [
            Target("feedback, fwd + bwd, ms", "direct", shape, "both", at_most, AIM[shape]),
            Target("feedback, peak, GiB", "direct", shape, "peak_gib", PAPER_GIB[shape] / 2),
            Target(
                "no feedback, fwd + bwd, ms", "direct-no-feedback", shape, "both", LSTM[shape],
                4 * SCAN_BOTH[shape],
            ),
            Target("scan, fwd, ms", "scan", shape, "forward", 1.05 * SCAN_FORWARD[shape]),
            Target("scan, fwd + bwd, ms", "scan", shape, "both", 1.05 * SCAN_BOTH[shape]),
        ]  # fmt: skip
    return found


def _with_heads() -> list[Target]:
    found = []
    for heads, times in HEADS_AT_MOST.items():
        case = f"direct-heads{heads}"
        for shape, ms in times.items():
            aim = HEADS_AIM[shape]
            gib = ONE_HEAD_GIB[shape]
            found += [
                Target(f"{heads} heads, fwd + bwd, ms", case, shape, "both", ms, aim),
                Target(f"{heads} heads, peak, GiB", case, shape, "peak_gib", gib),
            ]
        found.append(
            Target(f"{heads} heads, one token by Decoder, us a layer", f"decode-heads{heads}",
                   "1x1", "decoder_us", 20)
        )  # fmt: skip
    return found


def _packed() -> list[Target]:
    return [
        Target(
            f"packed / padded, fwd + bwd, {'no ' if feedback else ''}feedback, heads: {heads}",
            f"packed{kind}{feedback}{suffix}", shape, "over_padded", OVER_PADDED,
        )
        for kind, shape in (("", "64x256"), ("-random", "64x1024"))
        for feedback in ("", "-no-feedback")
        for heads, suffix in ((1, ""), (8, "-heads8"), (16, "-heads16"))
    ]  # fmt: skip


TARGETS = (
    *_by_shape(),
    *_with_heads(),
    *_packed(),
    Target("one Jacobi iteration / byte floor", "jacobi-iteration", "64x256", "times_floor", 2),
    Target("one Picard iteration / byte floor", "picard-iteration", "64x256", "times_floor", 2),
    Target("one token by step, us a layer", "decode", "1x1", "us_a_layer", 45),
    Target("one token by Decoder, us a layer", "decode", "1x1", "decoder_us", 25),
)
