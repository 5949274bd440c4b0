"""Collective and point-to-point communication of arrays between the ranks of one world on one machine. No Paddle here.

Every pair of ranks shares one Unix socket in the run directory. Payloads above a threshold are sent as an anonymous
memory file (`memfd`), whose descriptor is passed over the socket: it has no name, so nothing remains after a crash.
One reader thread per peer drains its socket at all times, so a send never waits for its receiver.

A call is *started* (its data leaves at once) and *finished* later (it waits for the answer). The calls of a group are
numbered; if the calls of two ranks with the same number differ in operation, shape or dtype, both ranks raise an error.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from interlace.cpu.reduction import REDUCE_OPS, Array, reduce_arrays
from interlace.errors import TransportError

DEFAULT_TIMEOUT_S = 300.0
SHARED_MEMORY_THRESHOLD_BYTES = 1 << 16  # below it, a socket write is cheaper than creating and mapping a file
_PREFIX = struct.Struct("!IQ")
_CONNECT_RETRY_S = 0.01
_CLOSE_GRACE_S = 2.0


class PeerLostError(TransportError):
    """A rank that this one waits for has ended. This follows from that rank's own failure; it is not why the run failed."""


class Call(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True, array_like=True):
    """A rank's description of one communication; the ranks of a collective must agree on all fields except `where`.

    `kind` is "collective", "p2p" or "bye"; `number` counts the calls of its channel from 0; `detail` is the reduction,
    the root or the peer. In a receive, `shape` may contain -1 (unknown, matches any size). `where` names the call in errors.
    """

    kind: str
    group: int
    ranks: tuple[int, ...]
    number: int
    op: str
    detail: str
    dtype: str
    shape: tuple[int, ...]
    where: str

    def __str__(self) -> str:
        detail = f" ({self.detail})" if self.detail else ""
        what = f"{self.op}{detail} #{self.number} of {self.dtype}{list(self.shape)}"
        place = f" at {self.where}" if self.where else ""
        return f"{what} on group {self.group} (ranks {_listed(self.ranks)}){place}"


@dataclass(slots=True)
class _Message:
    call: Call
    payload: memoryview | mmap.mmap | bytes


@dataclass(slots=True)
class _Peer:
    rank: int
    sock: socket.socket
    lock: threading.Lock = field(default_factory=threading.Lock)
    last_call: Call | None = None
    lost: str = ""


class Pending:
    """A communication that has started; `wait` returns its result and may be called once."""

    __slots__ = ("_finish",)

    def __init__(self, finish: Callable[[], Any]) -> None:
        self._finish = finish

    def wait(self) -> Any:
        """Block until every peer's part has arrived. Raises TransportError on a mismatch, a time-out or a lost peer."""
        return self._finish()

    def then(self, change: Callable[[Any], Any]) -> Pending:
        """The same communication with `change` applied to its result."""
        return Pending(lambda: change(self.wait()))


def carrier_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype for Paddle's element type `name`; for types that numpy lacks (bfloat16, float8), an integer type with their bits."""
    return np.dtype(np.uint16 if name == "bfloat16" else np.int8 if name.startswith("float8") else name)


def _waited(start: str) -> Callable[..., Any]:
    """A method that calls the method `start`, which starts a communication, and waits for its result."""

    def call(self: Transport, *args: Any, **kwargs: Any) -> Any:
        return getattr(self, start)(*args, **kwargs).wait()

    return call


