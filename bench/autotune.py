"""Finds the fastest block sizes for a network's shapes on this GPU, and keeps them for training.

Shapes come from a network (--model), from networks that people train (--suite), or from the command
line (--shapes). Each is tuned forward and backward, and written at once into the user's table in
the cache folder, so that a run that was stopped goes on where it was.

    python bench/autotune.py --model resnet50 --input 32,3,224,224 --memory-format channels-last
    python bench/autotune.py --suite --dtypes bfloat16 float32
    python bench/autotune.py --shapes 32,64,56,56 512,2048 --dry-run
"""

import argparse
import importlib
import itertools
import os
import sys
from collections.abc import Iterator

if os.environ.get("TRITON_INTERPRET") == "1":
    sys.exit("TRITON_INTERPRET=1 is set: interpreted kernels are not tuned. Unset it.")

import shapes
import stand_in
import torch
from syncbn_triton.kernels.blocks import Blocks
from syncbn_triton.kernels.candidates import candidates
from syncbn_triton.kernels.entries import DTYPES, Entry, Key
from syncbn_triton.kernels.tables import device_name, remember, tables, user_path
from syncbn_triton.kernels.tuning import PAIRS, Case, release_memory, tune
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from tqdm import tqdm

FORMATS = ("contiguous", "channels-last")
_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
# Sizes and strides of an input.
Input = tuple[tuple[int, ...], tuple[int, ...]]


def sizes(text: str) -> tuple[int, ...]:
    """``32,64,56,56`` as a tuple of at least two."""
    size = tuple(int(n) for n in text.split(","))
    if len(size) < 2 or min(size) < 1:
        raise ValueError
    return size


def format_of(size: tuple[int, ...], name: str) -> torch.memory_format:
    """The memory format of this name; only images have channels-last."""
    last = _CHANNELS_LAST.get(len(size)) if name == "channels-last" else None
    return last or torch.contiguous_format


def strides_of(size: tuple[int, ...], memory_format: torch.memory_format) -> tuple[int, ...]:
    """Of a dense tensor."""
    return torch.empty(size, device="meta").contiguous(memory_format=memory_format).stride()


def build(name: str) -> nn.Module:
    """The model of ``package.module:factory``, or of timm."""
    module, _, factory = name.rpartition(":")
    if module:
        model: nn.Module = getattr(importlib.import_module(module), factory)()
        return model
    return importlib.import_module("timm").create_model(name)


def inputs_of_model(
    name: str, size: tuple[int, ...], memory_format: torch.memory_format
) -> Iterator[Input]:
    """What each batch normalization of a model gets, in one pass that computes nothing."""
    found: list[Input] = []

    def record(_: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        found.append((tuple(arguments[0].shape), arguments[0].stride()))

    model = build(name).train()
    for layer in model.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.register_forward_pre_hook(record)
    # Fake tensors have the strides that operators give; those on the meta device lose them.
    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.empty(size).contiguous(memory_format=memory_format))
    yield from found


def inputs(arguments: argparse.Namespace) -> Iterator[Input]:
    """Those that were asked for."""
    if arguments.model:
        memory_format = format_of(arguments.input, arguments.memory_format)
        yield from inputs_of_model(arguments.model, arguments.input, memory_format)
    elif arguments.suite:
        for shape in shapes.SUITE:
            for memory_format in shapes.formats(shape) if 0 not in shape.size else ():
                yield shape.size, strides_of(shape.size, memory_format)
    else:
        for size in arguments.shapes:
            yield size, strides_of(size, format_of(size, arguments.memory_format))


def cases(arguments: argparse.Namespace, device: torch.device) -> list[tuple[Case, str]]:
    """Each kind of input once, forward and backward; a gradient lies in memory as its input does.

    Of one kind are inputs that kernels view alike: in channels-last, 8 x 8 positions and 4 x 16.
    """
    found: dict[tuple[Key, ...], tuple[Case, str]] = {}
    kinds = itertools.product(dict.fromkeys(inputs(arguments)), arguments.dtypes, PAIRS)
    for (size, strides), dtype, pair in kinds:
        case = Case(size, strides, strides, getattr(torch, dtype), device)
        found.setdefault(tuple(case.keys(pair)), (case, pair))
    return list(found.values())


