"""The texts say what the stored results say, of all their cases. No Paddle, no device."""

from __future__ import annotations

import doctest
import re
import statistics
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))

import claiming  # noqa: E402
import claims  # noqa: E402
import claims_alone  # noqa: E402
import claims_beside  # noqa: E402
import claims_h200  # noqa: E402

from benchmarks.gpu import results  # noqa: E402
from interlace.cost_model import load_profile  # noqa: E402
from interlace.cost_model.profile import OpSample  # noqa: E402
from interlace.report import accuracy  # noqa: E402

SLOW = ("benchmarks/results/gpu.md", "benchmarks/results/external/README.md")
"""Texts with the most claims."""
KEPT_TOO_MUCH = {
    ("llama-s4096-mp1-pp2", "budget-0.9"),
    ("llama-s4096-mp1-pp2", "budget-0.8"),
    *(("llama-s2048-mp1-pp2-sendrecv", plan) for plan in ("dx-first", "offload-1")),
}
"""Budgets that were measured when the lowering still kept tensors of vectors for the next micro-batch's forward (tests/bridge); and two
plans of a sitting with a first form of send and receive."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in claims.TEXTS])
def test_texts_say_what_the_results_say(name: str) -> None:
    """`python benchmarks/claims.py` writes them."""
    text = (ROOT / name).read_text()
    assert claims.BLOCK.findall(text)
    assert claims.rewritten(text, name) == text


def test_examples_in_docstrings() -> None:
    assert [doctest.testmod(module).failed for module in (claiming, claims_h200)] == [0, 0]


def test_peaks_are_planned_as_measured() -> None:
    """Memory. Within 1 % of what tensors held on H200s: Paddle's baseline, ours, and ours under budgets."""
    rows = [row for row in claims_h200.layers() if row["world"] == 2 and "workspace" in row.get("peak_bytes_by_rank", [{}])[0]]
    known = {
        results.run_of(row): accuracy.peak_error(row)
        for row in rows
        if accuracy.PEAKS in row.get("simulated", {}) and not row["case"].startswith("small")
    }
    off = {run[:2] for run, error in known.items() if abs(error) > 0.01}
    assert off <= KEPT_TOO_MUCH
    for case in ("gpt-s4096-mp1-pp2", "llama-s4096-mp1-pp2"):
        assert {"stock", "auto", "budget-1"} <= {plan for of, plan, _ in known if of == case}


def test_every_claim_stands_somewhere() -> None:
    """What nobody reads goes."""
    said = {name for text in claims.TEXTS for name, _ in claims.BLOCK.findall((ROOT / text).read_text())}
    assert said == claims.CLAIMS.keys()


def test_no_text_has_blocks_that_nothing_checks() -> None:
    """A block in another text would be written by nobody."""
    places = ("*.md", "*/*.md", "docs/*/*.md", "benchmarks/results/*.md", "benchmarks/results/*/*.md")
    texts = [path for where in places for path in ROOT.glob(where) if "<!-- claims:" in path.read_text()]
    assert {str(path.relative_to(ROOT)) for path in texts} == set(claims.TEXTS)


def test_a_wrong_figure_is_written_anew_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """`--check` writes nothing and fails; without it the text is right again; what is no claim is refused."""
    text = f"# T\n\n<!-- claims: order -->{claims.CLAIMS['order']()}<!-- /claims -->\n"
    wrong = tmp_path / "t.md"
    wrong.write_text(re.sub(r"\d+ of", "999 of", text))
    monkeypatch.setattr(claims, "ROOT", tmp_path)
    monkeypatch.setattr(claims, "TEXTS", ("t.md",))
    assert claims.main(["--check"]) == 1
    assert "999 of" in wrong.read_text()
    assert claims.main([]) == 0
    assert wrong.read_text() == text
    assert claims.main(["--check"]) == 0
    assert capsys.readouterr().out == "t.md says other than the results\nt.md written\n"
    wrapped = claims.rewritten("- Ends\n  <!-- claims: repeated -->\n  <!-- /claims -->\n", "t.md")
    assert max(map(len, wrapped.splitlines())) <= claims.WIDTH < len(claims.CLAIMS["repeated"]())
    assert " ".join(wrapped.split()) == f"- Ends <!-- claims: repeated --> {claims.CLAIMS['repeated']()}. <!-- /claims -->"
    assert claims.rewritten(wrapped, "t.md") == wrapped
    unclosed = text.replace("<!-- /claims -->", "")
    for broken, told in ((text.replace("order", "disorder"), "no claim 'disorder'"), (unclosed, "t.md: a `<!--")):
        with pytest.raises(SystemExit, match=told):
            claims.rewritten(broken, "t.md")


