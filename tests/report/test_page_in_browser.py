"""The page in Chromium: no error, every section filled, its numbers those of the JSON, light and dark, and the ways to look closer."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from interlace.cli import main
from interlace.cost_model import load_profile
from interlace.cost_model.profile import save_profile
from interlace.planning.curve import write_sweep
from interlace.planning.trial import Result, Told
from interlace.report.page.write import template
from interlace.units import size
from tests.report.browser import CHROMIUM, WHY_NOT, ask
from tests.report.pages import SWEEP, columns, data_in, make_plans, make_recomputing
from tests.strategies import World

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=WHY_NOT)]
CONFIG = """\
device: h200
schedule_1f1b: {interleave: dx-first, only_gains: off, search: off}
offload_activations: {fraction: 0.6, min_bytes: 1}
"""
SECTIONS = [
    "picture",
    "job",
    "time",
    "memory",
    "communication",
    "offload",
    "recompute",
    "sweep",
    "measured",
    "done",
    "schedule",
    "assumptions",
]
LOOK = """
const colours = canvas => {
  const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data, found = new Set();
  for (let k = 0; k < pixels.length; k += 4) found.add("#" + [0, 1, 2].map(c => pixels[k + c].toString(16).padStart(2, "0")).join(""));
  return [...found];
};
const rows = id => [...document.querySelectorAll("#" + id + " tbody tr")].map(line => [...line.children].map(cell => cell.textContent));
return {
  ready: document.documentElement.dataset.ready,
  sections: [...document.querySelectorAll("main section")].map(each => [each.id, each.innerText.trim().length]),
  tiles: [...document.querySelectorAll("[data-figure]")].map(each => each.textContent),
  sentence: document.getElementById("sentence").textContent,
  tables: Object.fromEntries([...document.querySelectorAll("table")].map(each => [each.id, rows(each.id)])),
  canvases: Object.fromEntries([...document.querySelectorAll("canvas")].map(each => [each.id, colours(each)])),
  memory: document.getElementById("memorytext").textContent,
  captions: [...document.querySelectorAll("#memorycharts figcaption")].map(each => each.textContent),
  curve: [...document.querySelectorAll("#curve [data-step], #curve [data-budget]")].map(each => ({
    ...each.dataset, kind: each.getAttribute("class"),
    x: each.getBBox().x + each.getBBox().width / 2, y: each.getBBox().y + each.getBBox().height / 2, told: each.textContent,
    colour: getComputedStyle(each)[each.getAttribute("class") === "point" ? "fill" : "stroke"] })),
  paper: getComputedStyle(document.body).backgroundColor,
  palette: Object.fromEntries(Object.entries(palette)),
  schedule: [...document.querySelectorAll("#rows pre")].map(each => each.textContent),
  operations: document.getElementById("ops").dataset.shown,
  clock: document.getElementById("clocktext").textContent,
  sideways: document.documentElement.scrollWidth - document.documentElement.clientWidth,
};
"""


MOMENTS = ("left_ns", "back_ns", "read_ns")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, h200 = tmp_path_factory.mktemp("browser"), load_profile("h200")
    no_pause = msgspec.structs.replace(h200.host, between_steps_ns=0)  # between steps of this size nothing else would be seen
    device = save_profile(msgspec.structs.replace(h200, host=no_pause), folder / "device.json")
    plan = make_plans(folder, World(pp=2, mp=2, micro_batches=4, layers=2), CONFIG.replace("device: h200", f"device: {device}"))
    assert main(["report", str(plan), "-o", str(folder / "report.html")]) == 0
    return folder / "report.html"


def ms(ns: float) -> str:
    return f"{ns / 1e6:.3f}"


def test_every_section_is_filled_with_the_numbers_of_the_data(page: Path) -> None:
    console, seen = ask(page, LOOK)
    assert console == []
    assert seen["ready"] == "yes"
    assert [name for name, length in seen["sections"] if length > 20] == SECTIONS
    data = data_in(page)
    now = data["outcome"]["plan"]
    assert seen["tiles"] == [
        f"{ms(now['step_ns'])} ms",
        f"{ms(now['exposed_ns'])} ms",
        f"{ms(now['bubble_ns'])} ms",
        size(now["peak_bytes"]),
        size(data["outcome"]["pools"]["plan_bytes"]),
        f"{now['joules']:.1f} J",
    ]
    assert seen["sentence"] == data["sentence"]
    parts = ("compute_ns", "exposed_comm_ns", "bubble_ns", "host_ns", "hidden_comm_ns", "slowed_ns")
    splits = [
        [*(ms(each["split"][part]) for part in parts), f"{each['joules']:.1f}", str(each["mean_mhz"])]
        for each in (plan["rows"][row] for row in range(2) for plan in data["plans"])
    ]
    assert [line[3:] for line in seen["tables"]["splittable"]] == splits
    assert len(seen["tables"]["comm"]) == len(
        {(row["kind"], row["layer"], row["num_ranks"]) for plan in data["plans"] for row in plan["communication"]}
    )
    mine = {(row["kind"], row["layer"]): ms(row["exposed_ns"]) for row in data["plans"][1]["communication"]}
    assert all(line[-1] == mine.get((line[0], line[1]), "–") for line in seen["tables"]["comm"])
    whens = [
        [f"{row['tightest']['micro_batch']} of stage {row['tightest']['stage']}", *(ms(row["tightest"][name]) for name in MOMENTS)]
        for row in data["plans"][1]["offload"]
    ]
    assert [line[-4:] for line in seen["tables"]["moves"]] == whens
    assert [line[-5] for line in seen["tables"]["moves"]] == [ms(row["slack_ns"]) for row in data["plans"][1]["offload"]]
    for name, rules in (("changed", data["done"]), ("declined", data["declined"])):
        assert [(line[1], line[3]) for line in seen["tables"][name]] == [(rule["text"], str(rule["count"])) for rule in rules]
    assert seen["schedule"] == ["\n".join(plan["schedule"]) for plan in reversed(data["plans"])]
    assert len(seen["tables"]["trust"]) == len(data["device"]["shares"])
    assert all(seen["tables"][name] for name in ("waits", "holds0", "holds1", "unmeasured"))
    assert "No memory limit is known. " in seen["memory"]
    assert seen["palette"]["exposed"] not in seen["canvases"]["memory0"]
    for k, row in enumerate(data["plans"][1]["rows"]):
        assert f"(at {ms(row['memory']['peak_at_ns'])} ms, job " in seen["captions"][k]
        assert sum(int(line[2]) for line in seen["tables"][f"holds{k}"]) == sum(each["count"] for each in row["memory"]["holds"])
    assert seen["sideways"] == 0, "the page is wider than the window"


def test_the_limit_of_memory_is_drawn(tmp_path: Path) -> None:
    plan = make_plans(tmp_path, World(pp=2, micro_batches=4, layers=2), "memory_budget: 1GB\n")
    assert main(["report", str(plan), "-o", str(tmp_path / "page.html")]) == 0
    console, seen = ask(tmp_path / "page.html", LOOK)
    assert console == []
    assert f"The dashed line is the limit, {size(10**9)}: the memory budget. " in seen["memory"]
    assert seen["palette"]["exposed"] in seen["canvases"]["memory0"]


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark(page: Path, dark: bool) -> None:
    """The pictures are drawn in the scheme's own colours, the text stands off the paper."""
    console, seen = ask(page, LOOK, dark=dark)
    assert console == []
    assert seen["paper"] == ("rgb(20, 24, 31)" if dark else "rgb(255, 255, 255)")
    for name in ("forward", "backward", "bubble", "accent"):
        assert seen["palette"][name] in seen["canvases"]["step"]
    (mhz,) = {each for plan in data_in(page)["plans"] for row in plan["rows"] for each in row["clock"][1::2]}
    assert seen["clock"].endswith(f"which the power limit lowers: {mhz} MHz throughout.")
    assert seen["palette"]["exposed"] in seen["canvases"]["split"]
    assert all(seen["palette"]["accent"] in seen["canvases"][name] for name in ("memory0", "memory1"))
    assert len(seen["canvases"]["ops"]) > 3


