"""No pickle of a file is read: what reads one, or might, is named here with the reason."""

from __future__ import annotations

import ast
import re

from house import tree

OWN = {"train/checkpoint/dcp_reader.py": "torch's index, with a list of the classes that it may name"}
"""Files that unpickle."""
_READERS = {
    "load", "loads", "Unpickler", "_Unpickler", "FileSystemReader", "load_state_dict_from_url", "dcp_to_torch_save",
    "load_sharded_optimizer_state_dict", "read_pickle", "PyExtensionType", "async_load",
}  # fmt: skip
_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "torch", "shelve", "marshal", "pandas"}
_WORDS = re.compile(
    r"pickle|dill|joblib|shelve|marshal|pandas|torch\.load|torch\.hub|n(p|umpy)\.load|dcp\.|FileSystemReader|weights_only"
    r"|trust_remote_code|PyExtensionType"
)
"""Files without any of them need not be parsed."""


def _find_reader(node: ast.Call) -> str:
    name = ast.unparse(node.func)
    module, _, function = name.rpartition(".")
    values = {one.arg: ast.unparse(one.value) for one in node.keywords}
    if (module.split(".")[0] in _MODULES and function in _READERS) or function == "FileSystemReader":
        return name
    if name == "dcp.load" and "storage_reader" not in values:
        return f"{name} without our storage_reader"
    if function == "load" and module in ("np", "numpy") and values.get("allow_pickle") != "False":
        return f"{name} without allow_pickle=False"
    if values.get("weights_only", "True") != "True" or values.get("trust_remote_code", "False") != "False":
        return f"{name} with an option that runs code"
    return ""


def test_only_the_index_of_a_checkpoint_is_unpickled() -> None:
    found = []
    for path in tree.sources():
        if tree.source_name(path) in OWN or not _WORDS.search(path.read_text(encoding="utf-8")):
            continue
        for node in tree.nodes(path):
            if isinstance(node, ast.Call) and (name := _find_reader(node)):
                found.append(f"{tree.name(path)}:{node.lineno} {name}")
    assert not found, f"a pickle runs code: {', '.join(found)}"


def test_the_rule_finds_what_it_forbids() -> None:
    for text in (
        "pickle.load(file)", "torch.load(path)", "torch.load(p, weights_only=False)", "np.load(path)", "joblib.load(p)",
        "FileSystemReader(path)", "dcp.load(tensors, checkpoint_id=path)", "A(p, trust_remote_code=True)",
    ):  # fmt: skip
        (node,) = (one for one in ast.walk(ast.parse(text)) if isinstance(one, ast.Call))
        assert _find_reader(node) and _WORDS.search(text), text
