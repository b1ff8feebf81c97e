"""The measurement as it is typed: tables, a plot, and an export that only measures."""

import json
from pathlib import Path

from click.testing import CliRunner

from eagle3.export.cli import main as export
from eagle3.export.fit_command import main as fit


def test_a_plot_of_two_heads_is_written_beside_the_table(tmp_path: Path):
    file = tmp_path / "acceptance.svg"
    done = CliRunner().invoke(fit, ["gemma4-tiny", "1", "3", "--plot", str(file)])
    assert done.exit_code == 0, done.output
    assert "the head fits: 2." in done.output and "heads of one target" in done.output
    drawn = file.read_text()
    assert drawn.startswith("<?xml") and drawn.count('id="axes_') == 2


def test_a_plot_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path: Path):
    for name, reason in (("a.xyz", "type .png or .svg"), ("none/a.png", "is no folder")):
        done = CliRunner().invoke(fit, ["gemma4-tiny", "1", "--plot", str(tmp_path / name)])
        assert done.exit_code == 1 and reason in done.output and "readings of" not in done.output


def test_an_export_that_only_measures_says_what_quantization_costs_and_writes_nothing(tmp_path: Path, monkeypatch):
    typed = ["--target-model", "gemma4-tiny", "--backend", "xnnpack", "--fit-only", "--qlinear", "8da4w", "--json"]
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(export, typed)
    assert done.exit_code == 0, done.output
    assert not list(tmp_path.iterdir())
    found = json.loads(done.stdout)
    assert found["verdict"] == "fits" and found["best"]["changes"] == {}
    share = found["quantization"]
    assert share["recipes"].startswith("--qlinear 8da4w") and 0.01 < share["changed_tokens"] < 0.2
    assert share["quantized"]["acceptance_length"] < share["unquantized"]["acceptance_length"] + 0.3


def test_an_export_that_only_measures_prints_the_table_of_readings():
    done = CliRunner().invoke(export, ["--target-model", "gemma4-tiny", "--backend", "xnnpack", "--fit-only"])
    assert done.exit_code == 0, done.output
    assert "as its files say" in done.output and "the head fits: 2." in done.output