def test_plans_that_a_run_measured(page: Path, tmp_path: Path) -> None:
    results = (Result("one", 12, 5_000_000, 40_000, 4_900_000, 2_100_000_000, 3 << 20), Result("two", fault="the same plan as one"))
    data = {**data_in(page), "trial": msgspec.to_builtins(Told(results, "one", 33))}
    out = tmp_path / "page.html"
    out.write_text(template().replace("/*DATA*/", json.dumps(data)), encoding="utf-8")
    console, seen = ask(out, LOOK)
    assert console == []
    none = ["–"] * 2
    assert seen["tables"]["trial"] == [
        ["one", "5.000", "0.040", "12", "4.900", "2.1", "3.0 MiB", ""],
        ["two", *none, "0", "–", *none, "the same plan as one"],
    ]


CLOCKS = """
const canvas = document.getElementById("step"), at = canvas.getBoundingClientRect(), tip = document.getElementById("tip");
const { data, width } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
const colour = (x, y) => "#" + [0, 1, 2].map(c => data[4 * (y * width + x) + c].toString(16).padStart(2, "0")).join("");
const lines = stepLanes.found.filter(each => !each.head).map(lane => [0.25, 0.75].map(share => {
  const top = lane.y + BAND + THIN, wide = canvas.clientWidth - 4 - LEFT;
  const x = Math.round(LEFT + share * stepOf(page.plans[lane.plan]) / longest * wide);
  canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: at.left + x, clientY: at.top + top + CLOCK / 2, bubbles: true }));
  return [tip.textContent, [...Array(CLOCK).keys()].filter(k => colour(x, top + k) === palette.accent)];
}));
return { lines, clock: document.getElementById("clocktext").textContent };
"""


