"""`python server.py SOCKET PID`: imports torch and, for the first who asks, the job once; forks; ends with process PID.

What a forked process lacks of a started one: variables that a library reads while it is imported are this server's
(OMP_NUM_THREADS=1, no CUDA), and its parent is this server. A torchrun that runs here forks its ranks itself, so they
are its children. Nothing here may compute: an OpenMP pool does not survive a fork.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback

import faults
from client import NAMESPACES, SCRIPTS
from show import show

CLONE_FLAGS = {"net": 0x40000000, "mnt": 0x00020000, "uts": 0x04000000}  # linux/sched.h
PR_SET_PDEATHSIG = 1
READY = "ready"


def preload():
    """Import what costs the seconds. Raises where something has begun that no fork survives."""
    import torch
    import torch.distributed.elastic.multiprocessing.subprocess_handler.subprocess_handler
    import torch.distributed.run

    if torch.cuda.is_initialized():
        raise RuntimeError("the preload has touched CUDA")
    refuse_threads()


def preload_job():
    """Import what the fine-tune job needs, once; the job itself runs anew in each rank."""
    if "finetune.loop" in sys.modules:
        return
    import finetune.train

    for name in ("accelerate", "peft", "transformers.models.auto.modeling_auto"):
        importlib.import_module(name)
    importlib.import_module("transformers.models.llama.modeling_llama")
    del sys.modules["finetune.train"], finetune.train
    refuse_threads()
    gc.collect()
    gc.freeze()


def preload_search():
    """Import what the verb search needs, once."""
    for name in ("base.options", "cli.bench", "jobs.search", "terminal.findings"):
        importlib.import_module(f"agent.{name}")
    refuse_threads()


def refuse_threads():
    """Raise where a thread has begun, which no fork has."""
    if (threads := len(os.listdir("/proc/self/task"))) > 1:  # noqa: PTH208
        raise RuntimeError(f"the preload has started {threads - 1} threads")


def run(argv, environment, *, forked_ranks):
    """Be `python argv[1:]`, with this environment; never returns."""
    code = 1
    try:
        os.environ.clear()
        os.environ.update(environment)
        show(argv, environment)
        tempfile.tempdir = None
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for path in reversed([p for p in environment.get("PYTHONPATH", "").split(os.pathsep) if p]):
            sys.path.insert(0, path)
        sys.executable = argv[0]
        customise(environment)
        if forked_ranks:
            fork_ranks()
        words = [word for word in argv[1:] if word not in ("-u", "-P")]
        # the server's own streams remember what kind of file it had
        sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", 1, closefd=False)
        sys.stderr = os.fdopen(2, "w", 1, errors="backslashreplace", closefd=False)
        if words[:2] == ["-m", "collectives.bench.rank"] and faults.VARIABLE in environment:
            faults.install()
        if words[0] == "-m":
            sys.path.insert(0, os.getcwd())  # noqa: PTH109
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, os.path.dirname(words[0]))  # noqa: PTH120
            sys.argv = words
            # Referenced until os._exit: freeing DDP's Reducer joins gloo's threads, which may wait for the GIL
            script_globals = runpy.run_path(words[0], run_name="__main__")  # noqa: F841
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print(error.code, file=sys.stderr)
    except BaseException as error:  # noqa: BLE001 - as the interpreter does
        sys.last_value = error  # where the rank monitor finds it
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()
            atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)


def customise(environment):
    """Start the monitor where a started interpreter would: in sitecustomize of agent/jobs/autostart, on the path."""
    if "TOPOFLIGHT_RUN" not in environment or "autostart" not in environment.get("PYTHONPATH", ""):
        return
    import sitecustomize
    import torch.distributed

    c10d = torch.distributed.distributed_c10d  # imported before, so that the hook on its import has not run
    # Of a rank, torchrun has wrapped it already: two monitors would write the same file.
    c10d.init_process_group = vars(c10d).setdefault("_init_before", c10d.init_process_group)
    sitecustomize._wrap(c10d)
    torch.distributed.init_process_group = c10d.init_process_group


class Forked:
    """What torchrun uses of subprocess.Popen, of a rank that it forks."""

    def __init__(self, args, env, stdout, stderr):
        """Fork it, in a separate session, without the files of torchrun."""
        sys.stdout.flush()
        sys.stderr.flush()
        self.args, self.returncode = args, None
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            for stream, number in ((stdout, 1), (stderr, 2)):
                if stream is not None:
                    os.dup2(stream.fileno(), number)
            os.closerange(3, 4096)
            run(args, env, forked_ranks=False)

    def poll(self):
        """Give the exit code, None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout=None):
        """Wait for its end. Raises subprocess.TimeoutExpired."""
        ended = threading.Event()
        waited = 0.0
        while self.poll() is None:
            if timeout is not None and waited >= timeout:
                raise subprocess.TimeoutExpired(self.args, timeout)
            ended.wait(0.02)
            waited += 0.02
        return self.returncode


