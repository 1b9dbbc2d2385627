"""What runs without torch, and on systems without POSIX' modules: asked in processes of their own.

Windows and macOS are not at hand. Here their missing modules and functions are taken away.
"""

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "lockstep"
MODULES = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)
ARE_ELSEWHERE = re.compile(
    r"lockstep\.(envs\.\w+\.child|agent\.sandbox\.inside|engines\.vllm\.(?!local|wire|served)\w+)"
)
"""Programs of sandboxes and other environments, and what runs inside of vLLM."""

WINDOWS = """
import asyncio, concurrent.futures, importlib, multiprocessing, os, signal, socketserver, ssl
import subprocess, sys, tempfile, torch, numpy, pyarrow.parquet, rich.console, aiohttp
import transformers.modeling_utils
POSIX = {"fcntl", "resource", "pwd", "grp", "termios", "pty", "tty", "syslog"}

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name in POSIX:
            raise ImportError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refuse())
for name in POSIX:
    sys.modules.pop(name, None)
for name in ("fork", "killpg", "setsid", "getuid", "sched_getaffinity", "memfd_create", "pread",
             "pwrite", "posix_fallocate", "mkfifo"):
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGALRM"):
    delattr(signal, name)
"""

NO_TORCH = """
import sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("torch is not to be imported here", name=name)

sys.meta_path.insert(0, Refuse())
"""


def run(program, *, cwd=None):
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=cwd)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_module_can_be_imported_without_the_modules_and_functions_of_posix():
    modules = [name for name in MODULES if not ARE_ELSEWHERE.fullmatch(name)]
    out = run(
        f"{WINDOWS}\nfailed = []\nfor name in {modules}:\n"
        "    try:\n        importlib.import_module(name)\n"
        "    except Exception as error:\n"
        "        if type(error).__name__ != 'MissingExtraError' and 'triton' not in str(error):\n"
        "            failed.append(f'{name}: {type(error).__name__}: {error}')\n"
        "print('\\n'.join(failed))"
    )
    assert out.strip() == ""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only glibc's malloc is told")
@pytest.mark.parametrize("variable, is_kept", [("OTHER", True), ("MALLOC_ARENA_MAX", False)])
def test_a_block_that_was_freed_stays_with_the_process(variable, is_kept):
    """Its pages stay resident; with the user's own settings of malloc, the system has them back."""
    out = run(
        f"import os\nos.environ = {{{variable!r}: '1'}}\n"
        """
import numpy as np, resource
from lockstep.system import keep_freed_memory
keep_freed_memory()
resident_bytes = lambda: int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()
before = resident_bytes()
np.ones(1 << 24)
print(resident_bytes() - before)
"""
    )
    assert (int(out) > 2**26) == is_kept


def test_a_run_directory_has_one_writer_without_posix_too(tmp_path):
    """The lock of Windows is its C runtime's; a module of that name stands in for it."""
    out = run(
        WINDOWS
        + """
import types
held = set()

def locking(fd, mode, count):
    place = (os.fstat(fd).st_ino, os.lseek(fd, 0, os.SEEK_CUR), count)
    assert mode == 2 and place[1] == 1 << 30
    if place in held:
        raise OSError(36, "Resource deadlock avoided")
    held.add(place)

sys.modules["msvcrt"] = types.SimpleNamespace(locking=locking, LK_NBLCK=2)
from pathlib import Path
from lockstep.errors import RunError
from lockstep.store.files import hold_lock, is_locked
place = Path("lock")
with hold_lock(place):
    assert is_locked(place)
    try:
        with hold_lock(place):
            print("two writers")
    except RunError as error:
        print(error)
"""
        , cwd=tmp_path,
    )  # fmt: skip
    assert "is in use by process" in out and "two writers" not in out


@pytest.mark.parametrize(
    "words",
    [
        ["doctor", "example"],
        ["render", "tiny-qwen3", "messages.json"],
        ["recipes"],
        ["train", "quickstart", "--dry-run"],
        ["train", "quickstart", "--help"],
        ["report", "run"],
    ],
)
def test_these_commands_need_no_torch(words, tmp_path):
    (tmp_path / "messages.json").write_text('[{"role": "user", "content": "Hello"}]')
    if words[0] == "report":
        run(
            "from lockstep.cli import main\nassert main(['train', 'quickstart', 'steps=1', "
            "'groups_per_step=1', 'group_size=2', 'evaluation.num_tasks=1', 'out=run', '--json', "
            "'checkpoint.every=0', 'evaluation.at_start=false']) == 0",
            cwd=tmp_path,
        )
    out = run(f"{NO_TORCH}\nfrom lockstep.cli import main\nprint(main({words}))", cwd=tmp_path)
    assert out.splitlines()[-1] == ("1" if words[0] == "doctor" else "0")


def test_the_doctor_reads_dumps_of_trainers_without_torch(tmp_path):
    run(
        f"{NO_TORCH}\nfrom lockstep.doctor import inputs\nfrom lockstep.doctor.diagnose import "
        "diagnose\nimport lockstep\nfrom pathlib import Path\n"
        "dump = Path(lockstep.__file__).parent / 'doctor' / 'example.parquet'\n"
        "assert diagnose(dump).outcome == 'differs'\n"
        "from lockstep.agent.gateway.config import GatewayConfig\n"
        "from lockstep.renderers.harmony import HarmonyRenderer\n"
        "from lockstep.store.run import load_run"
    )
