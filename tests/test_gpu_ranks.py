"""`bench/gpu_ranks.py` compares ranks of uneven shares with the oracle, here ranks on the CPU."""

import sys
from pathlib import Path

import pytest
import torch
from gpu_stand_ins import CPU
from ranks import RankPool

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import gpu_ranks
from gpu_cases import CONTIGUOUS, LAST


def test_two_ranks_against_the_oracle(ranks: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = {
        "uneven": gpu_ranks.Split((1, 3), (5, 4, 3), LAST, torch.float32),
        "one empty": gpu_ranks.Split((4, 0), (5, 4), CONTIGUOUS, torch.bfloat16),
    }
    monkeypatch.setattr(gpu_ranks, "CASES", cases)
    expected, *records = gpu_ranks.records(CPU, ranks)
    assert expected == {"expected": 2}
    assert [r["ok"] for r in records] == [True, True], records
