"""The write loop's choices and errors that need no RDMA device; the traffic itself runs on the Soft-RoCE guests."""

from __future__ import annotations

import socket
import threading
from typing import Any

import pytest

from collectives.bench.rdma_queue import Endpoint, GidEntry, RdmaError, choose_gid
from collectives.bench.rdma_write import Plan, main, serve

LINK_LOCAL, IPV4 = "fe80::5054:ff:fe77:200", "::ffff:192.168.77.1"
TABLE = [
    GidEntry(index=0, gid=LINK_LOCAL, roce_v2=False),
    GidEntry(index=1, gid=LINK_LOCAL, roce_v2=True),
    GidEntry(index=2, gid=IPV4, roce_v2=False),
    GidEntry(index=3, gid=IPV4, roce_v2=True),
]
ENDPOINT: dict[str, Any] = {
    "queue_pair": 17, "packet_sequence": 5, "gid": IPV4, "lid": 0, "mtu_code": 3, "key": 9, "address": 1 << 40,
    "length": 4096,
}  # fmt: skip


def test_the_gid_is_ipv4_of_roce_v2_where_there_is_one() -> None:
    assert choose_gid(TABLE, None, ethernet=True, where="mlx5_0:1").index == 3
    assert choose_gid(TABLE[:3], None, ethernet=True, where="mlx5_0:1").index == 1
    assert choose_gid(TABLE, None, ethernet=False, where="mlx5_0:1").index == 0
    assert choose_gid(TABLE, 2, ethernet=True, where="mlx5_0:1").index == 2


def test_no_fitting_gid_is_said() -> None:
    with pytest.raises(RdmaError, match="mlx5_0:1 has no RoCE v2 GID"):
        choose_gid([TABLE[0]], None, ethernet=True, where="mlx5_0:1")
    with pytest.raises(RdmaError, match=r"--gid-index 9: mlx5_0:1 has no such GID; allowed: \[0, 1, 2, 3\]"):
        choose_gid(TABLE, 9, ethernet=True, where="mlx5_0:1")


@pytest.mark.parametrize(
    "wrong",
    [{"bytes": 0}, {"depth": 1025}, {"bytes": 1 << 30, "depth": 2}, {"rounds": 0}, {"bytes": 1.5}, {"depth": True}],
)
def test_a_plan_has_bounds(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="is not allowed; allowed"):
        Plan(**wrong)


@pytest.mark.parametrize(
    "wrong", [{"queue_pair": 1 << 24}, {"gid": "x"}, {"mtu_code": 9}, {"key": -1}, {"address": 1.5}, {"lid": None}]
)
def test_an_endpoint_from_the_wire_is_checked(wrong: dict[str, Any]) -> None:
    assert Endpoint(**ENDPOINT).queue_pair == 17
    with pytest.raises(ValueError):
        Endpoint(**{**ENDPOINT, **wrong})


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (b'{"protocol": 9}\n', "protocol 9 is not allowed"),
        (b'{"protocol": 1, "bytes": 99999999999, "depth": 1}\n', "bytes=99999999999 is not allowed"),
        (b'{"protocol": 1}\n', "asks for what is not allowed"),
        (b"GET / HTTP/1.1\r\n", "another protocol"),
        (b"[]\n", "another protocol"),
        (b"x" * 20000, "ended the connection"),
        (b'{"error": "node7: memlock"}\n', "the other side: node7: memlock"),
    ],
)
def test_a_target_takes_no_nonsense(line: bytes, told: str) -> None:
    def speak(port: int) -> None:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            try:
                connection.recv(4096)
            except ConnectionResetError:
                return

    with socket.create_server(("127.0.0.1", 0)) as listener:
        speaker = threading.Thread(target=speak, args=(listener.getsockname()[1],))
        speaker.start()
        with pytest.raises(RdmaError, match=told):
            serve(listener, timeout_seconds=30)
        speaker.join()


def test_nobody_there_is_an_error_and_not_a_wait_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as kept:  # and not listened on: nobody else can take the port meanwhile
        kept.bind(("127.0.0.1", 0))
        port = kept.getsockname()[1]
        assert main(["--connect", f"127.0.0.1:{port}", "--timeout", "0.2"]) == 1
    assert f"--connect 127.0.0.1:{port}: [Errno 111]" in capsys.readouterr().err
