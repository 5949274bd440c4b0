"""`interlace choose`: the layout with which a script trains fastest, among those that its arguments can express."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from interlace.cli.dump import add_building, building_options, require_script
from interlace.cli.target import DEFAULT_PROFILE

if TYPE_CHECKING:
    from interlace.cost_model.profile import DeviceProfile, Network
    from interlace.layout.space import Cluster

LAYOUTS, FINALISTS = 16, 3
NETWORK, LATENCY_US = "50GB", 10.0
"""Network of a device if neither the profile nor the user gives it: a port of 400 Gb/s, and the latency of a message between two hosts."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> argparse.ArgumentParser:
    """Add `choose` to the command line."""
    parser = subparsers.add_parser(
        "choose",
        help="find the layout (pp, mp, vpp, micro-batches, sharding, recomputation) with which a script trains fastest",
        description="Build the programs of SCRIPT in many layouts, without launching ranks or allocating parameters; exclude layouts by "
        "bounds, simulate Paddle's baseline, plan the best few in full, and recommend one. Arguments after -- go to the script; the "
        "placeholders {pp}, {mp}, {dp}, {vpp}, {m}, {sharding} and {recompute} in them may vary.",
    )
    parser.add_argument("script", metavar="SCRIPT", help="a training script that uses paddle.distributed.to_static")
    parser.add_argument("--gpus", type=int, required=True, metavar="N", help="number of GPUs that layouts use")
    parser.add_argument(
        "--gpus-a-host", type=int, metavar="N", help="number of GPUs on each host (default: the profile's, 8 for h100 and h200)"
    )
    parser.add_argument("--memory", metavar="SIZE", help="device memory that a rank may use, such as 70GB (default: 90 %% of the device's)")
    parser.add_argument(
        "--device", default=DEFAULT_PROFILE, metavar="NAME", help=f"device profile, by name or path (default: {DEFAULT_PROFILE})"
    )
    parser.add_argument("--network", metavar="SIZE", help=f"bytes per second that a GPU sends to other hosts (default: {NETWORK})")
    parser.add_argument(
        "--latency-us", type=float, metavar="US", help=f"latency of a message between hosts in microseconds (default: {LATENCY_US:g})"
    )
    parser.add_argument(
        "--try", dest="tries", action="append", default=[], metavar="NAME=A,B", help="values of a placeholder; may be repeated"
    )
    parser.add_argument("--alternatives", metavar="FILE", help="YAML file with try, environment or layouts, for scripts without options")
    parser.add_argument("--layers", type=int, default=0, metavar="N", help="layers of the model: pp x vpp must divide them")
    parser.add_argument("--heads", type=int, default=0, metavar="N", help="attention heads of the model: mp must divide them")
    parser.add_argument(
        "--batch-size", type=int, default=0, metavar="N", help="sequences per step: micro-batches x replicas must divide them"
    )
    parser.add_argument("--tokens-a-step", type=int, default=0, metavar="N", help="tokens per step, if the programs do not show them")
    parser.add_argument("--config", default="", metavar="FILE", help="configuration (YAML) or preset for the plans")
    parser.add_argument(
        "--layouts",
        type=int,
        default=LAYOUTS,
        metavar="N",
        help=f"most layouts that are built in full; 0: none, only what is in -o is used (default: {LAYOUTS})",
    )
    parser.add_argument(
        "--finalists",
        type=int,
        default=FINALISTS,
        metavar="N",
        help=f"layouts that are planned in full; 0: none, the fastest with Paddle's baseline is recommended (default: {FINALISTS})",
    )
    parser.add_argument("--all", action="store_true", help="build every layout; exclude none by bounds")
    parser.add_argument(
        "-o", "--output", type=Path, default=Path("layouts"), metavar="DIR", help="folder for everything that is stored (default: layouts)"
    )
    parser.add_argument("--json", metavar="FILE", help="write the answer to FILE")
    parser.add_argument("--page", metavar="FILE", help="write the answer to FILE as an HTML page (default: choose.html in -o)")
    add_building(parser, "processes")
    parser.set_defaults(script_args=[])
    return parser


