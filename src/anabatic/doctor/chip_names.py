"""Names of chips: what npu-smi and the PCI bus call them, and which operator package they need."""

from __future__ import annotations

OPS_FOLDERS: tuple[tuple[str, str], ...] = (
    ("Ascend910_95", "ascend950"),
    ("Ascend950", "ascend950"),
    ("Ascend910_9", "ascend910_93"),
    ("Ascend910B1", "ascend910b"),
    ("Ascend910B2", "ascend910b"),
    ("Ascend910B3", "ascend910b"),
    ("Ascend910B4", "ascend910b"),
    ("Ascend910", "ascend910"),
    ("Ascend310P", "ascend310p"),
    ("Ascend310B", "ascend310b"),
)
"""Start of a SoC name -> folder of its operators (opp/built-in/op_impl/ai_core/tbe/kernel of CANN 8.1.RC1)."""
OPS_FOLDERS_BY_PCI_ID: dict[str, str] = {
    "0xd801": "ascend910",
    "0xd802": "ascend910b",
    "0xd803": "ascend910_93",
    "0xd500": "ascend310p",
}
"""PCI device id -> the same (PCIE_BDF_* in the log collector of the Ascend driver package)."""
OLD_OPS_FOLDERS: dict[str, str] = {"ascend950": "ascend910_95"}
"""A folder's older name."""
INFERENCE_ONLY = ("ascend310p", "ascend310b")


def normalize_soc_name(name: str) -> str:
    """Return the SoC name of what npu-smi or torch call a chip: `910B3` -> `Ascend910B3`."""
    word = name.strip().replace(" ", "")
    return word if not word or word.startswith("Ascend") else f"Ascend{word}"


def find_ops_folder(soc_name: str) -> str:
    """Return the folder of its operators; empty when the name does not tell (npu-smi calls a 910C `Ascend910`)."""
    if soc_name == "Ascend910":
        return ""
    return next((folder for start, folder in OPS_FOLDERS if soc_name.startswith(start)), "")


def name_ops_package(folder: str, cann: tuple[int, ...] | None) -> str:
    """Return the name of the package to install: it changed with CANN 8.5."""
    short = folder.removeprefix("ascend")
    if cann is not None and cann < (8, 5):
        return f"Ascend-cann-kernels-{short}"
    return f"Ascend-cann-{short}-ops"
