"""`bench/numerics.py` measures what is claimed of errors, and finds what the documents say."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "bench"))

import numerics

OURS = [name for name in numerics.LAYERS if name.startswith("ours")]
# Versions and processors round differently.
WITHIN = 4.0


def of_document(columns: dict[str, list[float]]) -> dict[str, list[float]]:
    """The same columns as the document has them, under the same titles."""
    lines = (Path(__file__).parents[1] / "docs" / "numerics.md").read_text().splitlines()
    (head,) = (i for i, line in enumerate(lines) if line.endswith(f"| {' | '.join(columns)} |"))
    rows = [line.strip("| ").split(" | ")[1:] for line in lines[head + 2 :]]
    found = zip(*rows[: len(next(iter(columns.values())))], strict=True)
    return {name: list(map(float, values)) for name, values in zip(columns, found, strict=True)}


def test_errors_of_y() -> None:
    errors = numerics.errors_of_y()
    bounds = [2e-6 if ratio <= 1e4 else 1e-3 for ratio in numerics.RATIOS]
    for name in OURS:
        assert all(error < bound for error, bound in zip(errors[name], bounds, strict=True))
    # Or there would be nothing to show.
    at = numerics.RATIOS.index(1e4)
    assert errors["torch, CPU"][at] > 2e-4
    assert not errors["sum of squares"][at] < 1
    documented = of_document(errors)
    for name in [*OURS, "torch, CPU"]:
        for error, said in zip(errors[name], documented[name], strict=True):
            assert said / WITHIN < error < said * WITHIN


def test_errors_of_the_variance_of_fp64() -> None:
    errors = numerics.errors_of_variance()
    ours, estimates = errors.values()
    for error, estimate in zip(ours, estimates, strict=True):
        assert error < max(WITHIN * estimate, 1e-14)
    documented = of_document({"largest relative error of var": ours, "2^-52 * (mean/std)^2": []})
    for error, said in zip(ours[1:], documented["largest relative error of var"][1:], strict=True):
        assert said / WITHIN < error < said * WITHIN


def test_errors_of_activations() -> None:
    errors = numerics.errors_of_activations()
    assert errors["relu"] == [0, 0]
    assert max(max(pair) for pair in errors.values()) < 1e-6


def test_the_script_prints_and_draws(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(numerics.torch, "set_num_threads", lambda threads: None)
    # Its tables are measured above.
    errors = {name: [1e-7] * len(numerics.RATIOS) for name in numerics.LAYERS}
    monkeypatch.setattr(numerics, "errors_of_y", lambda: errors)
    monkeypatch.setattr(numerics, "SHAPE", (2, 1, 4, 4))
    monkeypatch.setattr(numerics, "_POINTS", 64)
    image = tmp_path / "images" / "error.png"
    monkeypatch.setattr(sys, "argv", ["numerics.py", "--plot", str(image)])
    numerics.main()
    printed = capsys.readouterr().out
    assert "| 1e+06 | 1.0e-07 |" in printed
    assert image.read_bytes().startswith(b"\x89PNG")