def fork_ranks():
    """Let torchrun of this process fork the ranks that it would start with its own interpreter."""
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler as theirs

    started = theirs.SubprocessHandler._popen

    def popen(self, args, env):
        if args[0] == sys.executable:
            return Forked(args, env, self._stdout, self._stderr)
        return started(self, args, env)

    theirs.SubprocessHandler._popen = popen


def take(line):
    """Read a request and its files from a client."""
    size, files, _, _ = socket.recv_fds(line, 4, 3 + len(NAMESPACES))
    text = b""
    while len(text) < int.from_bytes(size, "big"):
        text += line.recv(65536)
    return json.loads(text), files


def start(request, files, keep):
    """Fork the process that a client asked for; returns its pid."""
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    try:
        libc = ctypes.CDLL(None, use_errno=True)
        libc.prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)
        os.setsid()
        for number, descriptor in enumerate(files[:3]):
            os.dup2(descriptor, number)
        for name, descriptor in zip(NAMESPACES, files[3:], strict=True):
            other = os.fstat(descriptor).st_ino != os.stat(f"/proc/self/ns/{name}").st_ino  # noqa: PTH116
            if other and libc.setns(descriptor, CLONE_FLAGS[name]):
                raise OSError(ctypes.get_errno(), f"setns({name})")
        os.closerange(3, 4096)
        os.chdir(request["cwd"])
    except BaseException:  # noqa: BLE001 - it must not go on as a second server
        traceback.print_exc()
        os._exit(1)
    run(request["argv"], request["env"], forked_ranks=True)
    return 0


def serve(place, owner):
    """Fork for clients until the owner has ended."""
    preload()
    gc.collect()
    gc.freeze()
    door = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    door.bind(place)
    door.listen(64)
    print(READY, flush=True)
    events = selectors.DefaultSelector()
    events.register(door, selectors.EVENT_READ)
    events.register(os.pidfd_open(owner), selectors.EVENT_READ, "owner")
    clients = {}  # pid by the line that asked for it
    while True:
        for key, _ in events.select():
            if key.data == "owner":
                return
            if key.fileobj is door:
                line, _ = door.accept()
                request, files = take(line)
                if "finetune.train" in request["argv"] or request["argv"][1].endswith(SCRIPTS):
                    preload_job()
                elif "agent.cli" in request["argv"]:
                    preload_search()
                pid = start(request, files, clients)
                for descriptor in files:
                    os.close(descriptor)
                clients[line] = pid
                events.register(line, selectors.EVENT_READ, "client")
                events.register(os.pidfd_open(pid), selectors.EVENT_READ, line)
            elif key.data == "client":
                line = key.fileobj
                numbers = line.recv(256)
                for number in numbers.split() or [signal.SIGKILL]:
                    os.kill(clients[line], int(number))
                if not numbers:
                    events.unregister(line)
            else:
                line = key.data
                events.unregister(key.fileobj)
                os.close(key.fileobj)
                _, status = os.waitpid(clients.pop(line), 0)
                with contextlib.suppress(OSError):
                    line.sendall(b"%d\n" % status)
                with contextlib.suppress(KeyError):
                    events.unregister(line)
                line.close()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]))
    shutil.rmtree(os.path.dirname(sys.argv[1]), ignore_errors=True)  # noqa: PTH120
