"""A job of torchrun's with planted faults: `torchrun ... -m tests.faults.torchrun_job folder fault fault ...`."""

import sys
from pathlib import Path

from blockshock_lib.ranks import torchrun
from blockshock_lib.runs import measure
from blockshock_lib.studies.linear import STUDY
from tests.faults import failing, workers

if __name__ == "__main__":
    folder, faults = Path(sys.argv[1]), sys.argv[2:]
    cases = [workers.faulty(str(number), fault) for number, fault in enumerate(faults)]
    asked = workers.params(case_seconds=4 if "hang" in faults else 300)
    asked.hardware.processes = 2
    with torchrun.job() as job:
        if job.rank:
            job.follow()
        else:
            with job.group(2, device="cpu", logs=folder / "logs") as group:
                assert group.call(failing.rank_and, "x" * (9 << 20), seconds=600)[1][:2] == (1, 2)
            named = dict(study=STUDY, task=workers.measure, run_name="r1", context=workers.CONTEXT, group=job.group)
            done = {(case.id, 0) for case in cases if (folder / "records" / f"{case.id}-0.json").exists()}
            measure.run(asked, cases, folder, finished=done, gives_up=job.restarts > 0, **named)
