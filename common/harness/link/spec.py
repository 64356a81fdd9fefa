"""What a link costs: two numbers, the time model made of them, presets by name, and how they are written.

An operation that moves `wire` bytes per rank takes `alpha + wire / beta`: latency once, then bandwidth. The bytes are
those of ring algorithms, W ranks: all-gather and reduce-scatter move (W-1)/W of the full buffer, all-reduce twice that.

[Note: presets are ratios]
What decides whether communication can be hidden is the time on the link over the time of compute, and a CPU computes
thousands of times slower than a GPU. A preset therefore is a real link slowed down as compute is, so that this
*ratio* is kept; it is no GPU, and times measured with it are not times of one. With F the arithmetic per second and T
the tokens per rank and step, compute per parameter is 6 T / F and traffic is a fixed number of elements, so

    beta = beta_gpu * (F_cpu / F_gpu) * (T_gpu / T_cpu) * (bytes per element: 4 here, 2 there)

for 50 GFLOP/s and 512 tokens in fp32 here, 150 TFLOP/s and 8192 tokens in bf16 there. Latencies are kept as they are:
a block of a debug model takes about as long here (tens of ms) as one of a large model there.

Left out: contention between groups, latency that grows with W, other algorithms than rings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import ConfigError
from common.job import FAKE_LINK


@dataclass(frozen=True)
class LinkSpec:
    """One link: latency per operation, and bandwidth per rank."""

    alpha_s: float
    beta_bytes_per_s: float

    def __post_init__(self) -> None:
        if not (0 <= self.alpha_s < math.inf):
            raise ConfigError(f"link: expected a latency of at least 0 s, found {self.alpha_s!r}; write e.g. 1ms")
        if not self.beta_bytes_per_s > 0:
            raise ConfigError(f"link: expected a bandwidth above 0, found {self.beta_bytes_per_s!r}; write 150MB/s")

    def cost_s(self, wire_bytes: int, ranks: int) -> float:
        """How long an operation among `ranks` occupies the link; nothing where a rank is alone."""
        return self.alpha_s + wire_bytes / self.beta_bytes_per_s if ranks > 1 else 0.0

    def __str__(self) -> str:
        return f"{self.alpha_s * 1e3:g}ms,{self.beta_bytes_per_s / 1e6:g}MB/s"


FREE = LinkSpec(0.0, math.inf)
"""The link of a compute-only run: data moves as ever, and no operation takes time on it."""


@dataclass(frozen=True)
class LinkChoice:
    """Which link each process group has.

    Attributes:
        name: as it was written.
        about: what it imitates, in one sentence.
        across: the link of a group; None is gloo's own transport, untouched.
        within: the link of a group whose ranks share one node, if that is another.
        ranks_per_node: consecutive ranks that share a node; None if every group has the same link.
    """

    name: str
    about: str
    across: LinkSpec | None
    within: LinkSpec | None = None
    ranks_per_node: int | None = None

    def describe(self) -> str:
        """What it costs, and what it imitates."""
        if self.across is None or self.name == str(self.across):
            return self.about
        inside = "" if self.within is None else f"{self.within} inside a node, else "
        return f"{inside}{self.across}; {self.about}"

    def of_group(self, ranks: Sequence[int]) -> LinkSpec:
        """The link of the group of these global ranks."""
        assert self.across is not None, "gloo's own transport has no time model"
        if self.within is None or self.ranks_per_node is None:
            return self.across
        nodes = {rank // self.ranks_per_node for rank in ranks}
        return self.within if len(nodes) == 1 else self.across


def _scaled(alpha_s: float, gpu_bytes_per_s: float) -> LinkSpec:
    """A GPU's link at the ratio of [Note: presets are ratios]."""
    return LinkSpec(alpha_s, gpu_bytes_per_s * (50e9 / 150e12) * (8192 / 512) * (4 / 2))


NVLINK = _scaled(20e-6, 230e9)
PCIE = _scaled(30e-6, 20e9)
ETHERNET = _scaled(100e-6, 11e9)
_RATIO = "a ratio of link to compute, scaled to a CPU's compute and not a GPU"

PRESETS = {
    choice.name: choice
    for choice in (
        LinkChoice("gloo", "gloo's own transport, untouched: communication is CPU work and cannot be hidden", None),
        LinkChoice("nccl", "NCCL's own transport between GPUs: whatever this machine has", None),
        LinkChoice(FAKE_LINK, "a process group that moves nothing: one process stands for any number of ranks", None),
        LinkChoice("none", "the emulated link at no cost: the compute-only run", FREE),
        LinkChoice("nvlink", f"like NVLink inside a node, 230 GB/s per GPU: {_RATIO}", NVLINK),
        LinkChoice("pcie", f"like PCIe 4.0 x16, 20 GB/s per GPU: {_RATIO}", PCIE),
        LinkChoice("ethernet", f"like 100 Gb/s Ethernet, one card per GPU, 11 GB/s: {_RATIO}", ETHERNET),
        LinkChoice(
            "nodes",
            f"nodes of 2 ranks (nodes:N for N): nvlink inside one, ethernet across: {_RATIO}",
            ETHERNET,
            NVLINK,
            2,
        ),
    )
}

_TIMES = {"s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_BYTES = {"B": 1.0, "KB": 1e3, "MB": 1e6, "GB": 1e9, "KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_BITS = {"Mb": 1e6 / 8, "Gb": 1e9 / 8, "Mbit": 1e6 / 8, "Gbit": 1e9 / 8}
_NUMBER = r"([0-9]+(?:\.[0-9]*)?(?:[eE][+-]?[0-9]{1,2})?|\.[0-9]+)"


def parse_link(text: str) -> LinkChoice:
    """Read a link: a preset's name, `nodes:N`, or latency and bandwidth such as `1ms,150MB/s`.

    Raises:
        ConfigError: neither.
    """
    if text in PRESETS:
        return PRESETS[text]
    if match := re.fullmatch(r"nodes:([1-9][0-9]{0,5})", text):
        preset, size = PRESETS["nodes"], int(match[1])
        about = preset.about.replace("nodes of 2 ranks (nodes:N for N)", f"nodes of {size} ranks")
        return LinkChoice(text, about, preset.across, preset.within, size)
    latency, comma, bandwidth = (part.strip() for part in text.partition(","))
    alpha_s = _measure(latency, _TIMES)
    beta = math.inf if bandwidth == "inf" else _measure(bandwidth.removesuffix("/s"), _BYTES | _BITS)
    if not comma or alpha_s is None or beta is None or not (bandwidth.endswith("/s") or bandwidth == "inf"):
        raise ConfigError(
            f"link: cannot read {text!r}; write latency,bandwidth such as 1ms,150MB/s, or one of {', '.join(PRESETS)}"
        )
    return LinkChoice(text, f"{latency} per operation and {bandwidth} per rank", LinkSpec(alpha_s, beta))


def _measure(text: str, units: dict[str, float]) -> float | None:
    """A number and its unit, in the unit of the table; 0 needs none."""
    if text == "0":
        return 0.0
    match = re.fullmatch(rf"{_NUMBER}\s*([A-Za-z]+)", text)
    return float(match[1]) * units[match[2]] if match and match[2] in units else None
