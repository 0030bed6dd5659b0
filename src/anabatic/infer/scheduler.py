"""Plan the tokens that each request reads in the next step; a request without room waits."""

from __future__ import annotations

from collections import deque

from anabatic.infer.block_pool import BLOCK_SIZE, BlockPool
from anabatic.infer.request import Request
from anabatic.models.kv_cache import CacheRow

_MIN_PROMPT_TOKENS = 64
"""Tokens of prompts that are read in a step beside others, however slow the device is."""


class PromptPace:
    """Measure the prompt tokens read in a given time, from the latest steps; the latest count most.

    Args:
        seconds: that a step of several requests should take.
    """

    def __init__(self, seconds: float) -> None:
        self._target_seconds = seconds
        self._tokens = self._seconds = 0.0

    def add_step(self, tokens: int, seconds: float) -> None:
        """A step has read so many tokens of prompts."""
        self._tokens = self._tokens / 2 + tokens
        self._seconds = self._seconds / 2 + seconds

    @property
    def max_prompt_tokens(self) -> int | None:
        """Limit of a step; None before the first measurement."""
        return (
            max(_MIN_PROMPT_TOKENS, int(self._target_seconds * self._tokens / self._seconds)) if self._seconds else None
        )


class RequestScheduler:
    """First come, first served: running requests continue, waiting ones join while there is room.

    Attributes:
        block_pool: of the cache.
        waiting: requests in the order of their arrival; those that had to make room stand first.
        running: in the order in which they began.
        max_batch: requests that run at once.
        shared_tokens: of prompts, that were in the cache already; preemptions: requests that had to make room.
        max_shared_prompt_tokens: tokens of prompts in a step of several requests; None: as many as in any. One that is
            read alone keeps nobody waiting, and is read as fast as it can be.
        rope_border: tokens beyond which a request is turned by other frequencies: it is read again then, and shares
            blocks with those beyond alone; None: the model has one set of frequencies.

    Args:
        shares_blocks: requests that begin alike share the blocks of their beginning; False: layers keep a state, which
            is not among them.
    """

    def __init__(
        self, blocks: int, max_batch: int, step_tokens: int, border: int | None = None, shares_blocks: bool = True
    ) -> None:
        self.block_pool = BlockPool(blocks)
        self._shares_blocks = shares_blocks
        self._free_slots = list(reversed(range(max_batch)))
        self.rope_border = border
        self.max_shared_prompt_tokens: int | None = None
        self.max_batch, self._step_tokens = max_batch, step_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.shared_tokens = self.preemptions = 0

    def mark_computed(self, request: Request, computed: int) -> None:
        """Tokens are in the cache now: blocks that became full may be shared."""
        full = computed // BLOCK_SIZE if self._shares_blocks else 0
        for at in range(request.computed_tokens // BLOCK_SIZE, full):
            self.block_pool.register_hash(request.block_table.block_ids[at], request.block_hashes(full)[at])
        request.computed_tokens = computed

    def plan_step(self) -> dict[Request, CacheRow]:
        """Decide which tokens are read in this step: the next one of everybody, then of prompts what else fits."""
        rows: dict[Request, CacheRow] = {}
        read = 0
        if self.rope_border is not None:
            self._requeue_beyond_border(self.rope_border)
        answered = any(request.num_tokens - request.computed_tokens <= 1 for request in self.running)
        left = self._remaining_prompt_tokens(0, answered)
        for request in list(self.running):  # the oldest first; the youngest may have to make room on the way
            reading = request.num_tokens - request.computed_tokens > 1
            if not request.is_running or (reading and left < 1) or not self._ensure_blocks(request):
                continue
            rows[request] = self._make_row(request, left)
            if reading:
                read += len(rows[request].tokens)
                left = self._remaining_prompt_tokens(read, True)
        started_blocks = {
            name for request in self.running if self.waiting for name in self._unread_block_hashes(request)
        }
        while self.waiting and left > 0 and len(self.running) < self.max_batch:
            request = self.waiting[0]
            if not self._admit_request(request, started_blocks):
                break
            self.waiting.popleft()
            rows[request] = self._make_row(request, left)
            read += len(rows[request].tokens)
            left = self._remaining_prompt_tokens(read, True)
            started_blocks.update(self._unread_block_hashes(request))
        return rows

    def _remaining_prompt_tokens(self, read: int, shared: bool) -> int:
        """Return how many tokens of prompts are still to be read in a step, which others share or not."""
        max_tokens = (
            self._step_tokens
            if self.max_shared_prompt_tokens is None or not shared
            else min(self.max_shared_prompt_tokens, self._step_tokens)
        )
        return max_tokens - read

    def _requeue_beyond_border(self, border: int) -> None:
        """Let requests that have grown beyond the border begin again, the oldest first."""
        for request in list(reversed(self.running)):
            if request.num_tokens > border and not request.is_beyond_border:
                self.remove_request(request)
                request.computed_tokens = 0
                self.waiting.appendleft(request)
        for request in self.waiting:
            if request.num_tokens > border:
                request.mark_beyond_border()

    def _unread_block_hashes(self, request: Request) -> list[bytes]:
        """Names of the blocks of a prompt that will be in the cache when it is read."""
        if request.num_tokens - request.computed_tokens <= 1 or not self._shares_blocks:
            return []
        return request.block_hashes(request.num_tokens // BLOCK_SIZE)[request.computed_tokens // BLOCK_SIZE :]

    def _make_row(self, request: Request, left: int) -> CacheRow:
        start = request.computed_tokens
        end = min(request.num_tokens, start + max(1, left))
        return CacheRow(
            request.slice_tokens(start, end),
            start,
            request.block_table.block_ids,
            request.block_table.runs,
            end == request.num_tokens,
            request.adapter_index,
            request.num_tokens,
            request.state_slot,
            request.pictures,
        )

    def _admit_request(self, request: Request, started_blocks: set[bytes]) -> bool:
        """Give a waiting request its blocks, those of an equal beginning first; False: it has to wait."""
        names = request.block_hashes((request.num_tokens - 1) // BLOCK_SIZE) if self._shares_blocks else []
        found = self.block_pool.find_cached_prefix(names)
        if len(found) < len(names) and names[len(found)] in started_blocks:
            return False  # somebody is reading the same beginning: it is there in the next step
        blocks = -(-request.num_tokens // BLOCK_SIZE)
        if self.running and not self.block_pool.has_room_for(found, blocks - len(found) + len(self.running)):
            return False
        self.block_pool.share_blocks(request.block_table, found)
        self.block_pool.grow_table(request.block_table, blocks, self._expected_blocks(request))
        request.computed_tokens = len(found) * BLOCK_SIZE
        if not request.ids:
            request.cached_tokens = request.computed_tokens
            self.shared_tokens += request.computed_tokens
        request.is_running = True
        request.state_slot = self._free_slots.pop()
        self.running.append(request)
        return True

    def _expected_blocks(self, request: Request) -> int:
        return -(-(len(request.prompt) + request.max_answer_tokens) // BLOCK_SIZE)

    def _ensure_blocks(self, request: Request) -> bool:
        """Give a running request blocks for its next tokens; the youngest make room. False: it had to itself."""
        blocks = -(-request.num_tokens // BLOCK_SIZE)
        while not self.block_pool.grow_table(request.block_table, blocks, self._expected_blocks(request)):
            youngest = self.running[-1]
            self.remove_request(youngest)
            youngest.computed_tokens = 0
            self.waiting.appendleft(youngest)
            self.preemptions += 1
            if youngest is request:
                return False
        return True

    def remove_request(self, request: Request) -> None:
        """A request goes, wherever it is; its blocks are free, or kept for those that begin alike."""
        if request.is_running:
            self.running.remove(request)
            self.block_pool.release_table(request.block_table)
            request.is_running = False
            self._free_slots.append(request.state_slot)
        elif request in self.waiting:
            self.waiting.remove(request)
