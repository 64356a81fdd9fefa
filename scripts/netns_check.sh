#!/usr/bin/env bash
# Does the emulated link rank schedules as a real one does? Real sockets and a real shaper against the time model.
#
#   sudo scripts/netns_check.sh                      1200 Mbit/s; took four minutes on two busy cores
#   sudo RATE_MBIT=800 scripts/netns_check.sh --turns 9
#   sudo PYTHON=.venv/bin/python scripts/netns_check.sh
#
# Two network namespaces with a veth pair between them, `tbf` on both ends, one rank in each. One `bench` times the same
# engines in the same ranks twice: on gloo over that wire, and on the emulated link with the same bandwidth. Words after
# the script's name go to `bench`.
#
# What is compared. Step times are not: on the wire gloo's copies and the kernel cost compute too, and there is no alpha.
# Orders are: for each pair of engines, which one is faster by `bench`'s own test on paired turns, once per link. A pair
# that is within spread on either link is a tie and says nothing.
#
# Fairness. All engines take the same collectives on both links, by `--transport native`: all-gather and reduce-scatter.
# (Our own engines would else reduce by all-to-all, and torch's by reduce-scatter.) gloo's reduce-scatter is an
# all-reduce, twice the bytes of the model's; that is so for every engine alike, and makes the wire about a third busier
# than the emulated link. With `--transport ordered` at the end the bytes of `eager` and `compiled` are the model's,
# and only pairs within (eager, compiled) and within the two of torch are fair.
#
# Exit codes: 0 no pair is ranked the other way round, and at least one was told apart on both links; 1 one is;
# 2 it cannot run here, or no pair was told apart on both; 3 the benchmark failed.
set -euo pipefail

RATE_MBIT="${RATE_MBIT:-1200}"
HERE="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
PYTHON="${PYTHON:-$([ -x "$HERE/.venv/bin/python" ] && echo "$HERE/.venv/bin/python" || echo python3)}"
NAMESPACES=("parity-$$-0" "parity-$$-1")
ADDRESSES=(10.199.0.1 10.199.0.2)
DEVICE=wire0
PORT=29500 # of the first namespace, where nobody else is
launchers=()
scratch=

cannot_run() {
    echo "netns_check: $1" >&2
    exit 2
}

# Ends what was started, by its id; whatever way the script ends, nothing stays.
clean_up() {
    trap '' INT TERM
    for launcher in "${launchers[@]}"; do
        kill "$launcher" 2>/dev/null || true
    done
    for launcher in "${launchers[@]}"; do
        wait "$launcher" 2>/dev/null || true
    done
    for namespace in "${NAMESPACES[@]}"; do
        ip netns delete "$namespace" 2>/dev/null || true # its end of the wire goes with it
    done
    if [ -n "$scratch" ]; then
        rm -rf "$scratch"
    fi
}

make_wire() {
    for namespace in "${NAMESPACES[@]}"; do
        ip netns add "$namespace" 2>/dev/null || cannot_run "cannot make a network namespace; a container needs CAP_SYS_ADMIN"
    done
    # packets of 65000 bytes: the kernel's work per packet is compute that a network card would do
    ip link add "$DEVICE" mtu 65000 netns "${NAMESPACES[0]}" type veth \
        peer name "$DEVICE" mtu 65000 netns "${NAMESPACES[1]}" || cannot_run "cannot make a veth pair"
    for i in 0 1; do
        ip -netns "${NAMESPACES[i]}" address add "${ADDRESSES[i]}/24" dev "$DEVICE"
        ip -netns "${NAMESPACES[i]}" link set lo up
        ip -netns "${NAMESPACES[i]}" link set "$DEVICE" up
        # a burst above one packet, and 1 ms of the rate at most that comes free after a pause
        tc -netns "${NAMESPACES[i]}" qdisc add dev "$DEVICE" root tbf rate "${RATE_MBIT}mbit" burst 128kb latency 100ms ||
            cannot_run "cannot shape: no tbf in this kernel (modprobe sch_tbf)"
    done
}

# One rank in namespace $1; what it writes goes to a file of its own.
start_rank() {
    local i="$1"
    shift
    ip netns exec "${NAMESPACES[i]}" env "GLOO_SOCKET_IFNAME=$DEVICE" OMP_NUM_THREADS=1 "PYTHONPATH=$HERE" \
        "$PYTHON" -m torch.distributed.run --nnodes 2 --nproc-per-node 1 --node-rank "$i" \
        --master-addr "${ADDRESSES[0]}" --master-port "$PORT" -m bench bench "$@" \
        >"$scratch/$i.out" 2>"$scratch/$i.err" &
    launchers+=("$!")
}

[ "$(id -u)" = 0 ] || cannot_run "needs root, to make network namespaces and shape traffic; run it with sudo"
for program in ip tc; do
    command -v "$program" >/dev/null || cannot_run "needs $program (Debian, Ubuntu: apt install iproute2)"
done
"$PYTHON" -c "import torch" 2>/dev/null || cannot_run "$PYTHON has no torch; run 'make parity' first, or say PYTHON=/path/to/python"

trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
scratch="$(mktemp -d)"
make_wire

echo "netns_check: timing on a wire of $RATE_MBIT Mbit/s and on the emulated link" >&2
for i in 0 1; do
    start_rank "$i" --model llama-tiny --batch 4 --seq 128 --lr 0.01 --steps 2 --backend aot_eager --transport native \
        --engines eager,compiled,torch-fsdp2,torch-fsdp2-prefetch --turns 7 --turn-steps 1 --out "$scratch/runs" \
        --sweep link=gloo --sweep "link=0ms,${RATE_MBIT}Mbit/s" "$@"
done
for _ in 0 1; do
    if ! wait -n "${launchers[@]}"; then # whichever ends first: the other may wait for it in vain
        echo "netns_check: the benchmark failed; the ranks wrote:" >&2
        grep -h '^fsdp-parity: ' "$scratch"/?.err >&2 || tail -n 30 "$scratch"/?.err >&2
        exit 3
    fi
done
cat "$scratch/0.out"
PYTHONPATH="$HERE" "$PYTHON" "$HERE/scripts/compare_rankings.py" "$scratch"/runs/*
