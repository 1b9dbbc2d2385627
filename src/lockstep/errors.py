"""The error tree.

Every error of Lockstep derives from `LockstepError`, so one `except` catches them all, and also
from the standard type that fits, so that code without Lockstep's types still does the right
thing. Errors of what a command was given also derive from `InputError`. A message names the
expected value, the found value, the place and the next step.

    LockstepError
      ConfigError        (ValueError)    a setting is unknown, mistyped or contradicts another
      SettingError       (ConfigError)   a setting has a value that it may not have
      DataError          (ValueError)    a user's file is malformed: names the file and the line
      FieldError         (DataError)     a part of a record is wrong: names the part
      TokenError         (ValueError)    an invariant of the token forest does not hold
      AlignmentError     (ValueError)    per-token arrays that must be parallel are not
      RoutingReplayError (ValueError)    routes are missing, misshapen or of another model
      RendererError      (ValueError)    a dialogue cannot be written with this tokenizer
      CheckpointError    (ValueError)    weights are missing, misshapen, torn or of another model
      EngineError        (RuntimeError)  the engine could not carry out a request
      CapabilityError    (EngineError)   the engine lacks something that the request needs
      EngineDownError    (EngineError)   the engine is gone, frozen or sends nonsense
      ServerUnreachableError (EngineDownError)  its server is down, or the connection was lost
      ServerSilentError  (EngineDownError)  its server took a request and does not answer
      ServerRefusedError (EngineError)   its server answered that it will not
      LeaseError         (EngineError)   somebody else's weights are in the engine
      ContractError      (RuntimeError)  a promise about the numerics cannot be or was not kept
      SandboxError       (RuntimeError)  the sandbox of code tools does not work on this machine
      RolloutError       (RuntimeError)  too many episodes of a step failed
      JudgeError         (RuntimeError)  a model that judges gave no grade
      ToolServerError    (RuntimeError)  a server of tools cannot be used as it is
      ChildError         (RuntimeError)  a child process died, hangs or wrote nonsense
      ChildTimeoutError  (ChildError, TimeoutError)  a child process did not answer in time
      ChildRefusal       (ChildError)    a child process answered a request with an error
      OutOfMemoryError   (MemoryError)   a step needs more memory than there is
      RunError           (RuntimeError)  a run directory is in use, unfinished or not a run
      StorageError       (OSError)       a file of a run cannot be written: a full or broken disk
      DiskFullError      (StorageError)  a disk is full
      MismatchError      (RuntimeError)  rows of a step show a cause of a mismatch
      RankError          (RuntimeError)  processes of one run disagree, or one of them is gone
      MissingExtraError  (ImportError)   an optional package is needed: names the extra
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec

MAX_ERROR_CHARS = 2000
"""Characters of a foreign error's text that are kept."""


class LockstepError(Exception):
    """Base of every error that Lockstep raises on purpose."""


class InputError(LockstepError):
    """Base of the errors that end a command with exit code 2: what it was given is wrong, or a
    process of several is lost."""


class ConfigError(InputError, ValueError):
    """A setting is unknown, has the wrong type or contradicts another one."""


class SettingError(ConfigError):
    """A setting has a value that it may not have. The message starts with `Class.setting=`."""


class DataError(InputError, ValueError):
    """A file given by the user is malformed. The message starts with `path:line`."""


class FieldError(DataError):
    """A part of a record is wrong: names the part."""

    def __init__(self, field: str, text: str, code: str = "invalid_value") -> None:
        super().__init__(f"{field} {text}")
        self.field, self.code = field, code


class UnknownNameError(LockstepError, KeyError):
    """A metric or an entry has another name. Names the nearest."""

    __str__ = Exception.__str__  # KeyError's would quote the sentence


class TokenError(LockstepError, ValueError):
    """An invariant of the token forest does not hold. Names the segment and the token index."""


class AlignmentError(LockstepError, ValueError):
    """Arrays that must be parallel, one entry per token, are not."""


class RoutingReplayError(LockstepError, ValueError):
    """Routes that should be replayed are missing, misshapen or of another model. Names the sample,
    the positions that were found and needed, and the likely cause."""


class RendererError(InputError, ValueError):
    """A dialogue cannot be written as tokens, or the tokenizer lacks what the format needs."""


class CheckpointError(InputError, ValueError):
    """Weights or a checkpoint cannot be loaded: missing, misshapen, torn or of another model."""


class EngineError(LockstepError, RuntimeError):
    """The inference engine failed or answered something that cannot be."""


class CapabilityError(EngineError):
    """The engine lacks a capability that the request or the config needs."""


class TornWeightsError(EngineError):
    """The weights of an engine are part one version, part another: its process must end."""


class EngineDownError(EngineError):
    """The engine cannot be reached, does not answer, or sends an impossible answer. Another one may
    serve the same request; a pool takes such a replica out at once."""


class LeaseError(EngineError):
    """The engine has weights that this run did not put there. The run trains on nothing that it
    samples afterwards."""


class ServerUnreachableError(EngineDownError):
    """The server of an engine cannot be reached, or the connection was lost before the answer.
    Another replica may answer."""


class ServerSilentError(EngineDownError):
    """The server of an engine took a request and was silent for too long. Another replica may
    answer; this one may still be working on the request."""


