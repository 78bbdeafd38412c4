"""Threads read, fork, list and delete sessions while turns are saved: each session is that before a turn or after it.

Some saves fail, as on a full disk, and then the session stays as it was. Half of the stores are in a folder, which
another store opens at the end.
"""

import random
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import longspan
from longspan import states
from longspan.serving import Pool, Session, SessionError, Sessions
from longspan.serving.sessions import continued

from . import Case

SHORT, LONG = 4, 300
THREADS, TURNS, VOCAB = 4, 20, 11


def cases(seed: int, count: int, folder: Path) -> Iterator[Case]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = longspan.DecoderConfig(vocab=VOCAB, dim=8, heads=2, depth=2, attention="linear; softmax")
        pool = Pool(longspan.Decoder(config).eval(), slots=1, capacity=64)
    for number in range(count):
        place = folder / f"{number}" if number % 2 else None
        label = f"{number}-{'memory' if place is None else 'folder'}"
        yield label, lambda number=number, place=place: Attack(pool, place, f"{seed}/{number}").run()


class Attack:
    """One store, and what its sessions may be.

    ``versions`` has the tokens of a session after each turn; the last one may not be saved yet. ``saved`` is the number
    of those that are.
    """

    def __init__(self, pool: Pool, folder: Path | None, seed: str):
        self.pool, self.folder, self.seed = pool, folder, seed
        self.store = Sessions(pool, folder)
        self.versions: dict[str, list[tuple[int, ...]]] = {}
        self.saved: dict[str, int] = {}
        self.doomed: set[str] = set()  # whose deletion has begun
        self.deleted: set[str] = set()
        self.wrong: list[str] = []

    def run(self) -> str | None:
        for _ in range(2):
            self._made(self.store.create(Session()).id, ())
        threads = [threading.Thread(target=self._work, args=(i,)) for i in range(THREADS)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        try:
            with mock.patch.object(states, "save", self._save(states.save)):
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        finally:
            sys.setswitchinterval(interval)
            self.store.close()
        if self.folder is not None:
            self.store = Sessions(self.pool, self.folder)
        self._check_end()
        self.store.close()
        return "; ".join(self.wrong[:3]) or None

    def _save(self, save: Any) -> Any:
        dice = random.Random(f"{self.seed}/disk")

        def full(*args: Any) -> None:
            if dice.random() < 0.1:
                raise ValueError("No space left on device")
            save(*args)

        return full

    def _made(self, name: str, tokens: tuple[int, ...]) -> None:
        self.saved[name] = 1
        self.versions[name] = [tokens]

    def _work(self, thread: int) -> None:
        dice = random.Random(f"{self.seed}/{thread}")
        ways = (self._turn, self._turn, self._read, self._read, self._read, self._fork, self._list, self._delete)
        for _ in range(TURNS):
            way, name = dice.choice(ways), dice.choice(list(self.versions))
            gone = name in self.deleted
            try:
                way(name, dice)
            except SessionError as error:
                fine = {"not_found": name in self.doomed, "busy": True, "unwritable": True}
                if not fine.get(error.code, False) or (gone and error.code != "not_found"):
                    self.wrong.append(f"{way.__name__[1:]} of {name}: {error.code}: {error}")
            except Exception as error:
                self.wrong.append(f"{way.__name__[1:]} of {name}: {type(error).__name__}: {error}")

    def _turn(self, name: str, dice: random.Random) -> None:
        with self.store.lock(name):
            session = self._read(name, dice)
            more = tuple(dice.randrange(VOCAB) for _ in range(dice.randrange(1, 4)))
            state = None
            if dice.random() < 0.5 and not session.state:
                read = torch.tensor([[VOCAB, *session.tokens, *more][:-1]])
                with torch.no_grad():
                    _, state = self.pool.model(read, self.pool.model.init_state(1))
            after = continued(session, more, state)
            versions = self.versions[name]
            versions.append(after.tokens)
            try:
                with self.store.room(len(after.tokens), name):
                    self.store.replace(name, after)
            except SessionError:
                versions.pop()
                raise
            self.saved[name] = len(versions)

    def _read(self, name: str, dice: random.Random) -> Session:
        first = self.saved[name]
        session = self.store.read(name)
        last = len(self.versions[name])
        # A save that fails takes its version away again, and is never read.
        if session.tokens not in self.versions[name][first - 1 : last]:
            self.wrong.append(
                f"{name} has {len(session.tokens)} tokens, which are not those of turns {first} to {last}"
            )
        if session.state is not None and int(session.state.position) != 1 + len(session.tokens) - session.pending:
            self.wrong.append(f"{name} has the state of other tokens")
        return session

    def _fork(self, name: str, dice: random.Random) -> None:
        session = self._read(name, dice)
        self._made(self.store.create(session, name).id, session.tokens)

    def _list(self, name: str, dice: random.Random) -> None:
        for entry in self.store.entries():
            lengths = [len(tokens) for tokens in self.versions.get(entry.id, [()])]
            if entry.id in self.versions and entry.length not in lengths:
                self.wrong.append(f"the list has {entry.length} tokens for {entry.id}, not one of {lengths}")

    def _delete(self, name: str, dice: random.Random) -> None:
        if len(self.versions) - len(self.doomed) > 2:
            with self.store.lock(name):
                self.doomed.add(name)
                self.store.remove(name)
                self.deleted.add(name)

    def _check_end(self) -> None:
        left = {entry.id for entry in self.store.entries()}
        if left != self.versions.keys() - self.deleted:
            self.wrong.append(f"{len(left)} sessions at the end, not {len(self.versions) - len(self.deleted)}")
        for name in left:
            if (found := self.store.read(name).tokens) != self.versions[name][self.saved[name] - 1]:
                self.wrong.append(f"{name} has {len(found)} tokens at the end")
