"""What `test_torchrun.py` starts: `python -m parity_tests.torchrun_job TASK WORLD_SIZE`."""

from __future__ import annotations

import json
import sys

from common.errors import ParityError
from common.harness.launch import Progress, open_ranks
from parity_tests import faulty


def main(task: str, world_size: int) -> int:
    events: list[str] = []

    def on_progress(rank: int, progress: Progress) -> None:
        events.append(f"{rank}: {progress}")

    with open_ranks(world_size) as ranks:
        if task == "raise":
            ranks.run(faulty.raise_error, 0, ranks=world_size)
        first = ranks.run(faulty.gather_values, 10, ranks=world_size)
        second = ranks.run(faulty.gather_compiled, ranks=world_size)
        third = ranks.run(faulty.report_steps, 2, ranks=world_size, on_progress=on_progress)
        try:
            ranks.run(faulty.rank_of, ranks=world_size + 1)
        except ParityError as error:
            refused = f"{error.exit_code} {error}"
        if ranks.is_main:
            print(json.dumps([first, second, third, events, refused]), flush=True)
        if task == "hang":
            ranks.run(faulty.hang_while_others_wait, world_size - 1, ranks=world_size, timeout_s=3)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], int(sys.argv[2])))
    except ParityError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
