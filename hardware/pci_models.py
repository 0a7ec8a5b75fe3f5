"""NVIDIA GPUs by PCI device id, for sources that name no model: sysfs without a driver, NCCL XML.

Source: the PCI ID repository (pci-ids.ucw.cz, snapshot of 2026-08-22) for the names; NVIDIA's CUDA GPUs page for the
compute capabilities.
"""

from __future__ import annotations

NVIDIA = 0x10DE

_MODELS: dict[int, tuple[str, tuple[int, int]]] = {
    0x15F7: ("Tesla P100 PCIe 12GB", (6, 0)),
    0x15F8: ("Tesla P100 PCIe 16GB", (6, 0)),
    0x15F9: ("Tesla P100 SXM2 16GB", (6, 0)),
    0x1DB1: ("Tesla V100 SXM2 16GB", (7, 0)),
    0x1DB4: ("Tesla V100 PCIe 16GB", (7, 0)),
    0x1DB5: ("Tesla V100 SXM2 32GB", (7, 0)),
    0x1DB6: ("Tesla V100 PCIe 32GB", (7, 0)),
    0x1DB8: ("Tesla V100 SXM3 32GB", (7, 0)),
    0x1E02: ("TITAN RTX", (7, 5)),
    0x20B0: ("A100 SXM4 40GB", (8, 0)),
    0x20B1: ("A100 PCIe 40GB", (8, 0)),
    0x20B2: ("A100 SXM4 80GB", (8, 0)),
    0x20B3: ("A100-SXM-64GB", (8, 0)),
    0x20B5: ("A100 PCIe 80GB", (8, 0)),
    0x20B7: ("A30 PCIe", (8, 0)),
    0x20BD: ("A800 SXM4 40GB", (8, 0)),
    0x20F1: ("A100 PCIe 40GB", (8, 0)),
    0x20F3: ("A800-SXM4-80GB", (8, 0)),
    0x20F5: ("A800 80GB PCIe", (8, 0)),
    0x2230: ("RTX A6000", (8, 6)),
    0x2235: ("A40", (8, 6)),
    0x2236: ("A10", (8, 6)),
    0x2237: ("A10G", (8, 6)),
    0x2321: ("H100L 94GB", (9, 0)),
    0x2322: ("H800 PCIe", (9, 0)),
    0x2324: ("H800", (9, 0)),
    0x2329: ("H20", (9, 0)),
    0x2330: ("H100 SXM5 80GB", (9, 0)),
    0x2331: ("H100 PCIe", (9, 0)),
    0x2335: ("H200 SXM 141GB", (9, 0)),
    0x2339: ("H100 SXM5 94GB", (9, 0)),
    0x233B: ("H200 NVL", (9, 0)),
    0x2342: ("GH200 120GB / 480GB", (9, 0)),
    0x2348: ("GH200 144G HBM3e", (9, 0)),
    0x2684: ("GeForce RTX 4090", (8, 9)),
    0x26B5: ("L40", (8, 9)),
    0x26B9: ("L40S", (8, 9)),
    0x27B8: ("L4", (8, 9)),
    0x2901: ("B200", (10, 0)),
    0x2941: ("HGX GB200", (10, 0)),
    0x2B85: ("GeForce RTX 5090", (12, 0)),
}


def model_of(vendor_id: int | None, device_id: int | None) -> tuple[str | None, tuple[int, int] | None]:
    """(model, compute capability) of a GPU by its ids, (None, None) where the table does not know it."""
    if vendor_id != NVIDIA or device_id not in _MODELS:
        return None, None
    return _MODELS[device_id]
