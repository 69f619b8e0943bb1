"""Links that the kernel keeps to their rates: a network namespace a rank, wires between them, and queues that let bytes through.

Each rank's namespace has two wires to one that holds the switches: one to the NVLink switch of its domain, one to the fabric of
NICs. Both ends of a wire are shaped (htb), so that a rank sends and receives at its rate, whoever the peers are. Answers,
acknowledgements and signals, whose packets are marked `URGENT`, go before others, as they do on lanes of their own in InfiniBand.

Rule: namespaces have no names. They live while their descriptors are open, here and in ranks, so whatever ends this process, the
kernel takes them away with all that is in them. The caller's own network is never touched. It takes root, `ip` and `tc`.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Self

from shardroute.topologies.errors import InputError, RunError
from shardroute.topologies.topologies import Topology

_NEWNET: Final = 0x40000000  # CLONE_NEWNET of sched.h
_IP, _TC = "ip", "tc"
# Bytes of a packet: a sixteenth of a message of `cases`, and large against what the kernel and the ranks spend on it: at the
# rates of `machines` they take their links 2 and 0.8 ms. Packets of Ethernet's 1,500 and 9,000 bytes at twice the rates took all
# of two cores (0.81 s of CPU time in 0.415 s, 16 ranks), and plans came late by that. TCP/IP adds 52 bytes.
_NIC_MTU, _NVLINK_MTU = 2048 + 52, 8192 + 52
_HEADERS: Final = 14  # Ethernet's, which htb counts, too
# htb lets so much through at once; below two packets it would hold back each second one.
_BURST_PACKETS: Final = 1
# How packets are marked that go before others (the DSCP bits of IP's TOS): all that a receiver says, and signals. Going by length
# would let the last bytes of a message overtake those before them, which TCP takes for a loss: of 90 messages 63 had packets sent
# twice, and a plan of them took 10 % longer.
URGENT: Final = 0x10
_URGENT_SHARE: Final = 0.1  # of the rate is theirs for sure
# Congestion control of a host may be another (bbr, which paces by itself and shares a link unevenly: 7 to 30 % off, measured).
_CONTROL: Final = "cubic"
_MOST_RANKS: Final = 250  # addresses count ranks in one byte

_SETTINGS: Final = {
    "net/ipv4/conf/all/rp_filter": "0",
    "net/ipv4/conf/default/rp_filter": "0",
    "net/ipv4/tcp_slow_start_after_idle": "0",
    "net/ipv4/tcp_no_metrics_save": "1",
    # Nothing is lost here, but packets that wait for their turn look so: probes for lost tails sent 7 to 15 of them twice.
    "net/ipv4/tcp_early_retrans": "0",
}


def why_no_namespaces() -> str | None:
    """Why links in namespaces can't be made here, None if they can."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "network namespaces need root; leave --namespaces out, and ranks keep to the rates themselves"
    for tool in (_IP, _TC):
        if shutil.which(tool) is None:
            return f"the program {tool} is missing (install iproute2)"
    return None


def address_of(rank: int) -> str:
    """Where a rank listens in its namespace."""
    return f"10.99.0.{rank + 1}"


def enter(descriptor: int) -> None:
    """Move the calling thread into a namespace. Raises OSError."""
    _call("setns", descriptor, _NEWNET)


