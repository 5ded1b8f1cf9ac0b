"""Tuned block sizes are taken from the user's table, then ours, and never break a launch."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from syncbn_triton.kernels import blocks as kernel_blocks
from syncbn_triton.kernels import tables
from syncbn_triton.kernels.blocks import Blocks, choose_blocks, heuristic
from syncbn_triton.kernels.entries import Entry, parse, serialize
from syncbn_triton.kernels.layout import Strides, View

DEVICE = "Some_GPU"
CPU = torch.device("cpu")
TUNED = Blocks(BLOCK_C=2, BLOCK_S=512, split=7, num_warps=8)
OTHER = Blocks(BLOCK_C=1, BLOCK_S=1024, split=5, num_warps=2)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Folders of the user's tables and of ours, for a GPU that has a name."""
    mine, ours = tmp_path / "mine", tmp_path / "ours"
    mine.mkdir()
    ours.mkdir()
    monkeypatch.setenv("SYNCBN_TRITON_CACHE", str(mine))
    monkeypatch.setattr(tables, "SHIPPED", ours)
    monkeypatch.setattr(kernel_blocks, "device_name", lambda device: DEVICE)
    tables._warn.cache_clear()
    return mine, ours


def entry(blocks: Blocks = TUNED, **fields: Any) -> Entry:
    """An entry for normalize over 32 x 64 x 3136, contiguous, in bf16, unless told otherwise."""
    shape = {"N": 32, "C": 64, "S": 3136}
    names = {"kernel": "normalize", "dtype": "bfloat16", "layout": "contiguous"}
    record = {"heuristic_us": 12.5, "tuned_us": 10, "triton": "3.8.0"}
    return Entry(**names | shape | blocks._asdict() | record | fields)


def write(folder: Path, *entries: Entry) -> Path:
    path = folder / f"{DEVICE}.jsonl"
    path.write_text("".join(f"{serialize(e)}\n" for e in entries))
    return path


def dense_view(N: int, C: int, S: int, channels_fastest: bool = False) -> View:
    strides = Strides(0, 1, C) if channels_fastest else Strides(C * S, S, 1)
    return View(N, C, S, (strides,), (False,))


def chosen(
    v: View, kernel: str = "normalize", dtype: torch.dtype = torch.bfloat16
) -> Blocks | None:
    """The tuned blocks that a kernel gets, None for the heuristic's."""
    blocks = choose_blocks(kernel, v, dtype, CPU)
    return None if blocks == heuristic(kernel, v, dtype, CPU) else blocks


def test_the_user_comes_before_us_and_we_before_the_heuristic(folders: tuple[Path, Path]) -> None:
    mine, ours = folders
    v = dense_view(32, 64, 3136)
    assert chosen(v) is None
    tables._read.cache_clear()
    write(ours, entry(OTHER))
    assert chosen(v) == OTHER
    tables._read.cache_clear()
    # Near is enough, though ours has the very shape.
    write(mine, entry(TUNED, N=48))
    assert chosen(v) == TUNED


@pytest.mark.parametrize(
    ("shape", "served"),
    [
        ((32, 64, 3136), True),
        ((64, 64, 3136), True),
        ((16, 64, 3136), True),
        ((32, 128, 3136), True),
        ((32, 64, 1568), True),
        ((48, 80, 3136), True),
        ((65, 64, 3136), False),
        ((15, 64, 3136), False),
        ((48, 64, 1568), False),
        ((64, 64, 1568), False),
    ],
)
def test_an_entry_serves_shapes_within_a_factor_of_two(
    folders: tuple[Path, Path], shape: tuple[int, int, int], served: bool
) -> None:
    write(folders[0], entry())
    assert chosen(dense_view(*shape)) == (TUNED if served else None)


def test_the_nearest_entry_serves(folders: tuple[Path, Path]) -> None:
    write(folders[0], entry(OTHER, N=60), entry(TUNED, N=36), entry(OTHER, N=20))
    assert chosen(dense_view(40, 64, 3136)) == TUNED
    assert chosen(dense_view(56, 64, 3136)) == OTHER


def test_the_later_of_two_lines_counts(folders: tuple[Path, Path]) -> None:
    write(folders[0], entry(OTHER), entry(TUNED))
    assert chosen(dense_view(32, 64, 3136)) == TUNED