class Transport:
    """One rank's end of the world's connections. Thread-safe; all ranks must start the calls of a group in the same order.

    `run_dir` is a directory that all ranks share and nothing else uses. The constructor raises TransportError if
    not all ranks connect within `timeout_s` seconds.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        run_dir: str | os.PathLike[str],
        timeout_s: float = DEFAULT_TIMEOUT_S,
        shared_memory_threshold_bytes: int = SHARED_MEMORY_THRESHOLD_BYTES,
    ) -> None:
        if not 0 <= rank < world:
            raise TransportError(f"rank {rank} is outside the world of {world}: expected 0 <= rank < world")
        self.rank = rank
        self.world = world
        self._dir = Path(run_dir)
        self._timeout_s = timeout_s
        self._threshold_bytes = shared_memory_threshold_bytes
        self._arrived = threading.Condition()
        self._boxes: dict[tuple[Any, ...], deque[_Message]] = defaultdict(deque)
        self._numbers: dict[tuple[Any, ...], int] = defaultdict(int)
        self._numbers_lock = threading.Lock()
        self._closing = False
        self._peers = self._connect()
        self._readers = [self._start_reader(peer) for peer in self._peers.values()]

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    all_reduce, all_gather, reduce_scatter = map(_waited, ("start_all_reduce", "start_all_gather", "start_reduce_scatter"))
    all_to_all, broadcast, reduce, recv = map(_waited, ("start_all_to_all", "start_broadcast", "start_reduce", "start_recv"))

    # -- collectives: every rank of the group calls, in the same order -----------------------------------------------

    def start_all_reduce(self, array: Array, op: str, group: int, ranks: Sequence[int], where: str = "", dtype: str = "") -> Pending:
        """Reduce equal-shaped arrays over the group, in rank order of `ranks`; every rank gets the same bits.

        `dtype` is Paddle's element type, needed only if it is not that of the array ("bfloat16" as uint16 bits).
        """
        _check_reduce_op(op)
        call = self._collective("all_reduce", group, ranks, array, op, where, dtype)
        return self._gather(call, dict.fromkeys(ranks, array), lambda parts: reduce_arrays(parts, op, call.dtype))

    def start_all_gather(self, array: Array, group: int, ranks: Sequence[int], where: str = "", dtype: str = "") -> Pending:
        """Give every rank the arrays of all, as a list in order of `ranks`."""
        call = self._collective("all_gather", group, ranks, array, "", where, dtype)
        return self._gather(call, dict.fromkeys(ranks, array), list)

    def start_reduce_scatter(self, array: Array, op: str, group: int, ranks: Sequence[int], where: str = "", dtype: str = "") -> Pending:
        """Reduce over the group; rank i of n gets rows [i * d / n, (i + 1) * d / n) of `[d, ...]`."""
        _check_reduce_op(op)
        call = self._collective("reduce_scatter", group, ranks, array, op, where, dtype)
        parts = dict(zip(ranks, _rows(array, call), strict=True))
        return self._gather(call, parts, lambda got: reduce_arrays(got, op, call.dtype))

    def start_all_to_all(self, array: Array, group: int, ranks: Sequence[int], where: str = "", dtype: str = "") -> Pending:
        """Send row block j of `[d, ...]` to rank j of the group, and receive this rank's block from every rank, joined in rank order."""
        call = self._collective("all_to_all", group, ranks, array, "", where, dtype)
        parts = dict(zip(ranks, _rows(array, call), strict=True))
        return self._gather(call, parts, lambda got: np.concatenate(got, axis=0))

    def start_broadcast(self, array: Array, root: int, group: int, ranks: Sequence[int], where: str = "", dtype: str = "") -> Pending:
        """Give every rank the array of `root` (a rank of the world); on other ranks `array` only gives shape and dtype."""
        call = self._collective("broadcast", group, ranks, array, f"root {root}", where, dtype)
        self._check_member(root, call)
        mine = dict.fromkeys(ranks, array) if self.rank == root else {}
        return self._gather(call, mine, lambda parts: np.array(parts[list(ranks).index(root)]), sources=(root,))

    def start_reduce(self, array: Array, op: str, root: int, group: int, ranks: Sequence[int], where: str = "", dtype: str = "") -> Pending:
        """Reduce over the group; `root` (a rank of the world) gets the result, the others a copy of their own array."""
        _check_reduce_op(op)
        call = self._collective("reduce", group, ranks, array, f"{op} to root {root}", where, dtype)
        self._check_member(root, call)
        if self.rank != root:
            return self._gather(call, {root: array}, lambda _: np.array(array), sources=())
        return self._gather(call, {root: array}, lambda parts: reduce_arrays(parts, op, call.dtype))

    def barrier(self, group: int, ranks: Sequence[int], where: str = "") -> None:
        """Wait until every rank of the group has called this."""
        call = self._collective("barrier", group, ranks, np.zeros(0, np.uint8), "", where, "")
        self._gather(call, {}, lambda _: None, sources=()).wait()

    # -- point to point --------------------------------------------------------------------------------------------

    def send(self, array: Array, peer: int, group: int, ranks: Sequence[int], where: str = "", dtype: str = "") -> None:
        """Send to `peer` (a rank of the world); never waits for it. Sends of a group to one peer arrive in order."""
        number = self._next_number(("out", group, peer))
        call = Call("p2p", group, tuple(ranks), number, "send", f"to rank {peer}", dtype or str(array.dtype), array.shape, where)
        self._check_member(peer, call)
        self._post(call, {peer: array})

    def start_recv(self, shape: Sequence[int], dtype: str, peer: int, group: int, ranks: Sequence[int], where: str = "") -> Pending:
        """Receive the next array that `peer` sends on this group; `shape` may contain -1. `wait` raises TransportError if shape or dtype
        differ."""
        number = self._next_number(("in", group, peer))
        call = Call("p2p", group, tuple(ranks), number, "recv", f"from rank {peer}", dtype, tuple(shape), where)
        self._check_member(peer, call)

        def finish() -> Array:
            sent = self._take(call, peer)
            if not _shapes_match(call.shape, sent.call.shape) or call.dtype != sent.call.dtype:
                raise TransportError(_mismatch(self.rank, call, peer, sent.call))
            return _array_of(sent)

        return Pending(finish)

    # -- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Tell all peers that this rank has finished, and end the reader threads; what was sent before still arrives."""
        if self._closing:
            return
        self._closing = True
        bye = Call("bye", 0, (), 0, "", "", "", (), "")
        for peer in self._peers.values():
            if not peer.lost:
                self._write(peer, bye, None)
            with suppress(OSError):  # the peer may have closed first
                peer.sock.shutdown(socket.SHUT_RDWR)
        for reader in self._readers:
            reader.join(_CLOSE_GRACE_S)
        for peer in self._peers.values():
            peer.sock.close()

    # -- inside: connecting ----------------------------------------------------------------------------------------

    def _connect(self) -> dict[int, _Peer]:
        """Connect every pair of ranks: the higher rank connects, the lower one listens."""
        deadline_s = time.monotonic() + self._timeout_s
        path = self._dir / f"rank{self.rank}.sock"
        peers: dict[int, _Peer] = {}
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            _bind(listener, path)
            try:
                for rank in range(self.rank):
                    peers[rank] = _Peer(rank, self._call_up(rank, deadline_s))
                while len(peers) < self.world - 1:
                    peer = self._accept(listener, deadline_s, peers)
                    peers[peer.rank] = peer
            except BaseException:
                for peer in peers.values():
                    peer.sock.close()
                raise
            finally:
                path.unlink()
        return dict(sorted(peers.items()))

    def _call_up(self, rank: int, deadline_s: float) -> socket.socket:
        path = os.fspath(self._dir / f"rank{rank}.sock")
        while True:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                sock.connect(path)
                sock.sendall(struct.pack("!I", self.rank))
                return sock
            except (FileNotFoundError, ConnectionRefusedError) as error:
                sock.close()
                if time.monotonic() > deadline_s:
                    raise TransportError(self._nobody([rank])) from error
                time.sleep(_CONNECT_RETRY_S)

    def _accept(self, listener: socket.socket, deadline_s: float, peers: Mapping[int, _Peer]) -> _Peer:
        listener.settimeout(max(0.001, deadline_s - time.monotonic()))
        try:
            sock, _ = listener.accept()
        except TimeoutError as error:
            missing = [rank for rank in range(self.world) if rank != self.rank and rank not in peers]
            raise TransportError(self._nobody(missing)) from error
        sock.settimeout(None)
        (rank,) = struct.unpack("!I", _read_exactly(sock, 4))
        return _Peer(rank, sock)

    def _nobody(self, missing: Sequence[int]) -> str:
        return (
            f"rank {self.rank} of {self.world}: rank(s) {_listed(missing)} did not connect within {self._timeout_s:g} s; "
            "look at their logs, or give a longer time-out if they are only slow to start"
        )

    # -- inside: sending -------------------------------------------------------------------------------------------

    def _next_number(self, channel: tuple[Any, ...]) -> int:
        with self._numbers_lock:
            number = self._numbers[channel]
            self._numbers[channel] = number + 1
        return number

    def _collective(self, op: str, group: int, ranks: Sequence[int], array: Array, detail: str, where: str, dtype: str) -> Call:
        number = self._next_number(("collective", group))
        call = Call("collective", group, tuple(ranks), number, op, detail, dtype or str(array.dtype), array.shape, where)
        self._check_member(self.rank, call)
        return call

    def _check_member(self, rank: int, call: Call) -> None:
        if rank not in call.ranks or rank >= self.world:
            raise TransportError(f"rank {self.rank}: {call}: rank {rank} is not in this group of a world of {self.world} ranks")

    def _post(self, call: Call, payloads: Mapping[int, Array | None]) -> None:
        """Send `call` to every rank of `payloads`; equal arrays share one memory file."""
        files: dict[int, int] = {}
        try:
            for rank, array in payloads.items():
                self._deliver(rank, call, array, files)
        finally:
            for descriptor in files.values():
                os.close(descriptor)

    def _deliver(self, rank: int, call: Call, array: Array | None, files: dict[int, int]) -> None:
        if rank == self.rank:
            copy = b"" if array is None else array.tobytes()
            self._put(self.rank, _Message(call, copy))
            return
        if array is not None and array.nbytes >= self._threshold_bytes:
            if id(array) not in files:
                files[id(array)] = _memory_file(array)
            self._write(self._peers[rank], call, None, files[id(array)])
        else:
            self._write(self._peers[rank], call, array)

    def _write(self, peer: _Peer, call: Call, array: Array | None, descriptor: int | None = None) -> None:
        header = msgspec.msgpack.encode(call)
        body = b"" if array is None else array.tobytes()
        frame = _PREFIX.pack(len(header), len(body)) + header + body
        try:
            with peer.lock:
                if descriptor is not None:
                    frame = frame[socket.send_fds(peer.sock, [frame], [descriptor]) :]
                if frame:  # a peer that has received everything may have closed, and then even an empty send fails
                    peer.sock.sendall(frame)
        except OSError as error:
            if call.kind != "bye":
                reason = self._why_lost(peer)
                raise PeerLostError(f"rank {self.rank}: {call}: rank {peer.rank} is gone: {reason}") from error

    def _why_lost(self, peer: _Peer) -> str:
        """Why sending failed; waits for the reader thread, which may still have to read that the peer has finished."""
        with self._arrived:
            self._arrived.wait_for(lambda: peer.lost, _CLOSE_GRACE_S)
        return peer.lost or "the connection broke"

    # -- inside: receiving -----------------------------------------------------------------------------------------

    def _start_reader(self, peer: _Peer) -> threading.Thread:
        thread = threading.Thread(target=self._read, args=(peer,), name=f"interlace-from-{peer.rank}", daemon=True)
        thread.start()
        return thread

    def _read(self, peer: _Peer) -> None:
        try:
            while True:
                message = _read_message(peer.sock)
                if message.call.kind == "bye":
                    self._lose(peer, "it has finished its script")
                    return
                peer.last_call = message.call
                self._put(peer.rank, message)
        except (EOFError, OSError):
            self._lose(peer, "its process has ended (look at its log for the cause)")

    def _put(self, source: int, message: _Message) -> None:
        with self._arrived:
            self._boxes[source, message.call.kind, message.call.group].append(message)
            self._arrived.notify_all()

    def _lose(self, peer: _Peer, reason: str) -> None:
        with self._arrived:
            peer.lost = peer.lost or reason
            self._arrived.notify_all()

    def _gather(
        self,
        call: Call,
        payloads: Mapping[int, Array],
        combine: Callable[[list[Array]], Any],
        sources: Sequence[int] | None = None,
    ) -> Pending:
        """Start a collective: send `call` to all ranks of the group, with an array to those in `payloads`.

        Waiting for the result waits for all ranks, checks that their calls agree, and combines the arrays in group order;
        the arrays of ranks that are not in `sources` (default: the whole group) are empty.
        """
        self._post(call, {rank: payloads.get(rank) for rank in call.ranks})
        wanted = set(call.ranks if sources is None else sources)

        def finish() -> Any:
            messages = [self._take(call, rank, call.ranks[:taken]) for taken, rank in enumerate(call.ranks)]
            for rank, message in zip(call.ranks, messages, strict=True):
                if call != msgspec.structs.replace(message.call, where=call.where):
                    raise TransportError(_mismatch(self.rank, call, rank, message.call))
            shape = _part_shape(call)
            return combine(
                [_array_of(message, shape) if rank in wanted else np.zeros(0) for rank, message in zip(call.ranks, messages, strict=True)]
            )

        return Pending(finish)

    def _take(self, call: Call, source: int, taken: Sequence[int] = ()) -> _Message:
        """Wait for the message with `call`'s number from `source`, and take it. Messages of the ranks in `taken` have been taken already.
        Raises PeerLostError if the peer has ended, and TransportError after the time-out."""
        box = self._boxes[source, call.kind, call.group]
        deadline_s = time.monotonic() + self._timeout_s
        with self._arrived:
            while (message := _pick(box, call.number)) is None:
                if source != self.rank and self._peers[source].lost:
                    raise PeerLostError(f"rank {self.rank}: {call}: rank {source} will not come: {self._peers[source].lost}")
                if not self._arrived.wait(deadline_s - time.monotonic()) and time.monotonic() >= deadline_s:
                    raise TransportError(self._timed_out(call, taken))
        return message

    def _timed_out(self, call: Call, taken: Sequence[int]) -> str:
        """Describe a time-out; the caller holds `_arrived`."""
        expected = call.ranks if call.kind == "collective" else (int(call.detail.rsplit(" ", 1)[1]),)
        absent = [rank for rank in expected if rank not in taken and not self._has_arrived(call, rank)]
        heard = [f"rank {rank} said last: {self._peers[rank].last_call or 'nothing'}" for rank in absent]
        return (
            f"rank {self.rank}: {call}: waited {self._timeout_s:g} s; not arrived: rank(s) {_listed(absent)}; "
            f"{'; '.join(heard)}. Ranks that wait for each other point at an order of communication that differs "
            "between them; a slow rank needs a longer time-out"
        )

    def _has_arrived(self, call: Call, rank: int) -> bool:
        if rank == self.rank:
            return True
        return any(message.call.number == call.number for message in self._boxes[rank, call.kind, call.group])


