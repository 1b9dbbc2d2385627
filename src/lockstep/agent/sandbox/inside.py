"""The program inside a sandbox of the operating system, started as `python -c` with this text.

Imports the standard library alone. Reads one JSON line per program from its input, and answers each
with one JSON line on its output. Printed text goes to its error output, with a mark after the last
of it. A program can reach all of this, so whoever reads the output must bound it and expect
silence.
"""

import ast
import builtins
import contextlib
import errno
import io
import json
import linecache
import os
import sys
import traceback
import types

NUM_FRAMES = 5
REFUSALS = (errno.EPERM, errno.EACCES, errno.EROFS, errno.EAFNOSUPPORT, errno.ENETUNREACH)
WORK_FOLDER = "/tmp"


class Printed(io.RawIOBase):
    """Passes on printed text up to the limit, and drops the rest here, where that is cheap."""

    def __init__(self, max_bytes):
        self.max_bytes = max_bytes
        self.start()

    def start(self):
        self.room, self.last = self.max_bytes, b"\n"

    def writable(self):
        return True

    def write(self, data):
        text = bytes(data)
        self.last = text[-1:] or self.last
        kept = text[: self.room]
        self.room -= len(kept)
        while kept:
            kept = kept[os.write(1, kept) :]
        return len(text)


def set_limits(order):
    """Sets hard limits, which only a privileged process could raise."""
    import resource

    for name, value in order["limits"].items():
        which = getattr(resource, "RLIMIT_" + name, None)
        if which is not None:
            resource.setrlimit(which, (value, value))


def kind_of(error):
    if isinstance(error, MemoryError):
        return "memory"
    if isinstance(error, OSError):
        path = error.filename if isinstance(error.filename, str) else ""
        outside = path.startswith("/") and not path.startswith(WORK_FOLDER + "/")
        if error.errno in REFUSALS or (error.errno == errno.ENOENT and outside):
            return "refused"
        if type(error).__name__ == "gaierror" or isinstance(error, BlockingIOError):
            return "refused"  # no network; no process
    if isinstance(error, RuntimeError) and "start new thread" in str(error):
        return "refused"
    return "error"


def run(code, space, printed):
    """Runs one program. Returns (ending, text of the error)."""
    try:
        lines = code.splitlines(keepends=True)
        linecache.cache["program.py"] = (len(code), None, lines, "program.py")
        tree = ast.parse(code, "program.py")
        last = None
        if tree.body and isinstance(tree.body[-1], ast.Expr):
            last = ast.Expression(tree.body.pop().value)
        exec(compile(tree, "program.py", "exec"), space)
        if last is not None:
            value = eval(compile(last, "program.py", "eval"), space)
            if value is not None:
                text = repr(value)
                sys.stdout.flush()
                print(text if printed.last == b"\n" else "\n" + text)
        return "ok", ""
    except SystemExit as error:
        if error.code is None or error.code == 0:
            return "ok", ""
        return "error", "SystemExit: " + str(error.code)[:200]
    except BaseException as error:
        kind = "error"
        try:
            kind = kind_of(error)
            tb = error.__traceback__
            while tb is not None and tb.tb_frame.f_code.co_filename != "program.py":
                tb = tb.tb_next
            error.__traceback__ = tb
            shown = traceback.TracebackException(
                type(error), error, tb, limit=-NUM_FRAMES, compact=True
            )
            return kind, "".join(shown.format()).rstrip()[-4000:]
        except BaseException as another:  # its __str__ raised, or no memory is left
            if isinstance(another, MemoryError):
                kind = "memory"
            return kind, type(error).__name__


def main():
    order = json.loads(sys.argv[1])
    requests, reports = os.fdopen(os.dup(0), "rb"), os.dup(1)
    os.dup2(os.open("/dev/null", os.O_RDWR), 0)
    os.dup2(2, 1)
    printed = Printed(order["output_bytes"])
    sys.stdout = sys.stderr = io.TextIOWrapper(
        io.BufferedWriter(printed), encoding="utf-8", errors="replace", line_buffering=True
    )
    sys.stdin = open(0)  # noqa: SIM115 - it stays open
    builtins.exit = builtins.quit = sys.exit  # `site` defines these, and may not have been imported
    sys.argv = ["program.py"]
    sys.path[:] = [folder for folder in sys.path if folder]  # not the folder that programs write to
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    os.chdir(WORK_FOLDER)
    set_limits(order)
    os.write(reports, b'{"ready": true}\n')
    while line := requests.readline():
        request = json.loads(line)
        printed.start()
        ending, error = run(request["code"], module.__dict__, printed)
        with contextlib.suppress(BaseException):  # closed by the program
            sys.stdout.flush()
        # ASCII: the text of an error may contain lone surrogates.
        report = json.dumps({"ending": ending, "error": error}).encode("ascii")
        with contextlib.suppress(OSError):  # closed, too
            os.write(1, b"\0END " + request["mark"].encode() + b"\n")
        os.write(reports, report + b"\n")
        if request["is_last"]:
            break
    os._exit(0)  # skips what the program registered to run at exit


main()
