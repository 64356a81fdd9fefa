"""A process that prints the ids of its ranks while they work, and then waits to be killed."""

from __future__ import annotations

from common.harness.launch import Progress, RankPool
from parity_tests import faulty


def main() -> None:
    with RankPool(2) as pool:

        def tell(rank: int, progress: Progress) -> None:
            if rank == 0:
                print(*pool.pids, flush=True)

        pool.run(faulty.hang_while_others_wait, 1, ranks=2, timeout_s=600, on_progress=tell)


if __name__ == "__main__":
    main()