def _check_reduce_op(op: str) -> None:
    if op not in REDUCE_OPS:
        raise TransportError(f"unknown reduction {op!r}: expected one of {', '.join(REDUCE_OPS)}")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def _rows(array: Array, call: Call) -> list[Array]:
    count = len(call.ranks)
    if array.ndim == 0 or array.shape[0] % count:
        raise TransportError(
            f"{call}: dimension 0 must be a multiple of the {count} ranks of the group; pad the value before the collective"
        )
    return np.split(array, count, axis=0)


def _part_shape(call: Call) -> tuple[int, ...]:
    """Shape of what one rank sends to another in this collective."""
    if call.op in ("reduce_scatter", "all_to_all"):
        return (call.shape[0] // len(call.ranks), *call.shape[1:])
    return call.shape


def _shapes_match(expected: Sequence[int], found: Sequence[int]) -> bool:
    if len(expected) != len(found):
        return False
    return all(size in (-1, got) for size, got in zip(expected, found, strict=True))


def _mismatch(rank: int, mine: Call, other_rank: int, other: Call) -> str:
    return (
        f"ranks disagree on communication: rank {rank} is at {mine}, but rank {other_rank} is at {other}; "
        "the programs of these ranks must issue the same calls of a group in the same order with the same shapes"
    )


def _pick(box: deque[_Message], number: int) -> _Message | None:
    """Remove and return the message with this number, None if there is none; receives may finish in another order than they started."""
    for position, message in enumerate(box):
        if message.call.number == number:
            del box[position]
            return message
    return None


def _array_of(message: _Message, shape: Sequence[int] | None = None) -> Array:
    """View a payload as a read-only array, which keeps the payload alive."""
    name = message.call.dtype
    return np.frombuffer(message.payload, dtype=carrier_dtype(name)).reshape(message.call.shape if shape is None else shape)


def _memory_file(array: Array) -> int:
    """Write an array into an anonymous memory file and return its descriptor, which the caller closes."""
    descriptor = os.memfd_create("interlace")
    os.ftruncate(descriptor, array.nbytes)
    with mmap.mmap(descriptor, array.nbytes) as memory:
        np.frombuffer(memory, dtype=array.dtype)[:] = array.reshape(-1)
    return descriptor


def _read_message(sock: socket.socket) -> _Message:
    """Read one framed message. Raises EOFError if the peer has closed."""
    prefix, descriptors, _, _ = socket.recv_fds(sock, _PREFIX.size, 1)
    try:
        if len(prefix) < _PREFIX.size:
            prefix += _read_exactly(sock, _PREFIX.size - len(prefix))
        header_bytes, body_bytes = _PREFIX.unpack(prefix)
        call = msgspec.msgpack.decode(_read_exactly(sock, header_bytes), type=Call)
        if descriptors:
            return _Message(call, mmap.mmap(descriptors[0], 0, access=mmap.ACCESS_READ))
        return _Message(call, _read_exactly(sock, body_bytes))
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _read_exactly(sock: socket.socket, size_bytes: int) -> bytes:
    """Read `size_bytes`. Raises EOFError if the stream ends before that."""
    buffer = bytearray(size_bytes)
    view = memoryview(buffer)
    while view:
        count = sock.recv_into(view)
        if count == 0:
            raise EOFError
        view = view[count:]
    return bytes(buffer)


def _bind(listener: socket.socket, path: Path) -> None:
    """Listen at `path`. Raises TransportError if that fails, as with a path that is too long for a Unix socket."""
    try:
        listener.bind(os.fspath(path))
    except OSError as error:
        raise TransportError(
            f"cannot listen at {path}: {error}; expected an empty run directory with a path below 90 characters"
        ) from error
    listener.listen()
