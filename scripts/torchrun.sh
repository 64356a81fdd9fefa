#!/usr/bin/env bash
# Joins the command line to torchrun's ranks: on one machine as it is, on several with three variables set.
#
#   scripts/torchrun.sh bench --link gloo                            two ranks here
#   RANKS_PER_NODE=4 scripts/torchrun.sh compare --batch 12          four
#
# On two machines, the same line on both; the first one named is where they meet:
#
#   NODES=2 RENDEZVOUS=first-host:29500 IFNAME=eth0 scripts/torchrun.sh bench --link gloo
#
# On GPUs, one for each rank:
#
#   RANKS_PER_NODE=8 scripts/torchrun.sh bench --device cuda --link nccl --batch 64
#
# The emulated link needs all ranks on one machine; across machines say `--link gloo`. The exit code is torchrun's: 0,
# or 1 whatever a rank's own was; its report has that one.
set -euo pipefail

HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-$([ -x "$HERE/.venv/bin/python" ] && echo "$HERE/.venv/bin/python" || echo python3)}"
export PYTHONPATH="$HERE${PYTHONPATH:+:$PYTHONPATH}" # so that it runs from any folder, installed or not
export OMP_NUM_THREADS=1                             # a rank computes with one thread; torchrun would warn, then set it

NODES="${NODES:-1}"
if [ "$NODES" = 1 ]; then
    meeting=(--standalone) # a free port of this machine
else
    : "${RENDEZVOUS:?expected HOST:PORT of the first machine, the same on all}"
    # c10d: whoever is HOST keeps the store, and nobody has to be told which node it is
    meeting=(--nnodes "$NODES" --rdzv-backend c10d --rdzv-endpoint "$RENDEZVOUS" --rdzv-id "${RUN_ID:-parity}")
    # gloo else looks up the machine's own name, which may give an address that the others cannot reach
    if [ -n "${IFNAME:-}" ]; then
        export GLOO_SOCKET_IFNAME="$IFNAME"
    fi
fi
exec "$PYTHON" -m torch.distributed.run "${meeting[@]}" --nproc-per-node "${RANKS_PER_NODE:-2}" -m bench "$@"
