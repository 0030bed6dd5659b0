"""The errors a user sees.

AnabaticError
|-- UserError          exit code 2: the user can fix it (a file, a key, a value)
|   |-- ConfigError    a recipe, an overlay or a flag
|   |-- DataError      a corpus, a conversation file, a tokenizer, a model folder
|   |   |-- ChatTemplateError    a chat template cannot write a conversation
|   |-- MultipleErrors    more than one of these
|-- Failure            exit code 1: the machine or the job failed
    |-- DeviceError    an accelerator is missing or broken
    |-- CheckpointError    a checkpoint cannot be written or read
    |-- RestartRequested    exit code 4: the same command continues in another way
"""

from __future__ import annotations

from collections.abc import Sequence

from anabatic.core.formatting import escape_control_characters

TRACEBACK_HINT = "add --debug for the traceback"
"""The hint of an unexpected error."""


MAX_MESSAGE_CHARS = 4000
"""Maximum characters of a message; the middle of a longer one is left out."""
BROKEN_DATA_ERRORS = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What Python libraries raise for damaged data besides their own errors. Caught only around a call of such a library,
never around our own code."""


class AnabaticError(Exception):
    """Base of every error raised on purpose. `str(error)` is one line with the numbers, `hint` says what to do."""

    exit_code = 1

    def __init__(self, message: str, hint: str = "") -> None:
        if len(message) > MAX_MESSAGE_CHARS:
            message = f"{message[: MAX_MESSAGE_CHARS // 2]} [...] {message[-MAX_MESSAGE_CHARS // 4 :]}"
        super().__init__(message)
        self.hint = hint

    def render(self) -> str:
        """Return the `error:` line and, when there is one, the `hint:` line."""
        lines = [f"error: {escape_control_characters(str(self))}"]
        if self.hint:
            lines.append(f"hint: {escape_control_characters(self.hint)}")
        return "\n".join(lines)


class UserError(AnabaticError):
    """The user can fix this."""

    exit_code = 2


class ConfigError(UserError):
    """A recipe, an overlay or a flag is wrong."""


class DataError(UserError):
    """A corpus, a conversation file, a tokenizer or a model folder is wrong."""


class ChatTemplateError(DataError):
    """A chat template cannot write a conversation.

    Attributes:
        reason: the message of the template; contains nothing about this machine.
    """

    reason: str = ""


class MultipleErrors(UserError):
    """Several errors reported together, most of which the user can fix."""

    def __init__(self, errors: Sequence[AnabaticError], hint: str = "") -> None:
        super().__init__("; ".join(map(str, errors)), hint)
        self.errors = errors

    def render(self) -> str:
        """Return the lines of every error and the common hint."""
        return "\n".join([*(error.render() for error in self.errors), *([f"hint: {self.hint}"] if self.hint else [])])


class Failure(AnabaticError):
    """The machine or the job failed."""


class DeviceError(Failure):
    """An accelerator is missing or broken."""


class RestartRequested(Failure):
    """The job did not work as configured; the configuration of the next attempt has been written."""

    exit_code = 4


class CheckpointError(Failure):
    """A checkpoint cannot be written or read."""
