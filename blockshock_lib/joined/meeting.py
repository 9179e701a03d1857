"""Where the supervisors of one job meet: a TCPStore, heartbeats, and one word that ends the job for all of them.

What is exchanged is pickled, as torch.distributed itself does: the store's port is for the job's own machines only.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import sys
import threading
import time
from datetime import timedelta
from typing import Any

from blockshock_lib.errors import Interrupted, first_line
from blockshock_lib.joined.environment import Place

BEAT_SECONDS = 0.5
LOST_SECONDS = 10.0  # without a beat for so long, a supervisor is given up
MEET_SECONDS = 300.0  # for the last machine to arrive
QUICK_SECONDS = 0.02
CHUNK = 4 << 20  # the store drops a client that sends more than 8 MiB at once
KEEP_TURNS = 8  # what was said longer ago is forgotten: nobody can still be reading it


class Meeting:
    """This supervisor's end of the store. Use it as a context manager: leaving it with an error ends the job for all.

    Raises (all that wait): Interrupted when a supervisor is lost, has ended the job, or the store has gone.
    """

    def __init__(self, place: Place):
        self.place, self.rank, self.size, self.leads = place, place.rank, place.size, place.rank == 0
        self._turn, self._said, self._lost = 0, {}, set()
        self._stopped, self._heard, self._done = "", time.monotonic(), threading.Event()
        with self._store_errors():
            self._store, ours = self._client(place.serves), self._client(False)
        self._thread = threading.Thread(target=self._beat, args=(ours,), name="beat", daemon=True)
        self._thread.start()
        threading.Thread(target=self._give_up, name="given up", daemon=True).start()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind, error, trace) -> None:
        with contextlib.suppress(Interrupted):
            if error is not None and not self._stopped:
                why = first_line(error) if str(error) else kind.__name__
                self.put("stopped", f"rank {self.rank} ended the run: {why}".encode())
            # Whoever serves the store stays until the others know how it ended.
            self.put(f"left-{self.rank}", b"1")
            end = time.monotonic() + 4 * BEAT_SECONDS + (LOST_SECONDS if error is None else 0)
            while self.place.serves and time.monotonic() < end and not self._all_left():
                time.sleep(QUICK_SECONDS)
        self._done.set()
        self._thread.join(2 * BEAT_SECONDS)

    def turn(self) -> str:
        """What the keys of the next exchange begin with: the same on every rank, for all go through the same ones."""
        self._turn += 1
        for key in self._said.pop(self._turn - KEEP_TURNS, ()):
            with self._store_errors():
                self._store.delete_key(key)
        return f"turn-{self._turn}"

    def put(self, key: str, data: bytes) -> None:
        """Say `data`, of any size, under `key`."""
        parts = [data[at : at + CHUNK] for at in range(0, len(data), CHUNK)] or [b""]
        with self._store_errors():
            for number, part in enumerate(parts):
                self._store.set(f"{key}/{number}", part)
            self._store.set(key, str(len(parts)))
        self._said.setdefault(self._turn, []).extend([key, *(f"{key}/{number}" for number in range(len(parts)))])

    def get(self, key: str) -> bytes | None:
        """What was said under `key`; None where nothing was yet."""
        with self._store_errors():
            if not self._store.check([key]):
                return None
            return b"".join(self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key))))

    def said(self, key: str) -> bool:
        """Whether anything was said under `key`."""
        with self._store_errors():
            return self._store.check([key])

    def count(self, key: str) -> int:
        """1 for whoever asks first, 2 for the second: the order of events on machines whose clocks differ."""
        with self._store_errors():
            return self._store.add(key, 1)

    def wait(self, key: str) -> bytes:
        """What is said under `key`, once it is."""
        while (found := self.get(key)) is None:
            self.heed()
            time.sleep(QUICK_SECONDS)
        return found

    def gather(self, value: Any, *, everyone: bool = True) -> list[Any]:
        """Every rank's `value`, in rank order; [] on other ranks than 0 unless `everyone` shall have it."""
        turn = self.turn()
        self.put(f"{turn}/{self.rank}", pickle.dumps(value))
        if not (everyone or self.leads):
            return []
        return [pickle.loads(self.wait(f"{turn}/{rank}")) for rank in range(self.size)]

    def share(self, value: Any = None) -> Any:
        """Rank 0's `value`, on every rank."""
        turn = self.turn()
        if self.leads:
            self.put(f"{turn}/0", pickle.dumps(value))
            return value
        return pickle.loads(self.wait(f"{turn}/0"))

    def heed(self) -> None:
        """Raise Interrupted once the job cannot go on."""
        if self._stopped:
            raise Interrupted(self._stopped)

    def _client(self, serves: bool):
        from torch.distributed import PrefixStore, TCPStore

        host, port, wait = self.place.host, self.place.port, timedelta(seconds=MEET_SECONDS)
        store = TCPStore(host, port, is_master=serves, wait_for_workers=False, timeout=wait)
        return PrefixStore(self.prefix, store)

    @property
    def prefix(self) -> str:
        """What all keys of this job begin with."""
        return f"blockshock/{self.place.job}"

    @contextlib.contextmanager
    def _store_errors(self):
        try:
            yield
        except RuntimeError as error:  # torch's own: of the network, of the store
            where = f"{self.place.host}:{self.place.port}"
            raise Interrupted(self._stopped or f"the ranks' store at {where} is gone: {first_line(error)}") from None

    def _all_left(self) -> bool:
        return all(self.said(f"left-{rank}") for rank in set(range(self.size)) - self._lost)

    def _beat(self, store) -> None:
        # A client of its own: the main thread may be in the middle of a word.
        number, seen = 0, {}
        started = time.monotonic()
        try:
            while not self._done.wait(BEAT_SECONDS):
                number += 1
                store.set(f"beat-{self.rank}", str(number))
                now = time.monotonic()
                for rank in set(range(self.size)) - {self.rank}:
                    if not store.check([f"beat-{rank}"]):
                        if now - started > MEET_SECONDS:
                            self._stop(f"rank {rank} has not come within {MEET_SECONDS:g} s")
                        continue
                    beat = store.get(f"beat-{rank}")
                    if seen.setdefault(rank, (beat, now))[0] != beat or store.check([f"left-{rank}"]):
                        seen[rank] = (beat, now)
                    if now - seen[rank][1] > LOST_SECONDS:
                        gone = (
                            f"rank {rank} has not been heard of for {LOST_SECONDS:g} s: its process or machine is lost"
                        )
                        self._stop(f"{gone}; --resume continues the run")
                if store.check(["stopped"]):
                    self._stop(store.get("stopped/0").decode(errors="replace"))
                self._heard = time.monotonic()
        except RuntimeError as error:
            where = f"{self.place.host}:{self.place.port}"
            self._stop(f"the ranks' store at {where} is gone: {first_line(error)}; --resume continues the run")
            self._heard = float("inf")

    def _stop(self, why: str) -> None:
        self._stopped = self._stopped or why

    def _give_up(self) -> None:
        # A machine that vanished without a word leaves both threads inside a read that never returns. The ranks end
        # with this process, and so does its hold on the run.
        while not self._done.wait(1):
            if time.monotonic() - self._heard > 1.5 * LOST_SECONDS:
                where = f"{self.place.host}:{self.place.port}"
                print(
                    f"error: the ranks' store at {where} does not answer; --resume continues the run", file=sys.stderr
                )
                sys.stderr.flush()
                os._exit(1)
