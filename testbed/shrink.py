"""Find the delays that make a training run fail: `python -m testbed.shrink SCRIPT --world N --delays WORDS -- ARGS`.

Trains without delays with Paddle's baseline (`--against undelayed`: with the same plan), then with the given delays. If losses, parameters
or optimizer state then differ in a bit, or a rank fails, or all ranks hang, it removes delays on all ranks as long as the run still
fails. It prints the remaining delays with the operations that they delay, and in the form of `TESTBED_DELAYS`. Exit codes: 0 found,
1 the run does not fail, 2 user error.

Needs O(log n) runs if one delay out of n is enough, and O(n^2) at worst.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from interlace.config import find_config
from interlace.errors import InterlaceError
from interlace.local.launch import LaunchResult, launch
from interlace.local.verdict import first_difference
from interlace.user_passes import VARIABLE as IMPORT_VARIABLE
from testbed.delays import DELAYS_VARIABLE, TAKEN_VARIABLE, Site, parse_sites, show_sites, shrink
from testbed.device import SWITCHES_VARIABLE, TestbedError


@dataclass(slots=True)
class Case:
    """A training run that may fail, and the correct result to compare it with."""

    script: str
    args: Sequence[str]
    world: int
    env: Mapping[str, str]
    timeout_s: float
    right: LaunchResult | None = None
    labels: dict[str, str] = field(default_factory=dict)
    num_runs: int = 0

    def run(self, words: str, folder: Path, **variables: str) -> LaunchResult:
        """Train with delays, given in the form of `TESTBED_DELAYS`."""
        self.num_runs += 1
        env = {**self.env, DELAYS_VARIABLE: words, TAKEN_VARIABLE: os.fspath(folder), **variables}
        return launch(self.script, self.args, self.world, env, None, folder / "logs", self.timeout_s)

    def failure(self, words: str) -> tuple[str, list[Site]]:
        """What is wrong with these delays (empty: nothing), and the delays that were applied."""
        with tempfile.TemporaryDirectory(prefix="testbed-shrink-") as folder:
            try:
                found = self.run(words, Path(folder))
            except InterlaceError as error:
                return str(error).splitlines()[0], self.taken(Path(folder))
            assert self.right is not None
            return first_difference(self.right.reports, found.reports) or "", self.taken(Path(folder))

    def taken(self, folder: Path) -> list[Site]:
        """The delays applied on all ranks of a run, read from its folder; also stores in `labels` what each of them delayed."""
        sites = []
        for rank in range(self.world):
            path = folder / f"delays{rank}.json"
            for row in json.loads(path.read_text()) if path.exists() else ():
                sites += parse_sites(row["site"])
                step = f"step {row['step']}, " if row["step"] else ""
                self.labels[row["site"]] = f"{step}{row['kind']} {row['name']}{': ' if row['label'] else ''}{row['label']}"
        return sites

    def fails(self, sites: Sequence[Site]) -> bool:
        """Whether the run fails with only these delays."""
        why, _ = self.failure(f"sites={show_sites(sites)}")
        print(f"run {self.num_runs}: {len(sites)} delays: {why or 'right'}", file=sys.stderr, flush=True)
        return bool(why)


def find(case: Case, delays: str, against: str) -> list[Site]:
    """A minimal set of delays with which the case fails; empty if it does not fail.

    Raises:
        InterlaceError: The reference run without delays fails.
        TestbedError: The case fails, but its ranks left no record of their delays.
    """
    with tempfile.TemporaryDirectory(prefix="testbed-shrink-") as folder:
        baseline = {"INTERLACE_DISABLE": "1", SWITCHES_VARIABLE: "record=2"} if against == "baseline" else {}
        case.right = case.run("", Path(folder), **baseline)
    why, sites = case.failure(delays)
    print(f"run {case.num_runs}: {delays}: {why or 'right'}", file=sys.stderr, flush=True)
    if why and not sites:
        raise TestbedError(
            f"no failed rank left a record of its delays, which is written at the end of each step: {why}; "
            "give the sites instead: --delays sites=..."
        )
    return shrink(sites, case.fails) if why else []


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m testbed.shrink", description="Find the delays that make a training run fail.")
    parser.add_argument("script", metavar="SCRIPT", help="a training script, as of `interlace run`; its arguments follow --")
    parser.add_argument("--world", type=int, required=True, metavar="N", help="number of ranks")
    parser.add_argument("--delays", required=True, metavar="WORDS", help='such as "seed=3,permille=30,max_us=2000", as in TESTBED_DELAYS')
    parser.add_argument("--config", metavar="FILE", help="configuration (YAML) or preset; replaces the script's own")
    parser.add_argument("--import", dest="imports", action="append", default=[], metavar="MODULE", help="import this first on every rank")
    parser.add_argument(
        "--against", choices=("baseline", "undelayed"), default="baseline", help="what is right: Paddle's plan, or the same run"
    )
    parser.add_argument("--timeout", type=float, default=60.0, metavar="S", help="how long a rank waits for another (default: 60)")
    given = list(sys.argv[1:] if argv is None else argv)
    at = given.index("--") if "--" in given else len(given)
    args = parser.parse_args(given[:at])
    env = {"INTERLACE_TARGET": "testbed"}
    try:
        if args.config:
            env["INTERLACE_CONFIG"] = os.path.abspath(find_config(args.config))
        if args.imports:
            env[IMPORT_VARIABLE] = os.pathsep.join(os.path.abspath(name) if name.endswith(".py") else name for name in args.imports)
        case = Case(args.script, given[at + 1 :], args.world, env, args.timeout)
        sites = find(case, args.delays, args.against)
    except (InterlaceError, TestbedError) as error:
        print(f"testbed.shrink: {error}", file=sys.stderr)
        return 2
    if not sites:
        print(f"right under {args.delays}: nothing to shrink; try another seed, or longer delays")
        return 1
    for site in sites:
        print(f"rank {site.rank}, stream {site.stream}, piece {site.ordinal}: {site.us} us before {case.labels[str(site)]}")
    print(f'{case.num_runs} runs; again: {DELAYS_VARIABLE}="sites={show_sites(sites)}"')
    return 0


if __name__ == "__main__":
    sys.exit(main())