class ServerRefusedError(EngineError):
    """The server of an engine answered with an error. The message repeats the server's text."""

    def __init__(self, message: str, *, status: int = 0) -> None:
        super().__init__(message)
        self.status = status
        """The HTTP status; 0 where the error came within a stream."""


class ContractError(LockstepError, RuntimeError):
    """Two sides that a numerics contract holds equal are not, or cannot be. Names the field with
    both values, or the first token with both log-probs."""


class SandboxError(LockstepError, RuntimeError):
    """A sandbox does not start, or its server does not answer. No program was run. Repeats the
    sandbox's own message."""


class RolloutError(LockstepError, RuntimeError):
    """Too many episodes of one step failed. Names how many, and the first reasons."""


class JudgeError(LockstepError, RuntimeError):
    """A judge model gave no grade: it cannot be reached, refuses, or its answer has no grade."""


class ToolServerError(LockstepError, RuntimeError):
    """A tool server does not start, is gone, or declares a tool that cannot be used. Names the
    server and the tool."""


class ChildError(LockstepError, RuntimeError):
    """A child process cannot be started, died, or wrote something that is no reply. Names how it
    ended and repeats the last lines that it printed."""


class ChildTimeoutError(ChildError, TimeoutError):
    """A child process did not answer within the time of the request, and was killed."""


class ChildRefusal(ChildError):
    """A child process is well and answered a request with an error. The message is its text."""

    def __init__(self, text: str, *, kind: str) -> None:
        super().__init__(text)
        self.kind = kind
        """Name of the exception's class in the child."""


class OutOfMemoryError(LockstepError, MemoryError):
    """A step needs more memory than there is. Names the settings that lower it."""


class RunError(InputError, RuntimeError):
    """A run directory is in use by another process, not a run, or cannot be resumed."""


class StorageError(LockstepError, OSError):
    """A file of a run cannot be written, also not when it is tried again: the disk is full, broken
    or read-only, or the directory is gone. Names the file and the system's reason."""


class DiskFullError(StorageError):
    """A disk is full. Names the run, and the command that continues it."""


class MismatchError(LockstepError, RuntimeError):
    """Rows of a training step show why sampler and trainer differ. Names the cause with its share
    of the gap, the tokens that prove it, and the remedy."""

    def __init__(
        self, message: str, *, cause: str, step: int, evidence: Sequence[object], remedy: str
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.step = step
        self.evidence = evidence
        """Places as `lockstep.doctor.findings.Evidence`, the strongest first."""
        self.remedy = remedy


class RankError(InputError, RuntimeError):
    """Processes that train together disagree about the run, or one of them has stopped. Names the
    difference with both values, or the stopped process and its reason."""


class MissingExtraError(InputError, ImportError):
    """An optional package is not installed. The message names the extra to install."""

    @classmethod
    def of(cls, package: str, *, extra: str, needed_for: str) -> "MissingExtraError":
        return cls(
            f"{needed_for} needs the package {package!r}, which is not installed. "
            f"Install it with: pip install 'lockstep-rl[{extra}]'"
        )


def require_package(module: str, *, extra: str, needed_for: str) -> None:
    """Raises MissingExtraError unless the package of a module is installed."""
    if find_spec(module) is None:
        package = module.replace("_", "-")
        raise MissingExtraError.of(package, extra=extra, needed_for=needed_for)


def printable(text: str) -> str:
    """Makes foreign text (of a dump, a model, a program) safe for a terminal: invisible characters,
    such as cursor movements, become escapes.

    >>> printable("all\\x1b[31m good")
    'all\\\\x1b[31m good'
    """
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text
    )


def named(error: BaseException) -> str:
    """`Type: text` of an error that foreign code raised: its text may be long, or raise itself.

    >>> named(ValueError("no such file"))
    'ValueError: no such file'
    """
    try:
        text = str(error)[:MAX_ERROR_CHARS].encode("utf-8", "backslashreplace").decode()
    except BaseException:
        text = ""
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def shortened(value: object) -> str:
    """The beginning of `repr(value)`, for an error; the name of the type if repr fails."""
    try:
        return str.__str__(repr(value))[:80].encode("utf-8", "backslashreplace").decode()
    except BaseException:
        return type(value).__name__


def is_full_disk(error: BaseException) -> bool:
    """True if a file could not be written because the disk is full. Errors of Python, Rust and
    Arrow all contain the system's words."""
    text = str(error)
    return any(words in text for words in ("No space left on device", "Disk quota exceeded"))


def is_out_of_memory(error: BaseException) -> bool:
    """True if the error is Python's or torch's out-of-memory error, on CPU or GPU."""
    is_of_torch = isinstance(error, RuntimeError) and not isinstance(error, LockstepError)
    text = str(error).lower() if is_of_torch else ""
    return isinstance(error, MemoryError) or "out of memory" in text or "allocate memory" in text


@contextmanager
def located(where: str, raised: type[LockstepError] | None = None) -> Iterator[None]:
    """Errors inside begin with `where`, and are raised as `raised`; None leaves them their type."""
    try:
        yield
    except LockstepError as error:
        raise (raised or type(error))(f"{where}: {error}") from error
