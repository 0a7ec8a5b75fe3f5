"""What the thread beside a rank sees of its sockets: real ones, in a network namespace."""

import json
import subprocess
import sys

import pytest
from rigs.netns import missing

TALK = """
import json, socket, sys
from finetune import rank_monitor

server = socket.create_server(("10.9.9.9", 0))
client = socket.create_connection(server.getsockname())
taken, _ = server.accept()
six = socket.socket(socket.AF_INET6)  # as gloo may dial an IPv4 address
six.connect(("::ffff:10.9.9.9", server.getsockname()[1]))
also, _ = server.accept()
inner = socket.create_server(("127.0.0.1", 0))
loop = socket.create_connection(inner.getsockname())
client.settimeout(3)
before, modes = rank_monitor._sending(), (client.gettimeout(), client.getblocking())
six.setblocking(False)
try:
    while True:
        six.send(bytes(1 << 16))
except BlockingIOError:
    print(json.dumps([before, rank_monitor._sending(), modes == (client.gettimeout(), client.getblocking())]))
"""


@pytest.mark.netns
def test_bytes_that_wait_are_seen_on_the_jobs_own_sockets():
    """By the other end's address, over both families, loopback left out; the sockets stay as they were."""
    if absent := missing():
        pytest.skip(absent)
    words = ["unshare", "--net", "sh", "-c", 'ip link set lo up && ip addr add 10.9.9.9/32 dev lo && exec "$@"', "sh"]
    done = subprocess.run([*words, sys.executable, "-c", TALK], capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[["10.9.9.9", False, False]], [["10.9.9.9", True, False]], True]
