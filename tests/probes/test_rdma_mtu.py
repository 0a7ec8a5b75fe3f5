"""InfiniBand's MTU comes from libibverbs, which may not answer; RoCE's from its netdev."""

from __future__ import annotations

import errno
from typing import Any

import pytest
from dicthost import DictHost
from rigs.tables import each_row
from test_rdma_probe import Fabric

from probes.host.live import LiveHost
from probes.rdma import probe as rdma
from probes.rdma.read import roce_mtu


class Library(DictHost):
    """A libibverbs that answers about ports as it is told."""

    port: Any = None

    def verbs(self, what: str, *arguments: Any) -> Any:
        """What was given for a port."""
        if what != "port":
            return super().verbs(what, *arguments)
        if isinstance(self.port, OSError):
            raise self.port
        return self.port


@each_row(
    ("answer", "expected"),
    [
        ({"active_mtu": 5, "max_mtu": 5, "active_width": 2, "active_speed": 128}, 4096),
        ({"active_mtu": 4}, 2048),
        ({"active_mtu": 0}, None),
        ({}, None),
        (None, None),
        (OSError(errno.EIO, "no answer"), None),
    ],
)
@each_row("layer", ["InfiniBand", "Ethernet"])
def test_what_the_library_says(answer: Any, expected: int | None, layer: str) -> None:
    host: Any = Fabric().add("mlx5_0", 0, layer=layer).host(register_limit_bytes=1 << 40)
    host.__class__ = Library
    host.port = answer
    port = rdma.read(host).devices[0].ports[0]
    if layer == "InfiniBand":
        assert port.active_mtu_bytes == expected
    else:
        assert port.active_mtu_bytes == roce_mtu(port.netdev_mtu_bytes), "the library is not asked"


def test_the_path_of_the_networks_annotation_is_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOPOFLIGHT_NETWORK_STATUS", "/etc/podinfo/network-status")
    monkeypatch.setenv("TOPOFLIGHT_NETWORK_STATUS_TOKEN", "x")
    environment = LiveHost().environment()
    assert environment["TOPOFLIGHT_NETWORK_STATUS"] == "/etc/podinfo/network-status"
    assert "TOPOFLIGHT_NETWORK_STATUS_TOKEN" not in environment
