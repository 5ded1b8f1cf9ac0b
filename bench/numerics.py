"""Measures errors against float64, prints them as Markdown, and plots one of the tables.

Of y, for fp32 input whose mean is 1 to 1e6 standard deviations: ours, as two ranks would compute
it, torch's layer, and a layer that sums x and x^2 in fp32. Of the variance of fp64 input, where
the packed moments are what limits it. And of each activation that the kernels compute.

The kernels run interpreted, in one thread, from fixed seeds: a few seconds of a CPU.

    python bench/numerics.py
    python bench/numerics.py --plot /tmp/error.png
"""

import argparse
import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path

# Read when a kernel is decorated, so set before the first import of one.
os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.nn.functional as F
import triton
from matplotlib.figure import Figure
from syncbn_triton.kernels import launchers
from syncbn_triton.kernels.epilogue import ACTIVATIONS, Epilogue
from torch import Tensor

from syncbn_triton import activation, aten

SHAPE, RANKS, SEEDS, EPS = (16, 4, 32, 32), 2, 3, 1e-5
RATIOS = tuple(10.0**e for e in range(7))
RATIOS_FP64 = tuple(10.0**e for e in range(0, 9, 2))
PLOT = Path(__file__).parents[1] / "docs" / "images" / "error-of-y.png"
# Where activations are measured: evenly over [-_SPAN, _SPAN].
_SPAN, _POINTS = 20.0, 1 << 14