def test_an_entry_serves_its_own_kernel_dtype_and_layout_alone(folders: tuple[Path, Path]) -> None:
    write(folders[0], entry(), entry(OTHER, layout="channels-last", N=1, C=64, S=100352))
    v = dense_view(32, 64, 3136)
    assert chosen(v) == TUNED
    assert chosen(v, kernel="channel_stats") is None
    assert chosen(v, dtype=torch.float16) is None
    assert chosen(v._replace(strides=(Strides(64 * 3200, 3200, 1),))) is None
    assert chosen(dense_view(1, 64, 100352, channels_fastest=True)) == OTHER


@pytest.mark.parametrize("layout", ["contiguous", "channels-last"])
def test_a_flat_tile_serves_rows_of_its_length_alone(
    folders: tuple[Path, Path], layout: str
) -> None:
    last = layout == "channels-last"
    flat = Blocks(BLOCK_C=24 if last else 8, BLOCK_S=8 if last else 24, split=3, flat=True)
    sizes = {"N": 1, "C": 24, "S": 4000} if last else {"N": 8, "C": 500, "S": 24}
    write(folders[0], entry(flat, layout=layout, **sizes))

    def shaped(rows: int, length: int) -> View:
        return dense_view(1, length, rows, True) if last else dense_view(8, rows, length)

    rows = 4000 if last else 500
    assert chosen(shaped(rows, 24)) == flat
    assert chosen(shaped(rows * 3 // 2, 24)) == flat
    # 32 has the same alignment, and is within the distance.
    assert chosen(shaped(rows, 32)) is None
    assert chosen(shaped(rows, 25)) is None


def test_a_tile_serves_rows_of_its_alignment_alone(folders: tuple[Path, Path]) -> None:
    """Rows of 3140 bf16 allow loads of half the width, and of 3137 none but scalar ones."""
    write(folders[0], entry())
    assert chosen(dense_view(32, 64, 3144)) == TUNED
    assert chosen(dense_view(32, 64, 3140)) is None
    assert chosen(dense_view(32, 64, 3137)) is None


def broken() -> dict[str, str]:
    """A line for each way to be none."""
    good = json.loads(serialize(entry()))

    def changed(**fields: Any) -> str:
        return json.dumps(good | fields)

    lacking = {name: value for name, value in good.items() if name != "split"}
    return {
        "half a line": serialize(entry())[:40],
        "no object": "[1, 2]",
        "nested too deep": "[" * 100_000,
        "another schema": changed(schema=2),
        "a field lacks": json.dumps(lacking),
        "a field more": changed(num_stages=3),
        "unknown kernel": changed(kernel="softmax"),
        "unknown dtype": changed(dtype="int8"),
        "unknown layout": changed(layout="rows"),
        "a size of text": changed(N="32"),
        "a size of truth": changed(N=True),
        "no size": changed(C=0),
        "a negative split": changed(split=-1),
        "time out of range": changed(tuned_us=float("nan")),
        "channels of no power of two": changed(BLOCK_C=3),
        "positions of no power of two": changed(BLOCK_S=100),
        "warps of no power of two": changed(num_warps=3),
        "too many warps": changed(num_warps=32),
        "a tile too large": changed(BLOCK_S=8192),
        "a split too fine to merge": changed(kernel="channel_stats", split=2048),
        "a grid too large": changed(C=2**31, BLOCK_C=1, split=1),
        "a flat tile of other rows": changed(flat=True),
        "a flat tile that is strided": changed(flat=True, S=512, layout="contiguous strided"),
    }


@pytest.mark.parametrize("name", broken())
def test_a_broken_line_is_left_out(folders: tuple[Path, Path], name: str) -> None:
    path = write(folders[0], entry(OTHER, N=256), entry())
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], broken()[name], lines[1], ""]))
    with pytest.warns(UserWarning, match="line 2: ") as caught:
        assert chosen(dense_view(32, 64, 3136)) == TUNED
    assert len(caught) == 1
    assert str(path) in str(caught[0].message)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(dense_view(256, 64, 3136)) == OTHER


def test_all_broken_lines_of_a_file_are_in_one_warning(folders: tuple[Path, Path]) -> None:
    (folders[0] / f"{DEVICE}.jsonl").write_text("{\n\n" + serialize(entry()) + "\n{\n")
    with pytest.warns(UserWarning, match=r"line 1: not JSON; line 4: not JSON") as caught:
        chosen(dense_view(32, 64, 3136))
    assert len(caught) == 1


