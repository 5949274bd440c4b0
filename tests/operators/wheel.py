"""Paddle's own definitions of its operators, and its kernels' machine code, read from the installed wheel.

What a kernel calls is read off its code: a kernel draws if a path of calls leads from it to the generator.
"""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

SOURCE = Path(__file__).with_name("wheel.cc")
FLAGS = ("-std=c++17", "-O0", "-fPIC", "-shared", "-w")
DRAWS = re.compile(
    r"_ZN3phi9Generator(12GetCPUEngine|8Random64|15IncrementOffset)|_ZN3phi18GetCPURandomEngine"
    r"|_ZN3phi22GetRandomSeedGenerator|_ZNK3phi13DeviceContext(12GetGenerator|16GetHostGenerator)Ev|_ZNSt13random_device9_M_getval"
    r"|(rand|rand_r|random|drand48|time|gettimeofday|clock)$|_ZNSt6chrono\w+3nowEv"
)
"""Where random numbers come from: Paddle's generators, those of the C and C++ libraries, and clocks, which seed some kernels."""
ACTS = re.compile(
    r"(printf|puts|putchar|fputs|fopen|fopen64|open|open64|system|popen|socket|connect|usleep|nanosleep)$|_ZSt4cout$"
    r"|_ZNSt13basic_filebufIcSt11char_traitsIcEE(4open|5close)|_ZNSt14basic_[io]fstream|_ZNSt13basic_fstream"
)
"""Output, files and connections."""
SHARES = re.compile(
    r"_ZNK?3phi11DenseTensor(13ShareDataWith|15ShareBufferWith|20ShareDataNoCheckWith|11ResetHolder|5Slice|aSERKS0_|aSEOS0_)"
    r"|_ZN3phi11DenseTensorC[12]ERKSt10shared_ptr"
)
"""How a tensor gets the memory of another one: by name, by assignment, or made over it."""
NOT_THROUGH = re.compile(
    r"enforce|Enforce|ErrorSummary|LogMessage|phi3jit7GenBase8dumpCode|_ZN6paddle12experimental|_ZN3phi9Generator|^PD_"
    r"|_ZN3phi7dynload|CurGlobalRank|_ZN3phi10CastKernel"
)
"""Functions on the way that are about errors, logs and settings: through them everything leads everywhere. A cast shares memory only where
its operand has no shape yet."""
NAMES = ("interlace_definitions", "interlace_kernels")
"""Functions of `wheel.cc`."""
Ints = NDArray[np.int64]


class Definition(msgspec.Struct, frozen=True):
    """One operator, as Paddle defines it; control flow and what Paddle's own passes insert has a name alone.

    Attributes:
        name: With its dialect.
        operands, attributes, results: Their names.
        kernel: Name of its kernel; empty where it has none.
        inplace, views: Results and the operands whose memory they take.
        operand_types, attribute_types: Names of Paddle's types; an operand may have one of an attribute's, and be given as one.
        optional: Operands that may be left out.
    """

    name: str
    operands: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    kernel: str = ""
    inplace: tuple[tuple[str, str], ...] = ()
    views: tuple[tuple[str, str], ...] = ()
    operand_types: tuple[str, ...] = ()
    attribute_types: tuple[str, ...] = ()
    optional: tuple[bool, ...] = ()


class Kernel(msgspec.Struct, frozen=True, array_like=True):
    """One kernel of the wheel: its code's file and address there, and whether it only makes a view."""

    name: str
    file: str
    address: int
    strided: bool


def _library() -> ctypes.CDLL:
    import paddle

    libraries = [f"-l:lib{name}.so" for name in ("phi", "phi_core", "common")]
    ctypes.CDLL(paddle.base.libpaddle.__file__, mode=ctypes.RTLD_GLOBAL | os.RTLD_NOLOAD)
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "wheel.so"
        subprocess.run(
            [
                os.environ.get("CXX", "g++"),
                *FLAGS,
                f"-I{paddle.sysconfig.get_include()}",
                SOURCE,
                "-o",
                made,
                f"-L{paddle.sysconfig.get_lib()}",
                *libraries,
                "-ldl",
            ],
            check=True,
        )
        return ctypes.CDLL(os.fspath(made))


