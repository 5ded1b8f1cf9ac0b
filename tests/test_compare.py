"""The comparison, the scaling of collectives, and the baseline, each at its smallest."""

import csv
import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from ranks import RankPool

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import baseline
import compare
import compare_table
import contestants
import scale
import scale_model
from gpu_speed import Case
from shapes import SUITE, Shape

BENCH = Path(compare.__file__).parent
TINY = [
    Case(Shape("image", (3, 4, 5, 5), ""), torch.channels_last, torch.float32),
    Case(Shape("rows", (6, 5), ""), torch.contiguous_format, torch.float32),
]
NAMES = {1: [contestants.NATIVE, contestants.OURS, contestants.SQUARES]}
NAMES[2] = [*NAMES[1], contestants.ALONE]


def result(records: list[dict]) -> dict:
    return compare.conditions("cpu") | {"records": records}


def test_a_batch_is_cut_to_fit() -> None:
    for shape in SUITE:
        small = compare.cut(shape, compare.MOST_ELEMENTS)
        sample = math.prod(shape.size[1:])
        if small is None:
            assert sample > compare.MOST_ELEMENTS or not shape.size[0]
        else:
            assert math.prod(small.size) <= compare.MOST_ELEMENTS
            assert (
                small.size[0] == shape.size[0]
                or (small.size[0] + 1) * sample > compare.MOST_ELEMENTS
            )
    sizes = [(c.shape.size, c.memory_format) for c in compare.suite(compare.MOST_ELEMENTS)]
    assert len(sizes) == len(set(sizes)) > 30
    assert {c.shape.name for c in compare.suite(None)} < {s.name for s in SUITE}


def test_contestants_take_turns(ranks: RankPool, tmp_path: Path) -> None:
    """In both worlds; what is written tells of all, and their results agree on ranks."""
    records = compare.measure(ranks, TINY, (1, 2), "cpu", seconds=0, compiled=False)
    assert [r["world"] for r in records] == [1, 1, 2, 2]
    for record in records:
        assert sorted(record["times"]) == sorted(NAMES[record["world"]])
        assert record["rounds"] == compare._LEAST_ROUNDS
        for who, times in record["times"].items():
            for span in compare_table.SPANS:
                assert 0 < times[span]["q1"] <= times[span]["median"] <= times[span]["q3"]
            # y and dx, at least.
            assert record["memory"][who] >= 2 * record["bytes"]
    text = compare_table.markdown(result(records))
    assert "World of 2" in text
    assert text.count(" x 5, last |") == 2
    assert len(list(compare_table.targets(records))) == 4
    compare_table.write_csv(tmp_path / "compare.csv", result(records))
    with (tmp_path / "compare.csv").open() as file:
        assert len(list(csv.DictReader(file))) == sum(len(r["times"]) for r in records)
    compare_table.draw(tmp_path / "compare.png", result(records))
    assert (tmp_path / "compare.png").stat().st_size > 0


def test_layers_that_disagree_are_not_timed() -> None:
    x = torch.randn(6, 5, requires_grad=True)
    layers = contestants.layers(x, None, compiled=False)
    with torch.no_grad():
        layers[contestants.OURS].weight.mul_(2)
    with pytest.raises(AssertionError, match=f"{contestants.OURS} against"):
        contestants.must_agree(layers, x, torch.randn(6, 5))


def test_a_peak_is_more_than_what_remains() -> None:
    x = torch.randn(64, 32, requires_grad=True)

    class Doubles(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.double() * 2).float()

    # The doubles of twice the size live together for a moment.
    assert contestants.peak_memory(Doubles(), x, torch.randn(64, 32)) >= 4 * x.nbytes


def test_bytes_of_two_ranks(tmp_path: Path) -> None:
    """In a process: it may move to a network of its own."""
    options = ("--worlds", "2", "--channels", "512", "--out", str(tmp_path))
    run = subprocess.run(
        [sys.executable, str(BENCH / "scale.py"), *options],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    written = json.loads((tmp_path / "scale.json").read_text())
    assert {"scale.json", "scale.md", "scale.png"} == {path.name for path in tmp_path.iterdir()}
    assert len(written["records"]) == 4
    for r in written["records"]:
        _, bytes_ = scale_model.cost(r["who"], r["direction"], r["C"], 2)
        assert r["bytes_per_rank"] >= bytes_
        if written["own_network"]:
            assert r["bytes_per_rank"] <= 1.5 * bytes_ + 2000
    assert "| 512 | 2 |" in run.stdout


def test_the_fit_finds_a_model_that_holds() -> None:
    records = []
    for P in (2, 8, 16):
        for who in scale_model.WHO:
            for direction in ("forward", "backward"):
                steps, bytes_ = scale_model.cost(who, direction, 512, P)
                ms = max(1, P / 4) * (0.05 * steps + 2e-6 * bytes_)
                about = {"who": who, "direction": direction, "C": 512, "ranks": P}
                wire = {"bytes_per_rank": bytes_ + 300 * steps, "ms": {"median": ms}}
                records.append(about | wire)
    model = scale_model.fit(records, cpus=4)
    assert model["alpha_us"] == pytest.approx(50, rel=1e-3)
    assert model["beta_ns"] == pytest.approx(2, rel=1e-3)
    assert model["header_bytes"] == pytest.approx(300, rel=1e-3)
    assert model["worst_error"] < 1e-3
    # An all-gather's bytes grow with the ranks, an all-reduce's do not.
    ours, theirs = (
        scale_model.predicted_bytes({"header_bytes": 0}, who, 2048, 4096) for who in scale_model.WHO
    )
    assert ours < 2 * 8 * 4097 < theirs / 1000


def test_the_interface_must_exist() -> None:
    with pytest.raises(ValueError, match="nowhere0"):
        scale.sent("nowhere0")


def test_a_baseline_keeps_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def write(ours: float) -> Path:
        times = {"nn.BatchNorm": 2.0, "ours": ours}
        path = tmp_path / "run.json"
        run = [
            {"group": "step", "params": {"who": who}, "stats": {"min": least}}
            for who, least in times.items()
        ]
        path.write_text(json.dumps({"benchmarks": run}))
        return path

    saved = tmp_path / "baseline.json"
    options = ["--baseline", str(saved)]
    baseline.main([str(write(3.0)), *options, "--save"])
    assert json.loads(saved.read_text())["ratios"] == {"step: ours": 1.5}
    baseline.main([str(write(6.0)), *options])
    assert "slower, 2.00 times" in capsys.readouterr().out
    baseline.main([str(write(3.0)), *options])
    assert "slower" not in capsys.readouterr().out