def test_a_sample_that_is_left_out_is_predicted_by_samples_like_it() -> None:
    """Made up: twice the time where the first operand is transposed, and four times where the contracted size is 64 in place of 256."""
    samples = [
        OpSample("gemm", "float32", {"batch": 1, "m": m, "n": 64, "k": k, **lying}, 8 * m * k, m * k * slow * (4 if k == 64 else 1))
        for m in (128, 256, 512, 1024)
        for k in (64, 256)
        for slow, lying in ((10, {}), (20, {"transpose_x": 1}))
    ]
    found = list(claims_alone.errors_left_out(samples, 0))
    assert len(found) == 16
    inside = [errors for sample, errors in zip(samples, found, strict=True) if sample.dims["m"] in (256, 512)]
    assert all(by_depth < 1e-9 < by_transposes and by_depth < one for one, by_transposes, by_depth in inside)


def run(case: str, plan: str, ms: float, sitting: str = "now", **more: Any) -> dict[str, Any]:
    held = {"allocated": round(10 * ms), "reserved": 100}
    return {
        "case": case,
        "plan": plan,
        "world": 2,
        "sitting": sitting,
        "step_ms": {"median": ms, "min": ms, "max": ms},
        "peak_bytes_by_rank": [held],
        "losses": [ms],
        **more,
    }


def stored(monkeypatch: pytest.MonkeyPatch, *rows: dict[str, Any]) -> None:
    args = {row["case"]: row["case"].removesuffix("-again") for row in rows}
    monkeypatch.setattr(claims_h200, "raw", lambda name: {"runs": list(rows), "args": args})


def test_ranges_hold_every_case_that_has_stock_in_its_sitting(monkeypatch: pytest.MonkeyPatch) -> None:
    stored(
        monkeypatch,
        run("a-mp2", "stock", 10),
        run("a-mp2", "mixed", 8),
        run("b-mp2-odd", "stock", 10),
        run("b-mp2-odd", "mixed", 12.5),
        run("c-mp2", "stock", 10, "before"),
        run("c-mp2", "mixed", 1),
    )
    assert "| mp 2 |  |  | -20.0 to +25.0 % (2) |  |  |" in claims_h200.gains()
    assert "| mixed | 2 | -20 to +25 %, 1 | +0 %, 2 |" in claims_h200.memory()


def test_bits_say_who_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal, not equal, like another sitting's stock, like none, without any stock."""
    yes, no = ({"losses_equal_stock": same, "parameters_equal_stock": same} for same in (True, False))
    stored(
        monkeypatch,
        run("a", "stock", 1, **yes),
        run("a", "mixed", 1, **no),
        run("a-again", "mixed", 1),
        run("a-again", "odd", 2),
        run("b", "mixed", 3),
    )
    said = claims_h200.bits()
    assert "of 5 runs (0 failed), 2 have a baseline in the same session, and 1 of these have its losses" in said
    assert "Of 3 runs without one, 1 have the last loss of a baseline" in said
    assert "no such baseline: 1; number whose last loss differs from all of them: 1 (`a-again` odd)." in said


def test_every_run_that_was_compared_has_stocks_bits() -> None:
    """As README.md says."""
    compared = [row for row in claiming.raw("h200/testbed_layers.json")["runs"] if "losses_equal_stock" in row]
    assert len(compared) > 100
    assert all(row["losses_equal_stock"] and row["parameters_equal_stock"] for row in compared)


UNCLEAR = {("cast", "comm:all_to_all"), ("layer_norm_grad", "comm:all_gather")}
"""Take a tenth of the message's time in these readings, but took a little less when the calibration estimated it, so that it was not known
whether they hold the message up."""


def test_interference_of_a_calibrated_profile_is_what_its_readings_say() -> None:
    rows = {
        (row.beside, row.op): row
        for row in load_profile(str(claiming.RESULTS / "h100" / "calibrated.json")).interference
        if row.group_size == 2 and not row.dims
    }
    compared = 0
    for (kind, beside), found in claims_beside.beside_readings("h100").items():
        row = rows.get((beside, f"memory:{kind}"))
        if row is not None and row.num_files == len(found):
            assert abs(statistics.median(one.op for one, _ in found) - row.stretch_op) < 2e-3, (kind, beside)
            assert abs(statistics.median(one.beside for one, _ in found) - row.stretch_beside) < 2e-3, (kind, beside)
            assert bool(found[0][0].holds) == (row.holds or (kind, beside) in UNCLEAR), (kind, beside)
            compared += 1
    assert compared > 200
