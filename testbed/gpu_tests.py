"""Run tests/testbed on GPUs instead of host threads: `python -m testbed.gpu_tests --gpus N --out FOLDER`.

Writes the outcome of each test to `testbed_tests.json`, with the machine and versions. Cases with more ranks than GPUs are skipped.
Needs pytest and the CUDA plugin; with pytest-xdist, tests run in parallel. Exit code 1 if a test fails or none passed.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from testbed.device import VARIANT_VARIABLE
from testbed.gpus import ROOT, machine, python_path

TESTS = ROOT / "tests" / "testbed"
APART = "test_training.py"
"""Tests of this file share no state and are spread over processes one by one; those of other files share fixtures and stay together."""
WORKERS, TIMEOUT_S = "6", 1800.0
DONE = (0, 1)
"""Exit codes with which pytest has written complete results."""


def run_tests(out: Path, variant: str, gpus: int) -> dict[str, Any]:
    """Run all tests and return the results, which are also written to `out`."""
    groups = [("load", [TESTS / APART]), ("loadfile", sorted(path for path in TESTS.glob("test_*.py") if path.name != APART))]
    env = {**os.environ, VARIANT_VARIABLE: variant, "PYTHONPATH": python_path()}
    if variant == "cuda":
        env.setdefault("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus))))
    spread = variant == "cuda" and importlib.util.find_spec("xdist") is not None
    running = []
    for how, files in groups:
        results = out / f"tests_{how}.xml"
        results.unlink(missing_ok=True)
        words = ["-n", WORKERS, "--dist", how] if spread else []
        command = [sys.executable, "-m", "pytest", *words, "-p", "no:cacheprovider", f"--junitxml={results}", *map(os.fspath, files)]
        running.append((results, subprocess.Popen(command, env=env, cwd=ROOT)))
        if not spread:
            _wait(running[-1][1])
    tests: dict[str, Any] = {}
    for results, process in running:
        code = _wait(process)
        is_whole = code in DONE and results.exists()
        tests.update(_read(results) if is_whole else {results.stem: {"outcome": "error", "message": f"pytest: exit code {code}"}})
    found = {**machine(), "variant": variant, "counts": dict(Counter(each["outcome"] for each in tests.values())), "tests": tests}
    (out / "testbed_tests.json").write_text(json.dumps(found, indent=1) + "\n")
    return found


def _wait(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _read(path: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        wrong = next((part for part in case if part.tag in ("failure", "error", "skipped")), None)
        outcome = "passed" if wrong is None else {"failure": "failed"}.get(wrong.tag, wrong.tag)
        name = f"{str(case.get('classname')).rpartition('.')[2]}::{case.get('name')}"
        found[name] = {"outcome": outcome, "s": round(float(case.get("time", 0)), 1)}
        if wrong is not None:
            found[name]["message"] = str(wrong.get("message"))[:600]
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m testbed.gpu_tests", description="Run tests/testbed on GPUs.")
    parser.add_argument("--gpus", type=int, required=True, metavar="N")
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "h200", metavar="FOLDER")
    parser.add_argument("--threads", action="store_true", help="host threads for streams: a dry run")
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    counts = run_tests(args.out.absolute(), "threads" if args.threads else "cuda", args.gpus)["counts"]
    print(f"tests: {counts}", flush=True)
    return 1 if counts.keys() - {"passed", "skipped"} or not counts.get("passed") else 0


if __name__ == "__main__":
    sys.exit(main())