def packed_moments(channel_stats: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """The packed moments after the all-reduce, of ranks that share x."""
    return torch.stack([channel_stats(part) for part in x.chunk(RANKS)]).sum(0)


def by_kernels(x: Tensor) -> Tensor:
    moments = packed_moments(launchers.channel_stats, x)
    return launchers.normalize(x, moments, None, None, None, None, None, 0.1, EPS)[0]


def by_aten(x: Tensor) -> Tensor:
    moments = packed_moments(aten.channel_stats, x)
    return aten.normalize(x, moments, None, None, None, None, None, 0.1, EPS)[0]


def by_torch(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True, eps=EPS)


def by_sums(x: Tensor) -> Tensor:
    """``var = sum x^2 / n - (sum x / n)^2``, in fp32; NaN where that is below -eps."""
    dims = (0, 2, 3)
    n = x.numel() // x.shape[1]
    mean = x.sum(dims, keepdim=True) / n
    var = x.square().sum(dims, keepdim=True) / n - mean.square()
    return (x - mean) * (var + EPS).rsqrt()


LAYERS: dict[str, Callable[[Tensor], Tensor]] = {
    "ours, Triton": by_kernels,
    "ours, ATen": by_aten,
    "torch, CPU": by_torch,
    "sum of squares": by_sums,
}


def sample(ratio: float, seed: int, dtype: torch.dtype) -> Tensor:
    """Normal numbers of standard deviation 1 around a mean of ``ratio``, rounded to dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(SHAPE, generator=generator, dtype=torch.float64).add_(ratio).to(dtype)


def largest(errors: Iterable[Tensor]) -> float:
    """The largest of all, NaN if one is NaN."""
    return float(torch.stack([error.abs().max() for error in errors]).max())


def errors_of_y() -> dict[str, list[float]]:
    """For each layer, the largest error of y at each of RATIOS."""
    errors: dict[str, list[float]] = {name: [] for name in LAYERS}
    for ratio in RATIOS:
        samples = [sample(ratio, seed, torch.float32) for seed in range(SEEDS)]
        exact = [by_torch(x - x.double().mean((0, 2, 3), keepdim=True)) for x in samples]
        for name, layer in LAYERS.items():
            differences = (layer(x).double() - y for x, y in zip(samples, exact, strict=True))
            errors[name].append(largest(differences))
    return errors


def errors_of_variance() -> dict[str, list[float]]:
    """Largest relative errors of the variance of fp64 input, and the estimate, at RATIOS_FP64."""
    ours, estimates = [], []
    for ratio in RATIOS_FP64:
        x = sample(ratio, 0, torch.float64)
        packed = packed_moments(aten.channel_stats, x)
        C, n = SHAPE[1], x.numel() // SHAPE[1]
        mean, mean_square = (packed[: 2 * C] / n).view(2, C)
        exact = mean.new_tensor([variance(x[:, c].flatten().tolist()) for c in range(C)])
        ours.append(largest([(mean_square - mean.square()) / exact - 1]))
        estimates.append(2.0**-52 * ratio**2)
    return {"ours": ours, "2^-52 * (mean/std)^2": estimates}


def variance(values: list[float]) -> float:
    """Biased; the sums are exact, and so are the differences of values near each other."""
    d = [value - values[0] for value in values]
    n = len(d)
    return (math.fsum(e * e for e in d) - math.fsum(d) ** 2 / n) / n


def errors_of_activations() -> dict[str, list[float]]:
    """Largest errors of each activation and of its derivative, relative where they exceed 1."""
    z = torch.linspace(-_SPAN, _SPAN, _POINTS).view(1, 1, -1)
    # A mean of 0 and a variance of 1, so that z is what the activation gets.
    moments = torch.tensor([0.0, _POINTS, _POINTS], dtype=torch.float64)
    errors = {}
    for name in ACTIVATIONS:
        epilogue = Epilogue(name)
        y, stats = launchers.normalize(
            z, moments, None, None, None, None, None, 0.1, 0.0, epilogue=epilogue
        )
        ones, dz = torch.ones_like(z), torch.empty_like(z)
        launchers.backward_reduce(z, ones, stats, None, None, epilogue=epilogue, dz=dz)
        exact = z.double().requires_grad_()
        exact_y = activation.activate(exact, name, epilogue.negative_slope)
        (exact_dz,) = torch.autograd.grad(exact_y.sum(), exact)
        pairs = (y, exact_y.detach()), (dz, exact_dz)
        errors[name] = [largest([(a - b) / b.abs().clamp(min=1)]) for a, b in pairs]
    return errors


def table(first: str, titles: list[str], columns: dict[str, list[float]]) -> str:
    """Markdown with a row for each title."""
    lines = [f"| {first} | {' | '.join(columns)} |", "|" + "---|" * (len(columns) + 1)]
    for title, *row in zip(titles, *columns.values(), strict=True):
        lines.append(f"| {title} | {' | '.join(f'{value:.1e}' for value in row)} |")
    return "\n".join(lines)


def plot(path: Path, errors: dict[str, list[float]]) -> None:
    """Draws the errors of y over mean/std."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.subplots()
    for marker, (name, values) in zip("osv^", errors.items(), strict=True):
        axes.loglog(RATIOS, values, marker=marker, markersize=5, label=name)
    axes.set(xlabel="mean / std of x", ylabel="largest error of y", title="fp32 input")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.supxlabel(conditions(), fontsize="x-small", color="gray")
    path.parent.mkdir(parents=True, exist_ok=True)
    # Without a date and versions, the same figures give the same file.
    figure.savefig(path, dpi=110, metadata={"Software": None})


def conditions() -> str:
    size = " x ".join(map(str, SHAPE))
    return (
        f"N x C x H x W = {size}, worst of {SEEDS} seeds, "
        f"torch {torch.__version__}, triton {triton.__version__}"
    )


def main() -> None:
    """Prints the tables, and writes the plot."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plot", type=Path, default=PLOT, help="file for the plot")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    errors = errors_of_y()
    print(f"{conditions()}\n\nLargest error of y, fp32 input:\n")
    print(table("mean/std", [f"{ratio:.0e}" for ratio in RATIOS], errors))
    print("\nLargest relative error of the variance, fp64 input:\n")
    print(table("mean/std", [f"{ratio:.0e}" for ratio in RATIOS_FP64], errors_of_variance()))
    print(f"\nLargest error of an activation, relative where above 1, fp32, |z| <= {_SPAN:g}:\n")
    found = errors_of_activations()
    value, derivative = zip(*found.values(), strict=True)
    print(table("activation", list(found), {"value": list(value), "derivative": list(derivative)}))
    plot(arguments.plot, errors)
    print(f"\n{arguments.plot}")


if __name__ == "__main__":
    main()
