"""Runs a Python program written by a model, in a process of its own with limits, and says whether it passed its test.

    passed, reason = run(program, test, seconds=10)

A guard process (this file, started with `python -I`) forks the program and outlives it. The program has a temporary folder of its own
that is deleted, and limits on time, memory of a process, processes, open files, size of files and output; if the guard is root, it runs
as nobody. What it started is killed when it ends or its time does. Two modes, of which `mode()` tells:

    namespaces   Linux, where the kernel allows them: no network, no signals to other processes, nothing to write on but its folder
    limits       elsewhere: Python's own sockets are refused, files are protected by the user's rights alone, and off Linux a process
                 that left the program's group is not found

It passes only if it reaches the end of its test: an exit code, whatever it is, is no pass. This stops mistakes (endless loops, files
deleted, calls home), not an attacker: the program may read what you can read, and code that sets out to fake a pass can find the secret
word in the memory of its own process.
"""

import ctypes
import json
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import time
import types
from contextlib import suppress
from pathlib import Path

# Of Linux, which Python 3.11 has no names for: unshare(2), prctl(2), mount_setattr(2), capset(2).
NEWNS, NEWIPC, NEWUSER, NEWPID, NEWNET = 0x00020000, 0x08000000, 0x10000000, 0x20000000, 0x40000000
SET_PDEATHSIG, SET_KEEPCAPS, SET_CHILD_SUBREAPER, SET_NO_NEW_PRIVS = 1, 8, 36, 38
MOUNT_SETATTR, RECURSIVE, RDONLY = 442, 0x8000, 1
PRIVATE_ALL, NOSUID_NODEV = 1 << 14 | 1 << 18, 2 | 4  # of mount(2)
CAP_VERSION_3, DAC_READ_SEARCH = 0x20080522, 2
NOBODY = 65534
LIMITS = {"memory_mb": 1024, "processes": 32, "open_files": 64, "folder_mb": 64, "output_kb": 256}


def run(program: str, test: str = "", seconds: float = 10.0, namespaces: bool = True, **limits) -> tuple[bool, str]:
    """(passed, reason): whether `program` and then `test` ran to their end. reason: passed | timed out | the error's last line | ...

    limits: other values for those in LIMITS. namespaces False: as on a system that has none.
    """
    answer = ask_guard({"program": program, "test": test, "seconds": seconds, "limits": LIMITS | limits, "namespaces": namespaces})
    return answer["passed"], answer["reason"]


def mode() -> str:
    """namespaces | limits. Raises UserError where programs cannot run at all."""
    from model import UserError

    if not hasattr(os, "fork"):
        raise UserError(f"model-written programs need os.fork, which {sys.platform} has not; run them on Linux, macOS or WSL")
    answer = ask_guard({"program": "import heapq, decimal, socket", "test": "", "seconds": 30.0, "limits": LIMITS, "namespaces": True})
    if not answer["passed"]:
        raise UserError(f"model-written programs cannot run here ({answer['reason']}). As root, Python's own library must lie where "
                        f"everybody may read, not only root: it is in {os.path.dirname(os.__file__)}")
    return answer["mode"]


def ask_guard(ask: dict) -> dict:
    bare = {name: os.environ[name] for name in ("LD_LIBRARY_PATH",) if name in os.environ}  # Python may need it; of our secrets none
    with tempfile.TemporaryDirectory(prefix="mars-program-", ignore_cleanup_errors=True) as folder:
        text = json.dumps(ask | {"folder": folder})
        try:
            guard = subprocess.run([sys.executable, "-I", __file__], input=text, capture_output=True, text=True, encoding="utf-8",
                                   timeout=ask["seconds"] + 60, env=bare)
        except subprocess.TimeoutExpired:
            return {"passed": False, "reason": "could not be stopped"}
    if guard.returncode < 0:
        return {"passed": False, "reason": "ended its guard"}
    if guard.returncode:
        raise RuntimeError(f"the guard of model-written code failed: {guard.stderr[-500:]}")
    return json.loads(guard.stdout)


# ------------------------------------------------------------------------------------- in the guard, a process of its own


def can_isolate(folder: str, limits: dict) -> bool:
    """Whether isolate() works here, tried in a process that then ends: half of it would be worse than none."""
    pid = os.fork()
    if pid == 0:
        worked = False
        with suppress(OSError):
            worked = isolate(folder, limits)
        os._exit(0 if worked else 1)
    return os.waitpid(pid, 0)[1] == 0


def isolate(folder: str, limits: dict) -> bool:
    """For the children to come: no network, no signals to others, nothing to write on but `folder`. False where that is not to be had."""
    libc, root = ctypes.CDLL(None), os.geteuid() == 0
    ids = (("uid_map", os.getuid()), ("gid_map", os.getgid()))
    if libc.unshare(NEWNET | NEWPID | NEWIPC | NEWNS | (0 if root else NEWUSER)):
        return False
    if not root:  # in the new user namespace everyone is called as before
        Path("/proc/self/setgroups").write_text("deny")
        for name, n in ids:
            Path(f"/proc/self/{name}").write_text(f"{n} {n} 1")
    rdonly = (ctypes.c_uint64 * 4)(RDONLY, 0, 0, 0)
    return not (libc.mount(b"none", b"/", None, PRIVATE_ALL, None)
                or libc.syscall(MOUNT_SETATTR, -100, b"/", RECURSIVE, ctypes.byref(rdonly), ctypes.sizeof(rdonly))
                or libc.mount(b"tmpfs", folder.encode(), b"tmpfs", NOSUID_NODEV, f"size={limits['folder_mb']}m,mode=777".encode()))


