"""A supervisor of one rank, as `joined.execute` is one, with planted faults: `python -m tests.faults.supervisor ...`.

Arguments: folder, seconds a case may last, seconds without a beat that mean lost, and the fault of each case. It says
what it sees as lines of JSON. The last thing it does is to let a call of a group hang.
"""

import json
import sys
import time
from pathlib import Path

from blockshock_lib import joined, launch
from blockshock_lib.errors import BlockShockError, DeadlineError
from blockshock_lib.joined import meeting as meetings
from blockshock_lib.joined.group import JoinedTeam
from tests.faults import failing, workers


def say(**facts):
    print(json.dumps(facts | {"time": time.monotonic()}), flush=True)


def main(folder, case_seconds, lost_seconds, *faults):
    meetings.LOST_SECONDS = float(lost_seconds)
    place = joined.place()
    cases = [workers.Case(str(number), fault) for number, fault in enumerate(faults)]
    with meetings.Meeting(place) as meeting:
        say(rank=place.rank, heard=meeting.gather([place.rank, "x" * (9 << 20) if place.rank else ""])[1][1][-1])
        team = JoinedTeam(meeting, 0)
        launch.run(
            workers.params(processes=2, case_seconds=float(case_seconds)),
            cases,
            Path(folder),
            measure=workers.measure,
            run_name="r1",
            context=workers.CONTEXT,
            on_event=lambda event: say(**event),
            team=team,
        )
        with team.group(2, logs=Path(folder) / "logs") as group:
            say(ranks=group.call(workers.rank_and, "x", seconds=20))
            try:
                group.call(failing.hangs_in_python, seconds=0.5)
            except DeadlineError as error:
                say(stacks=error.stacks, alive=group.alive)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except BlockShockError as error:
        say(ended=str(error))
        sys.exit(3)