def test_the_clock_is_a_line_under_each_stage(page: Path, tmp_path: Path) -> None:
    """High where the clock is high, low where it is low, on one scale; pointed at, it says the clock."""
    data = data_in(page)
    for plan, name in zip(data["plans"], ("before", "plan"), strict=True):
        for row in plan["rows"]:
            row["clock"] = [0, 1980, data["outcome"][name]["step_ns"] // 2, 1500]
    out = tmp_path / "page.html"
    out.write_text(template().replace("/*DATA*/", json.dumps(data)), encoding="utf-8")
    console, seen = ask(out, CLOCKS)
    assert console == []
    assert seen["clock"].endswith("which the power limit lowers: from 1500 (at the bottom) to 1980 MHz.")
    assert len(seen["lines"]) == 4
    for (early, high), (late, low) in seen["lines"]:
        assert early.startswith("clock 1980 MHz, at ")
        assert late.startswith("clock 1500 MHz, at ")
        assert max(high) < min(low)


def test_no_clock_without_power(page: Path, tmp_path: Path) -> None:
    data = data_in(page)
    for row in (row for plan in data["plans"] for row in plan["rows"]):
        row |= {"joules": 0, "mean_mhz": 0, "clock": []}
    out = tmp_path / "page.html"
    out.write_text(template().replace("/*DATA*/", json.dumps(data)), encoding="utf-8")
    console, seen = ask(out, LOOK)
    assert console == []
    assert seen["clock"] == ""
    assert seen["palette"]["accent"] not in seen["canvases"]["step"]


@pytest.mark.parametrize("dark", [False, True])
def test_the_curve_and_what_is_recomputed(tmp_path: Path, dark: bool) -> None:
    """Each point stands where its numbers say, in the scheme's colours, and the table beneath has them all."""
    write_sweep(SWEEP, make_recomputing(tmp_path))
    out = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "plan"), "-o", str(out)]) == 0
    console, seen = ask(out, LOOK, dark=dark)
    assert console == []
    data = data_in(out)
    fits, cross = [each for each in SWEEP.points if each.feasible], [each for each in SWEEP.points if not each.feasible]
    points = {kind: [each for each in seen["curve"] if each["kind"] == kind] for kind in ("point", "none", "paddle", "here")}
    assert [(int(each["budget"]), float(each["step"])) for each in points["point"]] == [(each.budget_bytes, each.step_us) for each in fits]
    assert [(int(each["budget"]), each["told"].split(": ", 1)[1]) for each in points["none"]] == [(e.budget_bytes, e.why) for e in cross]
    now = data["outcome"]["plan"]
    assert [float(each["step"]) for each in points["paddle"] + points["here"]] == [SWEEP.baseline.step_us, now["step_ns"] / 1e3]
    known = [
        (int(each.get("budget") or each["bytes"]), float(each["step"]), each["x"], each["y"]) for each in seen["curve"] if "step" in each
    ]
    for (bytes1, us1, x1, y1), (bytes2, us2, x2, y2) in pairwise(known):
        assert (bytes1 < bytes2) == (x1 < x2 - 1e-3)
        assert (us1 < us2) == (y1 > y2 + 1e-3)
    assert points["point"][0]["colour"] == ("rgb(127, 176, 245)" if dark else "rgb(37, 99, 201)")
    table = seen["tables"]["points"]
    assert len(table) == len(SWEEP.points) + 1
    for line, each in zip(table, SWEEP.points, strict=False):
        if not each.feasible:
            assert line == [size(each.budget_bytes), *["–"] * 7, each.why]
            continue
        change = 100 * ((each.step_us or 0) / SWEEP.baseline.step_us - 1)
        held = [size(found or 0) for found in (each.peak_bytes, each.kept_bytes, each.recomputed_bytes, each.offloaded_bytes)]
        times = [ms(1e3 * (each.step_us or 0)), f"{change:+.1f} %", ms(1e3 * (each.exposed_us or 0))]
        assert line == [size(each.budget_bytes), *times, *held, ""]
    assert table[-1][:2] == ["Paddle's baseline", f"{SWEEP.baseline.step_us / 1e3:.3f}"]
    repeats = data["plans"][1]["recomputed"]
    assert [line[:2] for line in seen["tables"]["repeats"]] == [[row["layer"], row["kind"]] for row in repeats]
    assert [line[5] for line in seen["tables"]["repeats"]] == [ms(row["time_ns"]) for row in repeats]
    assert [line[4] for line in seen["tables"]["repeats"]] == [size(row["size_bytes"]) for row in repeats]
    assert seen["sideways"] == 0