def gpu() -> torch.device | None:
    """The current GPU, if there is one."""
    kind = torch.accelerator.current_accelerator()
    return kind and torch.device(kind.type, torch.accelerator.current_device_index())


def head(case: Case, pair: str) -> str:
    """What was tuned, in columns."""
    key = case.keys(pair)[1]
    size = "x".join(map(str, case.size))
    return f"{size:<20}{key.dtype:<10}{key.layout:<15}{pair:<10}"


def blocks_text(blocks: Blocks) -> str:
    """Blocks in few letters: channels x positions, programs for a group, warps."""
    flat = " flat" if blocks.flat else ""
    return f"{blocks.BLOCK_C}x{blocks.BLOCK_S}{flat} /{blocks.split} {blocks.num_warps}w"


def result(case: Case, pair: str, entries: list[Entry]) -> str:
    """A line of the table of what tuning brought."""
    before, after = entries[0].heuristic_us, entries[0].tuned_us
    chosen = ", ".join(blocks_text(Blocks(*entry.blocks)) for entry in entries)
    return f"{head(case, pair)}{before:12.1f}{after:10.1f}{before / after:7.2f}  {chosen}"


def dry_run(arguments: argparse.Namespace) -> None:
    """Prints what would be tuned, for the GPU that the stand-in driver describes."""
    stand_in.install("sm_90")
    print("Assumes an H200, of 132 multiprocessors. Candidates, and the heuristic's choice:")
    for case, pair in cases(arguments, torch.device("cpu")):
        views = zip(PAIRS[pair], case.views(pair), strict=True)
        choices = [candidates(kernel, v, case.dtype, case.device) for kernel, v in views]
        texts = [f"{len(blocks):3d}, {blocks_text(blocks[0]):<22}" for blocks in choices]
        print(head(case, pair) + "".join(texts).rstrip())


def tune_all(arguments: argparse.Namespace, device: torch.device, name: str) -> list[str]:
    """Tunes what the user's table lacks, and returns a line for each."""
    mine, _ = tables(name)
    todo = cases(arguments, device)
    if not arguments.again:
        todo = [(case, pair) for case, pair in todo if not all(map(mine.exact, case.keys(pair)))]
    lines = []
    for case, pair in tqdm(todo, desc=name, unit="pair", disable=None):
        try:
            entries = tune(case, pair)
        except torch.OutOfMemoryError:
            lines.append(f"{head(case, pair)} no memory to tune it: stays untuned")
            continue
        finally:
            release_memory(device)
        remember(name, entries)
        lines.append(result(case, pair, entries))
    return lines


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", help="package.module:factory, or the name of a timm model")
    source.add_argument("--suite", action="store_true", help="the sizes in bench/shapes.py")
    source.add_argument("--shapes", nargs="+", type=sizes, help="such as 32,64,56,56")
    parser.add_argument("--input", type=sizes, help="the model's input, such as 32,3,224,224")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=["bfloat16"])
    parser.add_argument("--memory-format", choices=FORMATS, default="contiguous")
    parser.add_argument(
        "--again", action="store_true", help="tune what is in the table already too"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be tuned")
    parsed = parser.parse_args(arguments)
    if parsed.model and not parsed.input:
        parser.error("--model needs --input")
    return parsed


def main(arguments: list[str] | None = None) -> None:
    """Tunes, or tells what would be tuned."""
    parsed = parse(arguments)
    if parsed.dry_run:
        dry_run(parsed)
        return
    device = gpu()
    name = device and device_name(device)
    if device is None or name is None:
        print("No GPU to tune for. --dry-run tells what would be tuned.", file=sys.stderr)
        sys.exit(2)
    lines = tune_all(parsed, device, name)
    columns = f"{'':<55}{'heuristic us':>12}{'tuned us':>10}{'ratio':>7}"
    print("\n".join([columns, *lines]) if lines else "Nothing left to tune; --again tunes it anew.")
    print(f"Table: {user_path(name)}")


if __name__ == "__main__":
    main()