def refuse_sockets(event: str, args) -> None:
    if event.startswith("socket."):
        raise PermissionError(f"no network: {event}")


def confine(folder: str, seconds: float, limits: dict) -> None:
    """In the child, before any of the program runs: its folder, its limits, and nobody's rights instead of root's."""
    import resource

    os.setsid()
    os.chdir(folder)
    mb = 2**20
    for name, value in (("CPU", int(seconds) + 1), ("AS", limits["memory_mb"] * mb), ("FSIZE", limits["folder_mb"] * mb),
                        ("NOFILE", limits["open_files"]), ("CORE", 0), ("NPROC", limits["processes"])):  # fmt: skip
        with suppress(ValueError, OSError):  # a system without this limit, or with a lower one
            resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (value, value))
    os.environ.clear()
    os.environ.update(HOME=folder, TMPDIR=folder, PATH="/usr/bin:/bin")
    sys.addaudithook(refuse_sockets)
    if sys.platform == "linux":
        libc = ctypes.CDLL(None)
        keep = 1 << DAC_READ_SEARCH if os.geteuid() == 0 else 0  # Python's own library may lie where only root can read
        if keep:
            libc.prctl(SET_KEEPCAPS, 1, 0, 0, 0)
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        for caps in (keep, 0):  # a container may not have the first to give
            if libc.capset((ctypes.c_uint32 * 2)(CAP_VERSION_3, 0), (ctypes.c_uint32 * 6)(caps, caps)) == 0:
                break
        libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def child(ask: dict, folder: str, word: str, result: int, output: int) -> None:
    """The program's process. Writes to `result`: the word after the whole test, else the error's last line. Never returns."""
    try:
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        confine(folder, ask["seconds"], ask["limits"])
        module = sys.modules["program"] = types.ModuleType("program")  # not __main__: what a script does when started is not wanted
        exec(compile(ask["program"], "<program>", "exec"), vars(module))
        exec(compile(ask["test"], "<test>", "exec"), vars(module))
        os.write(result, word.encode())
    except SystemExit as e:
        os.write(result, f"left with exit code {e.code}"[:500].encode())
    except BaseException as e:
        with suppress(BaseException):
            last = (str(e).strip().splitlines() or [""])[-1]
            os.write(result, f"{type(e).__name__}: {last}"[:500].encode("utf-8", "replace"))
    finally:
        os._exit(0)


def kill_all(pid: int) -> None:
    """Kill the program and all it started: with namespaces the kernel does it, without them orphans come to the guard one by one."""
    with suppress(OSError):
        os.killpg(pid, signal.SIGKILL)
    with suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            gone, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if gone == 0:
            for each in children():
                with suppress(OSError):
                    os.kill(each, signal.SIGKILL)
            time.sleep(0.005)


def children() -> list[int]:
    """Processes whose parent is this one."""
    with suppress(OSError):
        return [int(p) for p in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()]
    return []


def watch(pid: int, result: int, output: int, ask: dict) -> str:
    """What the program wrote to `result`, or why it was stopped. Its output is read and dropped, up to the limit."""
    end, said, printed = time.monotonic() + ask["seconds"], b"", 0
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select([result, output], [], [], left)
        if result in ready:
            if not (piece := os.read(result, 1000)):  # every process that could write has ended
                break
            said += piece
            break
        if output in ready:
            piece = os.read(output, 65536)
            printed += len(piece)
            if printed > ask["limits"]["output_kb"] * 1024:
                return "printed too much"
            if not piece:  # closed: only the result can still come
                ready, _, _ = select.select([result], [], [], max(0, end - time.monotonic()))
                said = os.read(result, 1000) if ready else b""
                if not ready:
                    return "timed out"
                break
    else:
        return "timed out"
    return said.decode("utf-8", "replace") or "ended without reaching the end of its test"


def guard() -> None:
    ask = json.loads(sys.stdin.read())
    word, folder = secrets.token_hex(16), ask["folder"]
    if os.geteuid() == 0:
        os.chmod(folder, 0o777)  # for nobody
    isolated = False
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # orphaned grandchildren become the guard's children
        isolated = ask["namespaces"] and can_isolate(folder, ask["limits"]) and isolate(folder, ask["limits"])
    result, result_end = os.pipe()
    output, output_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(result)
        os.close(output)
        child(ask, folder, word, result_end, output_end)
    os.close(result_end)
    os.close(output_end)
    reason = watch(pid, result, output, ask)
    kill_all(pid)
    said = "passed" if reason == word else reason.replace(word, "")
    print(json.dumps({"passed": reason == word, "reason": said, "mode": "namespaces" if isolated else "limits"}))


if __name__ == "__main__":
    guard()