@pytest.mark.parametrize("kind", ["a folder", "below a file", "bytes"])
def test_an_unreadable_table_warns_once_and_is_as_if_absent(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path = folders[0] / f"{DEVICE}.jsonl"
    if kind == "a folder":
        path.mkdir()
    elif kind == "below a file":
        path.write_text("")
        monkeypatch.setenv("SYNCBN_TRITON_CACHE", str(path))
    else:
        path.write_bytes(b"\xff\xfe\x00")
    views = [dense_view(32, 64, 3136), dense_view(64, 64, 3136)]
    with pytest.warns(UserWarning, match=DEVICE) as caught:
        assert [chosen(v) for v in views] == [None, None]
    assert len(caught) == 1


def test_a_table_that_cannot_be_written_serves_this_process(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folders[0] / "a file"
    path.write_text("")
    monkeypatch.setenv("SYNCBN_TRITON_CACHE", str(path / "cache"))
    with pytest.warns(UserWarning, match="cannot") as caught:
        tables.remember(DEVICE, [entry()])
    assert any("cannot write" in str(warning.message) for warning in caught)
    assert chosen(dense_view(32, 64, 3136)) == TUNED


def test_writing_replaces_lines_of_its_keys_and_keeps_all_others(
    folders: tuple[Path, Path],
) -> None:
    path = write(folders[0], entry(OTHER), entry(OTHER, N=1))
    newer = json.dumps({"schema": 2, "kernel": "normalize"})
    path.write_text(path.read_text() + newer)
    tables.write(path, [entry(TUNED), entry(TUNED, N=2)])
    lines = path.read_text().splitlines()
    kept, new = [entry(OTHER, N=1)], [entry(TUNED), entry(TUNED, N=2)]
    assert lines == [serialize(kept[0]), newer, *map(serialize, new)]
    assert sorted(file.suffix for file in folders[0].iterdir()) == [".jsonl", ".lock"]


def test_an_interrupted_write_leaves_the_table_as_it_was(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write(folders[0], entry(OTHER))
    before = path.read_bytes()

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tables.os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tables.write(path, [entry(TUNED)])
    assert path.read_bytes() == before


WRITER = """
import sys
from pathlib import Path
from syncbn_triton.kernels.entries import parse
from syncbn_triton.kernels.tables import write
line, first = sys.stdin.read(), int(sys.argv[2])
for n in range(first, first + 60):
    write(Path(sys.argv[1]), [parse(line)._replace(N=n)])
"""


def test_processes_that_write_at_once_lose_nothing_and_show_no_half_a_file(
    folders: tuple[Path, Path],
) -> None:
    path = folders[0] / f"{DEVICE}.jsonl"
    writers = [
        subprocess.Popen([sys.executable, "-c", WRITER, str(path), first], stdin=subprocess.PIPE)
        for first in ("1", "101")
    ]
    for writer in writers:
        assert writer.stdin
        writer.stdin.write(serialize(entry()).encode())
        writer.stdin.close()
    seen = set()
    while any(writer.poll() is None for writer in writers):
        text = path.read_text() if path.exists() else ""
        assert not text or text.endswith("\n")
        seen.add(len([parse(line) for line in text.splitlines()]))
    assert [writer.returncode for writer in writers] == [0, 0]
    assert {parse(line).N for line in path.read_text().splitlines()} == {
        *range(1, 61),
        *range(101, 161),
    }
    # Both were at work when it was read.
    assert len(seen) > 2


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"SYNCBN_TRITON_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/syncbn-triton"),
        ({"SYNCBN_TRITON_CACHE": "", "XDG_CACHE_HOME": ""}, "/c/.cache/syncbn-triton"),
    ],
)
def test_the_cache_folder(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.delenv("SYNCBN_TRITON_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    for name, value in ({"HOME": "/c"} | variables).items():
        monkeypatch.setenv(name, value)
    assert tables.user_path(DEVICE) == Path(expected, f"{DEVICE}.jsonl")


def test_a_table_is_named_after_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200/NVL (141 GB)")
    gpu = torch.device("cuda", 0)
    # Interpreted kernels have no use for it.
    assert tables.device_name(gpu) is None
    monkeypatch.setattr(tables.triton.knobs.runtime, "interpret", False)
    assert tables.device_name(gpu) == "NVIDIA_H200_NVL_141_GB"
    assert tables.device_name(CPU) is None


def test_tables_that_come_with_the_package_are_whole() -> None:
    folder = Path(tables.__file__).parent / "configs"
    assert (folder / "README.md").exists()
    for path in folder.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            parse(line)


def test_an_empty_view_has_no_entry(folders: tuple[Path, Path]) -> None:
    write(folders[0], entry())
    assert chosen(dense_view(0, 64, 3136)) is None
