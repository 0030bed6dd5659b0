"""Who reads how many tokens in the next step, and who has to wait for room."""

from __future__ import annotations

from collections import deque

from anabatic.infer.blocks import SIZE, Blocks
from anabatic.infer.request import Request
from anabatic.models.cache import Row

_LEAST = 64
"""Tokens of prompts that are read in a step beside others, however slow the device is."""


class Pace:
    """How many tokens of prompts are read in a given time, from the latest steps; the latest count most.

    Args:
        seconds: that a step of several requests should take.
    """

    def __init__(self, seconds: float) -> None:
        self._goal = seconds
        self._tokens = self._seconds = 0.0

    def add(self, tokens: int, seconds: float) -> None:
        """A step has read so many tokens of prompts."""
        self._tokens = self._tokens / 2 + tokens
        self._seconds = self._seconds / 2 + seconds

    @property
    def tokens(self) -> int | None:
        """What a step may read; None: nothing was measured so far."""
        return max(_LEAST, int(self._goal * self._tokens / self._seconds)) if self._seconds else None


class Schedule:
    """First come, first served: running requests go on, waiting ones join while there is room.

    Attributes:
        blocks: of the cache.
        waiting: requests in the order of their arrival; those that had to make room stand first.
        running: in the order in which they began.
        max_batch: requests that run at once.
        shared_tokens: of prompts, that were in the cache already; put_back: requests that had to make room.
        most: tokens of prompts in a step of several requests; None: as many as in any. One that is read alone keeps
            nobody waiting, and is read as fast as it can be.
        border: tokens beyond which a request is turned by other frequencies: it is read anew then, and shares blocks
            with those beyond alone; None: the model has one set of frequencies.
    """

    def __init__(self, blocks: int, max_batch: int, step_tokens: int, border: int | None = None) -> None:
        self.blocks = Blocks(blocks)
        self.border = border
        self.most: int | None = None
        self.max_batch, self._step_tokens = max_batch, step_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.shared_tokens = self.put_back = 0

    def note(self, request: Request, computed: int) -> None:
        """Tokens are in the cache now: blocks that became full may be shared."""
        full = computed // SIZE
        for at in range(request.computed // SIZE, full):
            self.blocks.name(request.table.ids[at], request.names(full)[at])
        request.computed = computed

    def plan(self) -> dict[Request, Row]:
        """Decide which tokens are read in this step: the next one of everybody, then of prompts what else fits."""
        rows: dict[Request, Row] = {}
        read = 0
        if self.border is not None:
            self._cross(self.border)
        answered = any(request.size - request.computed <= 1 for request in self.running)
        left = self._left(0, answered)
        for request in list(self.running):  # the oldest first; the youngest may have to make room on the way
            reading = request.size - request.computed > 1
            if not request.running or (reading and left < 1) or not self._make_room(request):
                continue
            rows[request] = self._row(request, left)
            if reading:
                read += len(rows[request].tokens)
                left = self._left(read, True)
        begun = {name for request in self.running if self.waiting for name in self._unread(request)}
        while self.waiting and left > 0 and len(self.running) < self.max_batch:
            request = self.waiting[0]
            if not self._admit(request, begun):
                break
            self.waiting.popleft()
            rows[request] = self._row(request, left)
            read += len(rows[request].tokens)
            left = self._left(read, True)
            begun.update(self._unread(request))
        return rows

    def _left(self, read: int, shared: bool) -> int:
        """Return how many tokens of prompts are still to be read in a step, which others share or not."""
        most = self._step_tokens if self.most is None or not shared else min(self.most, self._step_tokens)
        return most - read

    def _cross(self, border: int) -> None:
        """Let requests that have grown beyond the border begin again, the oldest first."""
        for request in list(reversed(self.running)):
            if request.size > border and not request.beyond:
                self.leave(request)
                request.computed = 0
                self.waiting.appendleft(request)
        for request in self.waiting:
            if request.size > border:
                request.cross()

    def _unread(self, request: Request) -> list[bytes]:
        """Names of the blocks of a prompt that will be in the cache when it is read."""
        if request.size - request.computed <= 1:
            return []
        return request.names(request.size // SIZE)[request.computed // SIZE :]

    def _row(self, request: Request, left: int) -> Row:
        start = request.computed
        end = min(request.size, start + max(1, left))
        return Row(
            request.tokens(start, end), start, request.table.ids, request.table.runs, end == request.size,
            request.place, request.size,
        )  # fmt: skip

    def _admit(self, request: Request, begun: set[bytes]) -> bool:
        """Give a waiting request its blocks, those of an equal beginning first; False: it has to wait."""
        names = request.names((request.size - 1) // SIZE)
        found = self.blocks.known(names)
        if len(found) < len(names) and names[len(found)] in begun:
            return False  # somebody is reading the same beginning: it is there in the next step
        blocks = -(-request.size // SIZE)
        if self.running and not self.blocks.room_for(found, blocks - len(found) + len(self.running)):
            return False
        self.blocks.share(request.table, found)
        self.blocks.grow(request.table, blocks, self._expected(request))
        request.computed = len(found) * SIZE
        if not request.ids:
            request.cached = request.computed
            self.shared_tokens += request.computed
        request.running = True
        self.running.append(request)
        return True

    def _expected(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.limit) // SIZE)

    def _make_room(self, request: Request) -> bool:
        """Give a running request blocks for its next tokens; the youngest make room. False: it had to itself."""
        blocks = -(-request.size // SIZE)
        while not self.blocks.grow(request.table, blocks, self._expected(request)):
            youngest = self.running[-1]
            self.leave(youngest)
            youngest.computed = 0
            self.waiting.appendleft(youngest)
            self.put_back += 1
            if youngest is request:
                return False
        return True

    def leave(self, request: Request) -> None:
        """A request goes, wherever it is; its blocks are free, or kept for those that begin alike."""
        if request.running:
            self.running.remove(request)
            self.blocks.release(request.table)
            request.running = False
        elif request in self.waiting:
            self.waiting.remove(request)
