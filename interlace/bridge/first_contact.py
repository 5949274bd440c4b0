"""Checks what plans assume about a machine before a run's first plan, and turns off features that depend on assumptions that do not hold.

Paddle's internals and flags are checked in the run itself. The behaviour of streams, events, memory and copies is examined by `interlace
doctor` in a separate process, once for each combination of device, versions and flags: it leaves no streams or memory behind, and may
crash without harm.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import paddle

from interlace.bridge.doctor.internals import check_internals
from interlace.bridge.doctor.versions import CHECKED, check_flags, installed_versions
from interlace.bridge.profiles import known_name
from interlace.bridge.targets import Device
from interlace.config import Config
from interlace.errors import OutputError
from interlace.files import cache_folder
from interlace.installed import other_paddle
from interlace.ir.dump import write_whole
from interlace.ir.target import CPU, GPU
from interlace.notice import say
from interlace.outside import TARGET_VARIABLE
from interlace.planning.choice import key_of
from interlace.planning.peers import Peers, gather
from interlace.report.checks import DEVICE, EVERYTHING, MEMORY, OFFLOAD, OVERLAP, TIMES, Check, Examination, Feature
from interlace.temporary import temporary_folder

TIMEOUT_S = 180.0
NOT_INHERITED = ("PADDLE_", "INTERLACE_")
"""Prefixes of environment variables that make a process a rank of the run. The others, which describe the device and Paddle's use of it,
are inherited."""
INHERITED = ("INTERLACE_CACHE",)
NEEDED_BY_PLANS = (EVERYTHING, OVERLAP, OFFLOAD)
"""Features without which a loaded plan may be wrong, not only slow."""
_known: dict[Device, tuple[Feature, ...]] = {}
"""Cache of `features_off` in this process."""


class Contact(msgspec.Struct, frozen=True):
    """What one rank found; `unknown` says why the device could not be examined, and is empty if it was."""

    host: str
    failed: tuple[Check, ...] = ()
    unknown: str = ""


def is_examined(config: Config, device: Device) -> bool:
    """Whether the machine is examined before the first plan: by default on kinds of devices, or with versions of Paddle, that are
    untested."""
    return config.examine == "on" or (config.examine == "auto" and (device.examines or bool(other_paddle())))


def features_off(device: Device, peers: Peers | None) -> tuple[Feature, ...]:
    """Features that depend on rules that do not hold on some rank's machine, in the same order on all ranks; rank 0 logs the rules.

    Ranks of one host are assumed to have the same kind of device, so only the first rank of each host examines its own.
    """
    if device not in _known:
        _known[device] = _features_off(device, peers)
    return _known[device]


def _features_off(device: Device, peers: Peers | None) -> tuple[Feature, ...]:
    host, rank = socket.gethostname(), paddle.distributed.ParallelEnv().rank
    is_first = gather(peers, "hosts", host).index(host) == rank
    failed = [each for each in (*check_internals(), *check_flags(device)) if each.verdict == "fails"]
    mine = _examined(device, host, failed) if is_first else Contact(host, tuple(failed))
    contacts = gather(peers, "rules of the machine", mine)
    found = {feature: None for each in contacts for check in each.failed for feature in check.rests}
    if rank == 0:
        _tell(contacts)
    return tuple(found)


def _tell(contacts: Iterable[Contact]) -> None:
    rows = dict.fromkeys(
        f"on {each.host} {check.rule!r} does not hold: expected {check.expected}, found {check.found}"
        for each in contacts
        for check in each.failed
    )
    for row in rows:
        say(row)
    for unknown in dict.fromkeys(f"{each.host}: {each.unknown}" for each in contacts if each.unknown):
        say(f"the device could not be examined, so nothing is known of it; {unknown}")


def _examined(device: Device, host: str, failed: list[Check]) -> Contact:
    """The contact of a rank that also examines its device's behaviour, or takes the stored result of an earlier run."""
    path = cache_folder() / f"examined-{_key(device, host)}.json"
    with suppress(OSError, msgspec.DecodeError):
        kept = msgspec.json.decode(path.read_bytes(), type=tuple[Check, ...])
        return Contact(host, (*failed, *kept))
    found, unknown = _behaviour(device)
    if not unknown:
        with suppress(OutputError):
            write_whole(path, msgspec.json.encode(found))
    return Contact(host, (*failed, *found), unknown)


def _key(device: Device, host: str) -> str:
    flags = [f"{each.name}={each.found(os.environ)}" for each in CHECKED]
    own = [f"{name}={value}" for name, value in sorted(os.environ.items()) if name.startswith("CUDA_")]
    versions = [f"{name} {version}" for name, version in installed_versions().items()]
    return key_of([host, known_name(device) or str(device.place), device.target.name, *versions, *flags, *own])


def _behaviour(device: Device) -> tuple[tuple[Check, ...], str]:
    """Rules that do not hold on the device, according to `interlace doctor`; and why it gave no result, empty if it did."""
    target = {GPU.name: "gpu", CPU.name: "cpu"}.get(device.target.name) or os.environ.get(TARGET_VARIABLE) or "custom"
    env = {name: value for name, value in os.environ.items() if name in INHERITED or not name.startswith(NOT_INHERITED)}
    with temporary_folder() as folder:
        path = Path(folder) / "doctor.json"
        command = [sys.executable, "-m", "interlace", "doctor", "--no-times", "--target", target, "--json", os.fspath(path)]
        try:
            done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            found = msgspec.json.decode(path.read_bytes(), type=Examination)
        except subprocess.TimeoutExpired:
            return (), f"`{' '.join(command[1:4])}` took more than {TIMEOUT_S:.0f} s"
        except (OSError, msgspec.DecodeError):
            last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
            return (), f"`{' '.join(command[1:4])}` ended with {done.returncode} and said: {last[:300]}"
    return tuple(each for each in found.failed if each.group == DEVICE), ""


def without(options: Mapping[str, Any], features: Iterable[Feature]) -> dict[str, Any]:
    """The options, changed so that they do not need these features.

    No option can be dropped because memory is predicted wrongly; a budget stays as the user set it. Loaded plans cannot do without a
    feature, so the run keeps Paddle's baseline if they may depend on one.
    """
    features = tuple(features)
    if options.get("plan"):
        return {"enable": False} if any(each in NEEDED_BY_PLANS for each in features) else dict(options)
    found = dict(options)
    for feature, option in ((each, option) for each in features for option in each.option.split()):
        key, _, inner = option.partition(".")
        given = msgspec.to_builtins(found.get(key))
        if feature == TIMES:
            found.setdefault(key, feature.value)
        elif not inner and feature != MEMORY:
            found[key] = feature.value
        elif inner and given not in ("off", False):
            found[key] = {**(given if isinstance(given, Mapping) else {}), inner: feature.value}
    return found


def changes_text(before: Mapping[str, Any], after: Mapping[str, Any]) -> str:
    """The options that changed, as text in the form of a configuration file."""
    changed = [f"{key}: {'off' if value is False else value}" for key, value in after.items() if before.get(key) != value]
    return ", ".join(changed).replace("'", "") or "nothing"