def main(args: argparse.Namespace) -> int:
    """Run the command; 0, 1 if no layout that was built fits into the memory, 2 for user errors."""
    from interlace.cli.outputs import check_apart, check_folder, write_json
    from interlace.cli.progress import Alive
    from interlace.config import load_config, make_config, require_jobs
    from interlace.cost_model import load_profile
    from interlace.errors import ConfigError
    from interlace.installed import require_paddle
    from interlace.ir.dump import write_whole
    from interlace.layout.answer import answer_of
    from interlace.layout.page import page_html
    from interlace.layout.screen import screen_text
    from interlace.layout.search import Limits, Search
    from interlace.layout.space import Cluster, Template, layouts_of, parse_tries, read_alternatives
    from interlace.layout.store import Store
    from interlace.temporary import claimed

    require_script(args.script)
    for name, least in (("layouts", 0), ("finalists", 0), ("jobs", 1)):
        if getattr(args, name) < least:
            raise ConfigError(f"--{name} {getattr(args, name)}: expected {least} or more")
    require_paddle()
    page = args.page or args.output / "choose.html"
    check_folder("-o", args.output)
    check_apart({"--json": args.json, "--page": args.page}, [args.script, args.alternatives, args.config, args.device])
    require_jobs(load_config(args.config, {}) if args.config else make_config({}))
    found = load_profile(args.device)
    a_host = found.ranks_per_host if args.gpus_a_host is None else args.gpus_a_host
    cluster = Cluster(args.gpus, a_host, args.layers, args.heads, args.batch_size)
    memory = _memory(args.memory, found)
    given = read_alternatives(args.alternatives) if args.alternatives else None
    tries = {**(given.values if given else {}), **parse_tries(args.tries)}
    template = Template(args.script, tuple(args.script_args), given.environment if given else {})
    layouts = layouts_of(template, cluster, tries, given.layouts if given else ())
    with claimed(args.output.absolute()), Alive("choose", f"looking at {len(layouts)} layouts") as alive:
        profile, network = _profile(args, found, cluster)

        def say(text: str) -> None:
            print(f"interlace choose: {text}", file=sys.stderr, flush=True)
            alive.now(f"last {text}")

        store = Store(args.output, args.jobs, say)
        most = len(layouts) if args.all else args.layouts
        limits = Limits(memory, most, args.finalists, args.jobs)
        search = Search(template, cluster.gpus, building_options(args), profile, args.config, limits, store, say, has_bounds=not args.all)
        candidates = search.run(layouts)
        answer = answer_of(candidates, template, cluster, limits, Path(args.device).stem, network, args.tokens_a_step, store.built)
        write_whole(Path(page), page_html(answer).encode())
        write_json(args.json, answer)
    print(f"{screen_text(answer)}\nas a page: {page}")
    return 0 if answer.rows and answer.rows[0].best() else 1


def _memory(text: str | None, profile: DeviceProfile) -> int:
    from interlace.config import parse_budget
    from interlace.errors import ConfigError
    from interlace.planning.limits import room_of

    if text is None:
        if not profile.memory_bytes:
            raise ConfigError("--memory: the profile does not give the memory of the device; expected bytes, such as 70GB")
        return room_of(profile.memory_bytes)
    try:
        found = parse_budget(text)
    except ConfigError as error:
        raise ConfigError(f"--memory: {error}") from error
    if not isinstance(found, int):
        raise ConfigError(
            f"--memory {text}: expected bytes with their unit, such as 70GB; a share needs a baseline, and layouts have none in common"
        )
    return found


def _profile(args: argparse.Namespace, profile: DeviceProfile, cluster: Cluster) -> tuple[str, str]:
    """The profile for this cluster, and a description of the network between its hosts. The profile is the user's, or a file in the output
    folder that has the network and the number of GPUs per host."""
    import msgspec

    from interlace.cost_model.profile import save_profile
    from interlace.errors import ConfigError

    if cluster.gpus <= cluster.gpus_a_host:
        for option, value in (("--network", args.network), ("--latency-us", args.latency_us)):
            if value is not None:
                raise ConfigError(f"{option}: all {cluster.gpus} GPUs are on one host (--gpus-a-host {cluster.gpus_a_host})")
        if cluster.gpus <= profile.ranks_per_host:
            return args.device, ""
    network = _network(args, profile) if cluster.gpus > cluster.gpus_a_host else None
    made = msgspec.structs.replace(profile, ranks_per_host=cluster.gpus_a_host, network=network)
    path = save_profile(made, args.output / f"{Path(args.device).stem}.json")
    if network is None:
        return str(path), ""
    rate = f"{network.bytes_per_s / 1e9:g} GB/s and {network.latency_ns / 1e3:g} us per GPU between hosts"
    return str(path), f"{rate} ({network.note or network.source}); times across hosts are estimated"


def _network(args: argparse.Namespace, profile: DeviceProfile) -> Network:
    import msgspec

    from interlace.config import parse_bytes
    from interlace.cost_model.profile import Network
    from interlace.errors import ConfigError

    known = profile.network or Network(float(parse_bytes(NETWORK)), int(LATENCY_US * 1000), "derived", "assumed; --network")
    changed: dict[str, object] = {}
    if args.network is not None:
        try:
            changed["bytes_per_s"] = float(parse_bytes(args.network.removesuffix("/s")))
        except ConfigError as error:
            raise ConfigError(f"--network: {error}, per second, such as 50GB") from error
    if args.latency_us is not None:
        changed["latency_ns"] = round(args.latency_us * 1000)
    if changed:
        known = msgspec.structs.replace(known, **changed, note="as given")
    if known.bytes_per_s <= 0 or known.latency_ns < 0:
        raise ConfigError(f"--network {args.network} --latency-us {args.latency_us}: expected a rate above 0 and a latency of 0 or more")
    return known