@cache
def _answers() -> dict[str, bytes]:
    """What a process says that has done nothing else with Paddle: what is used later registers more."""
    asked = "from tests.operators.wheel import say; say()"
    said = subprocess.run([sys.executable, "-c", asked], check=True, capture_output=True, cwd=SOURCE.parents[2]).stdout
    return dict(zip(NAMES, said.splitlines()[-len(NAMES) :], strict=True))


def say() -> None:
    """Print the answers of this process, a line each."""
    library = _library()
    for name in NAMES:
        function = getattr(library, name)
        function.restype = ctypes.c_char_p
        sys.stdout.buffer.write(function().replace(b"\n", b" ") + b"\n")


def _ask(name: str) -> bytes:
    return _answers()[name]


@cache
def definitions() -> dict[str, Definition]:
    """All operators that the wheel registers, by name."""
    return {each.name: each for each in msgspec.json.decode(_ask("interlace_definitions"), type=list[Definition])}


@cache
def kernels() -> dict[str, list[Kernel]]:
    """All kernels of the wheel, by name."""
    found: dict[str, list[Kernel]] = defaultdict(list)
    for each in msgspec.json.decode(_ask("interlace_kernels"), type=list[Kernel]):
        found[each.name].append(each)
    return found


@cache
def _code(file: str) -> Code:
    return Code(file)


@cache
def reaching(what: re.Pattern[str], strided: bool = True) -> dict[str, list[str]]:
    """Kernels that call what is asked for, with the functions on the way; without those that make views where there are others, which the
    static executor takes.
    """
    files = {each.file for group in kernels().values() for each in group}
    codes = {file: _code(file) for file in files}
    callers = {file: code.callers(what) for file, code in codes.items()}
    found: dict[str, list[str]] = {}
    for name, group in kernels().items():
        plain = [kernel for kernel in group if not kernel.strided]
        for kernel in group if strided or not plain else plain:
            code, known = codes[kernel.file], callers[kernel.file]
            function = code.function_at(kernel.address)
            if function in known:
                found.setdefault(name, code.way(function, known))
    return found


