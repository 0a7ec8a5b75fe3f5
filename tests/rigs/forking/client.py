"""The interpreter of the stand-in environment: `python -m torch.distributed.run ...` is forked, not started.

The server runs it with this process's streams, folder, environment and namespaces. This process passes signals on,
ends as the forked process ends, and takes it along when it is killed. Everything else runs in the real interpreter.
"""

import json
import os
import signal
import socket
import sys

HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib takes longer than all of this
FORKED = (
    "torch.distributed.run", "finetune.train", "collectives.search.rank", "collectives.search.coordinator",
    "collectives.bench.calibrate",
)  # fmt: skip
SCRIPTS = ("/equivalence_ranks.py", "/fake_ranks.py", "/loading_ranks.py", "/limited_job.py")
NAMESPACES = ("net", "mnt", "uts")
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def is_forked(words):
    """Whether these are torchrun, the job, the verb search, or a script of tests/finetune that forks ranks."""
    name, *more = words or [""]
    if name == "-m" and more:
        return more[0] in FORKED or more[:2] == ["agent.cli", "search"]
    return name.endswith(SCRIPTS)


def become(real, name, words):
    """Be the real interpreter, which calls itself by the stand-in's name and finds its environment."""
    os.execv(real, [name, *words])  # noqa: S606


def main(real, place, name, words):
    """Ask for a fork, and wait for its end."""
    if not is_forked(words):
        become(real, name, words)
    sys.path.insert(0, HERE)
    from show import show

    request = {"argv": [name, *words], "env": dict(os.environ), "cwd": os.getcwd()}  # noqa: PTH109
    line = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    line.connect(place)
    files = [0, 1, 2, *(os.open(f"/proc/self/ns/{one}", os.O_RDONLY | os.O_CLOEXEC) for one in NAMESPACES)]
    for number in PASSED_ON:
        signal.signal(number, lambda got, _frame: line.sendall(b"%d\n" % got))
    show([f"client of {name}", *words[:2]], {})  # not a second process of the run: the product would end both
    text = json.dumps(request).encode()
    socket.send_fds(line, [len(text).to_bytes(4, "big")], files)
    line.sendall(text)
    for descriptor in files:
        os.close(descriptor)  # the forked process alone holds the ends of pipes
    told = b""
    while not told.endswith(b"\n"):
        if not (piece := line.recv(64)):
            sys.stderr.write(f"the forking server has died: see the log next to {place}\n")
            os._exit(70)
        told += piece
    status = int(told)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status))
