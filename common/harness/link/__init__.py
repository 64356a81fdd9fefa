"""An emulated slow interconnect for CPU ranks of one machine: overlap that can be seen on a laptop.

On one machine communication is CPU work, so hiding it behind compute gains nothing. Here the process group stays plain
gloo, but within `emulate` its CPU collectives move their data through shared memory and are complete only when a time
model says so; a rank that waits sleeps and costs nothing. What it shows is the quality of a schedule at one ratio of
link to compute, not the speed of a GPU.

    spec.py         what a link costs, presets, `--link`
    board.py        shared memory of one rank
    link.py         one FIFO link: time model, waiting, log
    meter.py        the log, and the sums
    reductions.py   sums in rank order
    terms.py        root, reduction and dtypes, on which ranks must agree
    collectives.py  what each collective sends and writes
    kernels.py      c10d's kernels, links by group
    emulation.py    on and off
"""

from common.harness.link.emulation import emulate
from common.harness.link.meter import LogEntry, Meter, way_of
from common.harness.link.spec import FREE, PRESETS, LinkChoice, LinkSpec, parse_link

__all__ = ["FREE", "PRESETS", "LinkChoice", "LinkSpec", "LogEntry", "Meter", "emulate", "parse_link", "way_of"]
