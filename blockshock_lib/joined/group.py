"""A group whose ranks are children of several supervisors, one each: the same worker, the same calls, the same errors.

Every supervisor watches its own child. Rank 0's alone keeps time and decides how a call ended; its word is everybody's
outcome, so that all of them go on with the same next step.
"""

from __future__ import annotations

import contextlib
import pickle
import time
from collections.abc import Iterator
from typing import Any

from blockshock_lib import launch, worker
from blockshock_lib.children import NO_STACK, STACK_SECONDS
from blockshock_lib.errors import DeadlineError, LaunchError, RankError
from blockshock_lib.joined.meeting import QUICK_SECONDS, Meeting
from blockshock_lib.workers import WorkerGroup, root_cause

POLL_SECONDS = 0.2  # while the own rank computes: seldom enough to leave the measurement alone
GRACE_SECONDS = 0.6  # how long a first failure waits for the one that caused it: more than two polls


class JoinedGroup(WorkerGroup):
    """WorkerGroup across supervisors: each starts the child of its own rank, and all get the same results or error.

    Raises: what WorkerGroup raises; Interrupted when another supervisor is lost or has ended the job.
    """

    def __init__(self, meeting: Meeting, processes: int, *, gpu: int = 0, **options: Any):
        if processes != meeting.size:
            raise LaunchError(f"{processes} ranks were asked for, {meeting.size} were started")
        self._meeting, self._gpu = meeting, gpu
        super().__init__(processes, **options)

    @property
    def alive(self) -> bool:
        """Whether it has not ended. A rank that died meanwhile is found by the next call, by all supervisors alike."""
        return not self._children.ended

    def _places(self, common: dict[str, Any]) -> list[worker.Place]:
        meeting = self._meeting
        store = worker.Store(meeting.place.host, meeting.place.port, f"{meeting.prefix}/{meeting.turn()}")
        return [worker.Place(rank=meeting.rank, gpu=self._gpu, store=store, **common)]

    def _collect(self, seconds: float) -> list[bytes]:
        meeting, turn = self._meeting, self._meeting.turn()
        judge = Judge(meeting, turn, seconds, self._children.stacks) if meeting.leads else None
        answered = stacked = False
        while (outcome := meeting.get(f"{turn}/outcome")) is None:
            meeting.heed()
            if self._children.hear(QUICK_SECONDS if answered else POLL_SECONDS):
                self._publish(turn, self._children.answers[meeting.rank])
                answered = True
            if judge is not None:
                judge.look()
            elif not stacked and meeting.said(f"{turn}/asked"):
                meeting.put(f"{turn}/stacks-{meeting.rank}", self._children.stacks()[meeting.rank].encode())
                stacked = True
        error, facts = pickle.loads(outcome)
        if error:
            raise {"rank": RankError, "deadline": DeadlineError}[error](*facts)
        return [meeting.wait(f"{turn}/answer-{rank}") for rank in range(self._size)]

    def _publish(self, turn: str, answer: worker.Answer) -> None:
        if answer.ok:
            self._meeting.put(f"{turn}/answer-{self._meeting.rank}", answer.value)
            return
        # The clocks of two machines cannot be compared; the order in which they speak can.
        order = self._meeting.count(f"{turn}/order")
        told = (order, answer.kind, answer.message, answer.traceback)
        self._meeting.put(f"{turn}/failure-{self._meeting.rank}", pickle.dumps(told))


class Judge:
    """Rank 0's view of one call: looks at what all ranks have said, and says how the call ended."""

    def __init__(self, meeting: Meeting, turn: str, seconds: float, stacks):
        self.meeting, self.turn, self.seconds, self.stacks = meeting, turn, seconds, stacks
        self.end = time.monotonic() + seconds
        self.silent, self.failures, self.times = set(range(meeting.size)), {}, {}

    def look(self) -> None:
        """Publishes the outcome where there is one."""
        for rank in set(range(self.meeting.size)) - self.failures.keys():
            if told := self.meeting.get(f"{self.turn}/failure-{rank}"):
                order, *facts = pickle.loads(told)
                if not self.failures:
                    self.end = time.monotonic() + GRACE_SECONDS
                self.failures[rank], self.times[rank] = RankError(rank, *facts), order
        self.silent -= {r for r in self.silent if r in self.failures or self.meeting.said(f"{self.turn}/answer-{r}")}
        late = time.monotonic() >= self.end
        if self.failures:
            if late or not self.silent:
                cause = root_cause(self.failures, self.times)
                self._say("rank", cause.rank, cause.kind, cause.message, cause.traceback)
        elif not self.silent:
            self._say("")
        elif late:
            self._say("deadline", self.seconds, self._ask_stacks())

    def _say(self, error: str, *facts: Any) -> None:
        self.meeting.put(f"{self.turn}/outcome", pickle.dumps((error, facts)))

    def _ask_stacks(self) -> dict[int, str]:
        self.meeting.put(f"{self.turn}/asked", b"1")
        found = {self.meeting.rank: self.stacks()[self.meeting.rank]}
        end = time.monotonic() + STACK_SECONDS
        while len(found) < self.meeting.size and time.monotonic() < end:
            time.sleep(QUICK_SECONDS)
            for rank in set(range(self.meeting.size)) - found.keys():
                if (text := self.meeting.get(f"{self.turn}/stacks-{rank}")) is not None:
                    found[rank] = text.decode()
        return {rank: found.get(rank, NO_STACK) for rank in range(self.meeting.size)}


class JoinedTeam(launch.Team):
    """What launch.run asks for, on several machines: rank 0's supervisor leads, the others write nothing.

    Args:
        gpu: index of this rank's GPU on its machine.
    """

    def __init__(self, meeting: Meeting, gpu: int):
        self.meeting, self.gpu, self.leads = meeting, gpu, meeting.leads

    def group(self, processes: int, **options: Any) -> JoinedGroup:
        return JoinedGroup(self.meeting, processes, gpu=self.gpu, **options)

    @contextlib.contextmanager
    def sampler(self, hardware) -> Iterator[Any]:
        """Each supervisor samples its own GPU; all GPUs' rows are in the record."""
        if hardware.device != "cuda":
            yield list
            return
        from blockshock_lib.engine.power import Sampler

        own = Sampler(hardware.device, self.gpu + 1)
        own.handles, own.seen = own.handles[self.gpu :], own.seen[self.gpu :]

        def rows() -> list[dict[str, Any]]:
            told = self.meeting.gather([row | {"rank": self.meeting.rank} for row in own.rows()])
            return [row for rows in told for row in rows]

        with own:
            yield rows