class Code:
    """The call graph of a library: direct calls and jumps, through the procedure linkage table too, and addresses taken.

    Functions come from the table of unwind information, which has those without a symbol. Calls through pointers are not seen, but
    whoever takes a function's address counts as its caller.

    Attributes:
        starts: Addresses of functions, ascending.
        symbol: Address -> a name.
    """

    def __init__(self, file: str) -> None:
        self.sections = _sections(file)
        self.bytes = np.fromfile(file, np.uint8)
        self.symbols = _symbols(file)
        self.symbol = {address: name for name, address in self.symbols.items()}
        address, _, size = self.sections[".text"]
        exported = [at for at in self.symbols.values() if address <= at < address + size]
        self.starts = np.unique(np.concatenate([self._unwound(), np.array(exported, np.int64)]))
        self._callers = self._call_graph(_imports(file))

    def function_at(self, address: int) -> int:
        """Number of the function that an address lies in."""
        return int(np.searchsorted(self.starts, address, "right")) - 1

    def callers(self, what: re.Pattern[str]) -> dict[int, int | str]:
        """Functions from which calls lead to those of these names, with the next one on the way."""
        rest: list[int | str] = [name for name in self._callers if isinstance(name, str) and what.match(name)]
        rest += [self.function_at(at) for name, at in self.symbols.items() if what.match(name) and at in self.symbol]
        found: dict[int, int | str] = {}
        while rest:
            called = rest.pop()
            for caller in self._callers.get(called, ()):
                if caller not in found and not NOT_THROUGH.search(self._name(caller)):
                    found[caller] = called
                    rest.append(caller)
        return found

    def way(self, function: int, known: Mapping[int, int | str]) -> list[str]:
        """Names on the way from a function to what it reaches."""
        names, at = list[str](), known.get(function)
        while at is not None:
            names.append(at if isinstance(at, str) else self._name(at))
            at = known.get(at) if isinstance(at, int) else None
        return names

    def _name(self, function: int) -> str:
        return self.symbol.get(int(self.starts[function]), "")

    def _unwound(self) -> Ints:
        """Starts of functions from `.eh_frame_hdr`: a table of 4-byte offsets, to the header's own address, behind 12 bytes."""
        address, at, size = self.sections[".eh_frame_hdr"]
        header = self.bytes[at : at + size].tobytes()
        count = int.from_bytes(header[8:12], "little")
        assert header[:4] == bytes([1, 0x1B, 0x03, 0x3B]), f"unwind table in another form: {header[:4].hex()}"
        return np.frombuffer(header[12 : 12 + 8 * count], np.int32).reshape(-1, 2)[:, 0].astype(np.int64) + address

    def _call_graph(self, imports: Mapping[int, str]) -> dict[int | str, set[int]]:
        address, at, size = self.sections[".text"]
        text = self.bytes[at : at + size]
        first, second, third = text[:-7], text[1:-6], text[2:-5]
        relative = ((first & 0xFB) == 0x48) & ((second == 0x8D) | (second == 0x8B)) & ((third & 0xC7) == 5)
        found: dict[int | str, set[int]] = defaultdict(set)
        stubs = np.array(sorted(imports), np.int64)
        names = [imports[stub] for stub in stubs.tolist()]
        exported = [self.function_at(self.symbols[name]) if name in self.symbols else None for name in names]
        for opcode, length in ((first == 0xE8) | (first == 0xE9), 5), (relative, 7):  # call and jump; lea and mov relative to rip
            where = np.flatnonzero(opcode)
            field = sum(text[where + length - 4 + k].astype(np.int64) << (8 * k) for k in range(4))
            target = address + where + length + np.where(field >= 1 << 31, field - (1 << 32), field)
            for function, to in self._callers_of(stubs, target, address + where):
                found[names[to]].add(function)
                if (own := exported[to]) is not None:
                    found[own].add(function)
            for function, to in self._callers_of(self.starts, target, address + where):
                found[to].add(function)
        return found

    def _callers_of(self, ascending: Ints, target: Ints, where: Ints) -> Iterator[tuple[int, int]]:
        """Functions that calls, of these targets at these addresses, lead from, and places of the targets among some addresses."""
        at = np.minimum(np.searchsorted(ascending, target), len(ascending) - 1)
        known = ascending[at] == target
        caller = np.searchsorted(self.starts, where[known], "right") - 1
        return zip(caller.tolist(), at[known].tolist(), strict=True)


def _tool(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def _sections(file: str) -> dict[str, tuple[int, int, int]]:
    """Name -> address, offset in the file and size."""
    rows = re.finditer(r"\]\s+(\.\S+)\s+\S+\s+([0-9a-f]+) ([0-9a-f]+) ([0-9a-f]+)", _tool("readelf", "-SW", file))
    return {row[1]: (int(row[2], 16), int(row[3], 16), int(row[4], 16)) for row in rows}


def _symbols(file: str) -> dict[str, int]:
    """Functions that it exports, with their addresses."""
    rows = (line.split() for line in _tool("nm", "-D", "--defined-only", file).splitlines())
    return {name: int(address, 16) for address, kind, name in rows if kind in "TtWwVi"}


def _imports(file: str) -> dict[int, str]:
    """Address of what stands for something of another library, or for an exported function -> its name."""
    stubs = re.finditer(r"^([0-9a-f]+) <(.+)@plt>:", _tool("objdump", "-d", "-j", ".plt", file), re.M)
    data = re.finditer(r"^([0-9a-f]+)\s+\S+ R_X86_64_GLOB_DAT\s+\S+ ([^@\s]+)", _tool("readelf", "-rW", file), re.M)
    return {int(each[1], 16): each[2].partition("@")[0] for each in (*stubs, *data)}


def words_of(definition: Definition) -> Iterable[str]:
    """Names of an operator, its attributes and results: what it is given to draw with, and what it gives of it."""
    return (definition.name, *definition.attributes, *definition.results)
