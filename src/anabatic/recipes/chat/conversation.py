"""The conversation of `anabatic chat`: its answers, what is said of them, and the file that keeps them."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator
from typing import Any

from anabatic.core import log
from anabatic.core.json_reader import JsonlWriter
from anabatic.infer.dialogue import Dialogue
from anabatic.infer.tool_execution import format_for_display


class ChatSession:
    """A dialogue, and where its messages are written."""

    def __init__(self, dialogue: Dialogue, journal: JsonlWriter | None) -> None:
        self.dialogue = dialogue
        self.journal = journal
        self.over = False

    def write_answer(self, text: str) -> None:
        """Write the answer to `text` while it is made, then its length and speed to stderr.

        Raises:
            DataError: the text is too long.
        """
        self._write_stream(self.dialogue.answer_message(text))
        question = self.dialogue.messages[-2] if len(self.dialogue.messages) > 1 else {"content": text}
        seen = {"images": question["images"]} if question.get("images") else {}
        self.append_message("user", question["content"], **seen)
        self.append_message("assistant", self.dialogue.messages[-1]["content"])

    def regenerate_answer(self) -> None:
        """Write another answer to the last message.

        Raises:
            DataError: there is no message.
        """
        self._write_stream(self.dialogue.regenerate_answer())
        self.append_message("assistant", self.dialogue.messages[-1]["content"], regenerated=True)

    def _write_stream(self, pieces: Generator[str, None, None]) -> None:
        began, stopped = time.perf_counter(), False
        try:
            for piece in pieces:
                sys.stdout.write(format_for_display(piece))
                sys.stdout.flush()
        except KeyboardInterrupt:
            stopped = True
        finally:
            pieces.close()
        sys.stdout.write("\n")
        sys.stdout.flush()
        self._log_generation_stats(time.perf_counter() - began, stopped)

    def close(self) -> None:
        """Close the journal."""
        if self.journal is not None:
            self.journal.close()

    def _log_generation_stats(self, seconds: float, stopped: bool) -> None:
        request = self.dialogue.request
        if request is None:
            return
        if self.dialogue.num_dropped:
            log.info(
                f"(the {self.dialogue.num_dropped} oldest messages were dropped: "
                f"{self.dialogue.engine.max_len} tokens of context are full)"
            )
        ends = {"length": f", cut at {len(request.ids)} tokens", "cancelled": ", stopped"}
        end = ", stopped" if stopped else ends.get(request.finish_reason, "")
        log.info(f"({len(request.ids)} tokens, {len(request.ids) / max(seconds, 1e-9):.1f} tok/s{end})")

    def append_message(self, role: str, content: str, **more: Any) -> None:
        """Append a message to the journal, where there is one."""
        if self.journal is not None:
            self.journal.write({"role": role, "content": content, **more})
