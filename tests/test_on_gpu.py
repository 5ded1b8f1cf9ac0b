"""The script that measures on a GPU, as far as a CPU can run it.

Its kernels run interpreted, torch's GPU operators are played by stand-ins, a graph by a function,
and a clock by a constant.
"""

import inspect
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from oracle import Step
from ranks import RankPool
from rounding import assert_step_rounds
from torch import Tensor

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import gpu_graphs
import gpu_parity
import gpu_peers
import gpu_ranks
import gpu_speed
import gpu_tuning
import on_gpu
from gpu_cases import CONTIGUOUS, LAST, Case, make_layer
from gpu_records import figure, parse
from gpu_table import share_of_copy, speed_up, summary
from shapes import Shape

BENCH = Path(on_gpu.__file__).parent
CPU = torch.device("cpu")
TINY = (3, 5, 7, 9)


def per_channel(v: Tensor, x: Tensor) -> Tensor:
    return v.float().view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(input: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    mean, var = torch.batch_norm_update_stats(input.float(), None, None, 0.0)
    return mean, (var + eps).rsqrt()


def batch_norm_gather_stats_with_counts(
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    n, count = counts.unsqueeze(1), counts.sum()
    of_all = (n * mean).sum(0) / count
    var = (n * (invstd**-2 - eps + (mean - of_all).square())).sum(0) / count
    running_mean.lerp_(of_all, momentum)
    running_var.lerp_(var * count / (count - 1), momentum)
    return of_all, (var + eps).rsqrt()


def batch_norm_elemt(
    input: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    mean, a, b = (per_channel(v, input) for v in (mean, weight * invstd, bias))
    return ((input.float() - mean) * a + b).to(input.dtype)


def batch_norm_backward_reduce(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    input_g: bool,
    weight_g: bool,
    bias_g: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    others = [dim for dim in range(input.dim()) if dim != 1]
    sum_dy = grad_out.float().sum(others)
    sum_dy_xmu = (grad_out.float() * (input.float() - per_channel(mean, input))).sum(others)
    return sum_dy, sum_dy_xmu, (sum_dy_xmu * invstd).to(weight.dtype), sum_dy.to(weight.dtype)


def batch_norm_backward_elemt(
    grad_out: Tensor,
    input: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor,
    sum_dy: Tensor,
    sum_dy_xmu: Tensor,
    count: Tensor,
) -> Tensor:
    n = count.sum()
    values = (mean, weight * invstd, sum_dy / n, invstd.square() * sum_dy_xmu / n)
    mean, a, mean_dy, slope = (per_channel(v, input) for v in values)
    xmu = input.float() - mean
    return ((grad_out.float() - mean_dy - xmu * slope) * a).to(input.dtype)


STAND_INS = (
    batch_norm_stats,
    batch_norm_gather_stats_with_counts,
    batch_norm_elemt,
    batch_norm_backward_reduce,
    batch_norm_backward_elemt,
)


@pytest.fixture
def operators(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's operators for GPUs, played on the CPU."""
    for stand_in in STAND_INS:
        monkeypatch.setattr(torch, stand_in.__name__, stand_in)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_measures_nothing() -> None:
    command = [sys.executable, str(BENCH / "on_gpu.py")]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 2, run.stderr
    assert "needs a GPU" in run.stderr
    assert not run.stdout


# NumPy, in which the kernels are interpreted, warns of NaN.
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parity_of_tiny_cases(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    half, single = ("bfloat16",), ("float32",)
    cases = [
        Case("channels-last", TINY, LAST),
        Case("formats differ", TINY, LAST, dy_format=CONTIGUOUS, dtypes=half),
        Case("half input alone", TINY, parameters=torch.float32, dtypes=half),
        Case("misaligned", TINY, shift=1, dtypes=single),
        Case("no parameters", TINY, weight=False, bias=False, momentum=None, dtypes=single),
        Case("mean", TINY, mean=1e4, weight=False, bias=False, y_error=2e-6, dtypes=single),
    ]
    monkeypatch.setattr(gpu_parity, "CASES", cases)
    monkeypatch.setattr(gpu_parity, "NOT_FINITE", {"contiguous": (TINY, CONTIGUOUS)})
    expected, *records = gpu_parity.records(dtype, CPU)
    assert len(records) == expected["expected"]
    assert not [r for r in records if not r["ok"]]
    assert all(r["share"] <= 1 for r in records if "share" in r)


def test_every_parity_case_has_a_name_of_its_own_and_values_enough() -> None:
    for dtype in gpu_parity.DTYPES:
        cases = [case for case in gpu_parity.CASES if dtype in case.dtypes]
        assert len(gpu_parity.checks(dtype)) == len(cases) + len(gpu_parity.NOT_FINITE) + 1
    assert all(math.prod(c.size) > c.size[1] for c in gpu_parity.CASES)


def test_samples_may_lie_far_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu_cases._FAR", 2**12)
    assert gpu_parity.check_case(Case("far", TINY, far=True), torch.bfloat16, CPU)["ok"]


@pytest.mark.parametrize(
    ("launcher", "spoil", "worst"),
    [
        ("backward_input", lambda dx: dx * 1.05, "dx"),
        ("backward_input", lambda dx: dx * math.nan, "dx"),
        ("normalize", lambda result: (result[0] + 0.1, result[1]), "y"),
    ],
)
def test_parity_notices_a_wrong_kernel(
    monkeypatch: pytest.MonkeyPatch, launcher: str, spoil: Callable[[Any], Any], worst: str
) -> None:
    right = getattr(gpu_parity, launcher)
    monkeypatch.setattr(gpu_parity, launcher, lambda *args: spoil(right(*args)))
    record = gpu_parity.check_case(Case("spoilt", TINY), torch.float32, CPU)
    assert not record["ok"]
    assert "within tolerance" in record["failed"]
    assert record["worst"] == worst
    json.dumps(record, allow_nan=False)


def test_parity_notices_what_is_left_unwritten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parity, "backward_input", lambda x, *_: torch.empty_like(x).view_as(x))
    record = gpu_parity.check_case(Case("unwritten", TINY), torch.float32, CPU)
    assert record["worst"] == "dx"
    assert record["share"] == "nan"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_the_tolerance_is_that_of_the_test_suite(dtype: torch.dtype) -> None:
    x, dy = torch.randn(TINY).to(dtype), torch.randn(TINY).to(dtype)
    layer = make_layer(Case("", TINY), dtype)
    exact = gpu_parity.torch_step(layer, x, dy, torch.float64)
    for share, passes in ((0.98, True), (1.02, False)):
        for name in ("y", "dx", "grad_weight", "running_var"):
            step = Step(**vars(exact))
            off = torch.ones_like(getattr(step, name))
            setattr(step, name, getattr(exact, name) + off)
            bound = 1 / gpu_parity.shares_of_tolerance(step, layer, x, dy)[name]
            setattr(step, name, getattr(exact, name) + share * bound * off)
            assert (gpu_parity.shares_of_tolerance(step, layer, x, dy)[name] <= 1) == passes
            if passes:
                assert_step_rounds(step, layer, x, dy)
            else:
                with pytest.raises(AssertionError, match=name):
                    assert_step_rounds(step, layer, x, dy)


@pytest.mark.parametrize("stand_in", STAND_INS, ids=lambda f: f.__name__)
def test_stand_ins_take_what_the_operators_take(stand_in: Callable[..., Any]) -> None:
    schema = getattr(torch.ops.aten, stand_in.__name__).default._schema
    assert list(inspect.signature(stand_in).parameters) == [a.name for a in schema.arguments]
    outputs = str(inspect.signature(stand_in).return_annotation).count("Tensor")
    assert max(outputs, 1) == len(schema.returns)


@pytest.mark.usefixtures("operators")
@pytest.mark.parametrize("memory_format", [CONTIGUOUS, LAST], ids=str)
def test_the_operator_sequence_is_batch_norm(memory_format: torch.memory_format) -> None:
    layer, twin = gpu_peers.SequenceLayer(5), gpu_peers.native(5, 4, CPU)
    x = torch.randn(TINY).contiguous(memory_format=memory_format).requires_grad_()
    dy = torch.randn(TINY)
    for _ in range(2):
        results = []
        for module in (layer, twin):
            y = module(x)
            results.append([y, *torch.autograd.grad(y, [x, module.weight, module.bias], dy)])
        torch.testing.assert_close(*results)
    torch.testing.assert_close(layer.state_dict(), twin.state_dict())


class FixedTimer:
    """Says that every call takes as long as its contestant is called."""

    def __init__(self) -> None:
        self.calls = 0

    def device_ms(self, call: Callable[[], object], host_ms: float) -> float:
        assert host_ms == 0.5
        call()
        self.calls += 1
        return 2.0 if "copy" in repr(call) else 4.0

    def host_ms(self, call: Callable[[], object]) -> float:
        call()
        return 0.5


@pytest.mark.usefixtures("operators")
def test_every_contestant_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, turns in (("_WARM_UP", 1), ("_LEAST_ROUNDS", 2), ("_MOST_ROUNDS", 2)):
        monkeypatch.setattr(f"gpu_timer.{name}", turns)
    shapes = [
        (Shape("image", (2, 5, 3, 4), ""), LAST, torch.bfloat16),
        (Shape("rows", (7, 11), ""), CONTIGUOUS, torch.float32),
        (Shape("empty", (0, 3, 4), ""), CONTIGUOUS, torch.float32),
    ]
    cases = [gpu_speed.Case(*shape) for shape in shapes]
    records = list(gpu_speed.records(cases, CPU, FixedTimer(), 60))
    assert all(r["ok"] for r in records), records
    assert [r.get("skipped") for r in records] == [None, None, "empty: nothing moves"]
    image = records[0]
    assert image["format"] == "channels-last"
    assert image["bytes"] == 2 * 2 * 5 * 3 * 4
    assert {what: set(who) for what, who in image["times"].items()} == {
        "copy": {"torch"},
        "channel_stats": {"ours", "torch"},
        "normalize": {"ours", "torch"},
        "backward_reduce": {"ours", "torch"},
        "backward_input": {"ours", "torch"},
        "forward": {"ours", "torch", "native"},
        "backward": {"ours", "torch", "native"},
    }
    assert image["rounds"] == 2
    assert speed_up(image, "forward", "native") == 1
    # Two reads and a write, against one of each in half the time.
    assert share_of_copy(image, "forward") == 0.75
    lines = list(summary("speed", json.loads(json.dumps(records)), True))
    assert lines[0] == "speed: 2 passed, 0 failed, 1 skipped"
    assert sum("geometric mean of 1 inputs" in line for line in lines) == 2
    assert not any("geometric" in line for line in summary("speed", records, False))


@pytest.mark.usefixtures("operators")
def test_layers_that_disagree_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "batch_norm_elemt", lambda x, *_: 2 * x)
    case = gpu_speed.Case(Shape("image", TINY, ""), CONTIGUOUS, torch.float32)
    (record,) = gpu_speed.records([case], CPU, FixedTimer(), 60)
    assert not record["ok"]
    assert "y by torch" in record["error"]


def test_a_case_without_time_is_named() -> None:
    case = gpu_speed.Case(Shape("image", TINY, ""), CONTIGUOUS, torch.float32)
    (record,) = gpu_speed.records([case], CPU, FixedTimer(), -1)
    assert record["skipped"] == "no time left"
    assert "image" in list(summary("speed", [record], None))[-1]


def test_every_case_is_compiled_by_a_step() -> None:
    case = gpu_speed.Case(Shape("image", TINY, ""), LAST, torch.bfloat16)
    with mock.patch.object(gpu_speed.SyncBatchNorm, "forward", autospec=True) as forward:
        forward.side_effect = lambda layer, x: F.batch_norm(x.float(), None, None, training=True)
        gpu_speed.compile_case(case, "cpu")
    (x,) = (call.args[1] for call in forward.call_args_list)
    assert x.shape == TINY
    assert x.dtype == x.grad.dtype == torch.bfloat16
    assert x.is_contiguous(memory_format=LAST)


def test_the_suite_is_timed_in_both_formats_and_dtypes() -> None:
    abouts = [str(case.about()) for case in gpu_speed.cases()]
    assert len(set(abouts)) == len(abouts)
    assert {case.dtype for case in gpu_speed.cases()} == {torch.bfloat16, torch.float32}


def replayed_by_running(step: gpu_graphs.Step) -> tuple[list[Tensor], Callable[[], None]]:
    outputs = step()

    def replay() -> None:
        for output, new in zip(outputs, step(), strict=True):
            output.copy_(new)

    return outputs, replay


def test_replays_are_compared_with_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {"image": (TINY, LAST), "empty": ((0, 3, 4), CONTIGUOUS)}
    monkeypatch.setattr(gpu_graphs, "CASES", cases)
    expected, *records = gpu_graphs.records(CPU, replayed_by_running)
    assert expected == {"expected": 4}
    assert [r["ok"] for r in records] == [True] * 4, records

    def never_replayed(step: gpu_graphs.Step) -> tuple[list[Tensor], Callable[[], None]]:
        return step(), lambda: None

    _, image, *_ = gpu_graphs.records(CPU, never_replayed)
    everything = {"y", "dx", "dw", "db", "running_mean", "running_var", "num_batches_tracked"}
    assert set(image["failed"]) == everything


def test_two_ranks_against_the_oracle(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        "uneven": gpu_ranks.Split((1, 3), (5, 4, 3), LAST, torch.float32),
        "one empty": gpu_ranks.Split((4, 0), (5, 4), CONTIGUOUS, torch.bfloat16),
    }
    monkeypatch.setattr(gpu_ranks, "CASES", cases)
    expected, *records = gpu_ranks.records(CPU, ranks)
    assert expected == {"expected": 2}
    assert [r["ok"] for r in records] == [True, True], records


def test_tuning_reads_the_table_that_a_run_writes() -> None:
    entry = {"kernel": "normalize", "N": 1, "C": 2, "S": 3, "heuristic_us": 3.0, "tuned_us": 2.0}
    write = (
        "import os, pathlib\n"
        "folder = pathlib.Path(os.environ['SYNCBN_TRITON_CACHE'])\n"
        f"(folder / 'GPU.jsonl').write_text({json.dumps(entry)!r} + '\\n')\n"
    )
    for code, ok in ((write, True), (write + "raise SystemExit(3)", False), ("", False)):
        _, record = gpu_tuning.records((sys.executable, "-c", code), 30)
        assert record["ok"] == ok, record
    _, record = gpu_tuning.records((sys.executable, "-c", write), 30)
    assert "1.50 times" in list(summary("tuning", [record], None))[1]
    wait = "import time\nprint('half', flush=True)\ntime.sleep(60)"
    for code, ok in ((write + wait, True), (wait, False)):
        _, record = gpu_tuning.records((sys.executable, "-c", code), 1.5)
        assert record["ok"] == ok
        assert record["stopped"] == "after 1.5 s"
        assert "half" in record["output"]


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What each write of results holds; on a device that is made up, with parts that are."""
    scripts = {
        "parity": 'print(\'{"expected": 3}\\n{"ok": true, "case": "a"}\')\nraise KeyError(\'b\')',
        "speed": "print('noise')\nprint('{\"ok\": true}')",
        "tuning": "import time\nprint('{\"ok\": true}', flush=True)\ntime.sleep(60)",
    }
    for name, code in scripts.items():
        tmp_path.joinpath(f"{name}.py").write_text(code)
    parts = {n: on_gpu.Part(((str(tmp_path / f"{n}.py"),),), 2.5) for n in scripts}
    monkeypatch.setattr(on_gpu, "PARTS", parts)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    described = {"device": "A GPU", "torch": "2", "triton": "3"}
    monkeypatch.setattr(on_gpu, "describe", lambda device: described)
    results: list[dict[str, Any]] = []
    write = on_gpu.write

    def write_and_read(path: Path, result: dict[str, Any]) -> None:
        write(path, result)
        results.append(json.loads(path.read_text()))

    monkeypatch.setattr(on_gpu, "write", write_and_read)
    return results


def test_a_part_that_fails_is_told_and_the_others_run(
    written: list[dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert on_gpu.main(["--results", str(tmp_path / "results")]) == 1
    assert [list(result["parts"]) for result in written] == [
        ["parity"],
        ["parity", "speed"],
        ["parity", "speed", "tuning"],
    ]
    parity, speed, tuning = written[-1]["parts"].values()
    assert [part["ok"] for part in (parity, speed, tuning)] == [False, True, False]
    assert parity["records"] == [{"ok": True, "case": "a"}]
    assert "KeyError: 'b'" in parity["errors"][0]["stderr"]
    assert tuning["errors"][0]["error"] == "not done in time"
    assert tuning["records"] == [{"ok": True}]
    out = capsys.readouterr().out
    assert "KeyError: 'b'" in out
    assert "2 were not reached" in out
    assert "no ratios: parity failed" in out
    assert "failed: parity, tuning" in out
    (path,) = (tmp_path / "results").iterdir()
    assert path.name.endswith("_A-GPU.json")


def test_parts_can_be_chosen(written: list[dict[str, Any]], tmp_path: Path) -> None:
    assert on_gpu.main(["--parts", "speed", "--results", str(tmp_path)]) == 0
    assert list(written[-1]["parts"]) == ["speed"]


def test_every_part_has_a_script() -> None:
    scripts = [command[0] for part in on_gpu.PARTS.values() for command in part.commands]
    assert all((BENCH / script).exists() for script in scripts)


def test_records_outlive_what_surrounds_them() -> None:
    assert parse('noise\n{"ok": true}\n[1]\n{"ok": fal') == [{"ok": True}]
    assert (figure(0.123456), figure(math.inf)) == (0.1235, "inf")


def test_the_machine_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    class Properties:
        name, total_memory, multi_processor_count = "A GPU", 1, 2

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: Properties)
    described = on_gpu.describe(0)
    assert described["device"] == "A GPU"
    json.dumps(described)
    assert on_gpu._output("no-such-program") is None
    assert on_gpu._output(sys.executable, "-c", "raise SystemExit(1)") is None