def test_looking_closer(page: Path) -> None:
    """The wheel shows operations, a click opens a job with all of its operations, and the tooltip names them."""
    steps = """
    const canvas = document.getElementById("step"), at = canvas.getBoundingClientRect();
    const pause = ms => new Promise(done => setTimeout(done, ms));
    const [slot, start, end] = page.plans[0].rows[1].jobs[2], lane = stepLanes.found.find(each => each.plan === 0 && each.row === 1);
    const x = () => at.left + LEFT + ((start + end) / 2 - view.from) / (view.to - view.from) * (canvas.clientWidth - 4 - LEFT);
    const where = () => ({ clientX: x(), clientY: at.top + lane.y + 8, bubbles: true, pointerId: 1 });
    const send = (kind, more) => canvas.dispatchEvent(new (kind === "wheel" ? WheelEvent : PointerEvent)(kind, { ...where(), ...more }));
    const before = view.to - view.from;
    for (let k = 0; k < 12; k++) send("wheel", { deltaY: -100, ctrlKey: true });
    const closer = view.to - view.from;
    send("wheel", { deltaY: -100 });
    const scrolls = view.to - view.from === closer;
    await pause(300);
    const text = lane.data.jobs[2][0], zoomed = (view.to - view.from) / before, drawn = [...drawnOps.keys()];
    canvas.setPointerCapture = () => {};
    send("pointermove", {}); const tip = document.getElementById("tip").textContent;
    send("pointerdown", {}); send("pointerup", {});
    await pause(300);
    document.getElementById("whole").click();
    return { slot: text, zoomed, scrolls, drawn, tip, chosen: [chosen.plan, chosen.row, chosen.job], whole: view.to - view.from === before,
             shown: Number(document.getElementById("ops").dataset.shown), about: document.getElementById("jobtext").textContent };
    """
    console, seen = ask(page, steps)
    assert console == []
    assert "failed" not in seen
    data = data_in(page)
    row = data["plans"][0]["rows"][1]
    slot, start, end, _ = row["jobs"][2]
    assert seen["zoomed"] < 0.1
    assert seen["scrolls"], "a plain wheel is for the page"
    assert "0/1" in seen["drawn"]
    assert seen["chosen"] == [0, 1, 2]
    assert seen["about"].startswith(f"{slot} of stage 1")
    found = columns(row["ops"])
    edge = (end - start) * 0.03
    assert seen["shown"] == int(((found[0] < end + edge) & (found[0] + found[1] > start - edge)).sum())
    assert "micro-batch" in seen["tip"] or "ms" in seen["tip"]
    assert seen["whole"]


def test_a_plan_with_nothing_to_compare(page: Path) -> None:
    out = page.parent / "alone.html"
    assert main(["report", str(page.parent / "plan" / "captured"), "-o", str(out)]) == 0
    console, seen = ask(out, LOOK)
    assert console == []
    assert [name for name, length in seen["sections"] if length > 20] == SECTIONS
    data: dict[str, Any] = data_in(out)
    assert seen["sentence"] == data["sentence"]
    assert data["outcome"]["before"] is None