class Namespaces:
    """The namespaces of a topology's ranks, with wires of its rates; leaving the context takes them away.

    Raises InputError where they can't be made (see `why_no_namespaces`), RunError when `ip` or `tc` fails.
    """

    def __init__(self, topology: Topology) -> None:
        if (reason := why_no_namespaces()) is not None:
            raise InputError(reason)
        if topology.n_gpus > _MOST_RANKS:
            raise InputError(f"{topology.title} has {topology.n_gpus} GPUs; namespaces are made for up to {_MOST_RANKS}")
        self._topology = topology
        self._descriptors: list[int] = []
        self._switches = -1
        # Namespaces are a thread's, and what a thread starts is in its namespace: one thread makes all, ours stays where it is.
        self._thread = ThreadPoolExecutor(max_workers=1)

    @property
    def descriptors(self) -> Sequence[int]:
        """One a rank."""
        return tuple(self._descriptors)

    def __enter__(self) -> Self:
        try:
            self._thread.submit(self._make).result()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise RunError(f"network namespaces can't be made: {error.strerror}") from error
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def _close(self) -> None:
        self._thread.shutdown()
        for descriptor in (*self._descriptors, self._switches):
            if descriptor >= 0:
                with contextlib.suppress(OSError):
                    os.close(descriptor)
        self._descriptors, self._switches = [], -1

    def _make(self) -> None:
        topology = self._topology
        self._switches = _new_namespace()
        self._descriptors += [_new_namespace() for _ in range(topology.n_gpus)]
        enter(self._switches)
        bridges = [f"nv{d}" for d in range(topology.n_domains)]
        lines = [f"link add {name} mtu {_NVLINK_MTU} type bridge" for name in bridges]
        lines += [f"link add ib mtu {_NIC_MTU} type bridge", *(f"link set {name} up" for name in (*bridges, "ib"))]
        for rank, descriptor in enumerate(self._descriptors):
            for wire, bridge, mtu in self._wires(rank):
                there = f"{wire} mtu {mtu} netns /proc/self/fd/{descriptor}"
                lines.append(f"link add {wire}{rank}p mtu {mtu} type veth peer name {there}")
                lines.append(f"link set {wire}{rank}p gso_max_segs 1 master {bridge} up")
        _batch(_IP, lines, self._descriptors)
        _batch(_TC, [line for rank in range(topology.n_gpus) for line in self._shaped(rank, f"{rank}p")])
        for rank, descriptor in enumerate(self._descriptors):
            enter(descriptor)
            for name, value in _SETTINGS.items():
                with open(f"/proc/sys/{name}", "w") as setting:
                    setting.write(value)
            _batch(_IP, self._addresses(rank))
            _batch(_TC, self._shaped(rank, ""))

    def _wires(self, rank: int) -> list[tuple[str, str, int]]:
        """The wires of a rank: device in its namespace, switch, and bytes of a packet."""
        return [("nvl", f"nv{self._topology.domain[rank]}", _NVLINK_MTU), ("nic", "ib", _NIC_MTU)]

    def _shaped(self, rank: int, suffix: str) -> list[str]:
        """Lines for `tc` that keep one end of a rank's wires to their rates."""
        lines = []
        rates = {"nvl": float(self._topology.nvlink_Bps[rank]), "nic": float(self._topology.nic_Bps[rank])}
        for wire, _, mtu in self._wires(rank):
            device, rate = wire + suffix, int(8 * rates[wire])
            burst = f"burst {_BURST_PACKETS * (mtu + _HEADERS)} cburst {_BURST_PACKETS * (mtu + _HEADERS)}"
            fast, rest = int(rate * _URGENT_SHARE), int(rate * (1 - _URGENT_SHARE))
            lines += [
                f"qdisc add dev {device} root handle 1: htb default 20",
                f"class add dev {device} parent 1: classid 1:1 htb rate {rate}bit ceil {rate}bit {burst}",
                f"class add dev {device} parent 1:1 classid 1:10 htb rate {fast}bit ceil {rate}bit prio 0 {burst} quantum {mtu}",
                f"class add dev {device} parent 1:1 classid 1:20 htb rate {rest}bit ceil {rate}bit prio 1 {burst} quantum {mtu}",
                f"filter add dev {device} parent 1: protocol ip u32 match u8 {URGENT:#x} 0xfc at 1 flowid 1:10",
            ]
        return lines

    def _addresses(self, rank: int) -> list[str]:
        """Lines for `ip` that give a rank its address, and a way to each other rank over the right wire."""
        lines = ["link set lo up", f"addr add {address_of(rank)}/32 dev lo"]
        domain = self._topology.domain
        for wire, net in (("nvl", 97), ("nic", 98)):
            lines += [f"addr add 10.{net}.0.{rank + 1}/24 dev {wire}", f"link set {wire} gso_max_segs 1 up"]
        for other in range(self._topology.n_gpus):
            if other != rank:
                wire, net = ("nvl", 97) if domain[other] == domain[rank] else ("nic", 98)
                lines.append(
                    f"route add {address_of(other)}/32 via 10.{net}.0.{other + 1} dev {wire} src {address_of(rank)} "
                    f"congctl {_CONTROL}"
                )
        return lines


def _new_namespace() -> int:
    """A descriptor of a new namespace, which the calling thread is then in."""
    _call("unshare", _NEWNET)
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def _call(name: str, *arguments: int) -> None:
    function: Callable[..., int] = getattr(ctypes.CDLL(None, use_errno=True), name)
    if function(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _batch(tool: str, lines: Sequence[str], descriptors: Sequence[int] = ()) -> None:
    """Run lines of `ip` or `tc` in the calling thread's namespace."""
    done = subprocess.run(
        [tool, "-batch", "-"], input="\n".join(lines) + "\n", text=True, capture_output=True, pass_fds=descriptors, check=False
    )
    if done.returncode:
        raise RunError(f"{tool} failed: {done.stderr.strip().splitlines()[0] if done.stderr.strip() else done.returncode}")
