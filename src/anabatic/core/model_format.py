"""What stands where a model folder is expected: weights in another form are named, and how to come to a folder."""

from __future__ import annotations

from pathlib import Path

from anabatic.core.errors import DataError

_OTHER_FORMATS = (".safetensors", ".bin", ".pt", ".pth")


def describe_wrong_model(root: Path) -> DataError:
    """Return the error for a place that exists and is no model folder."""
    files = [root] if root.is_file() else sorted(root.glob("*.gguf"))[:1]
    gguf = next((one for one in files if one.suffix.lower() == ".gguf"), None)
    if gguf is not None:
        again = f"[c.from_pretrained({str(gguf.parent)!r}, gguf_file={gguf.name!r}).save_pretrained('FOLDER')"
        return DataError(
            f"{gguf} is a GGUF file, which is written and not read here: models are folders with config.json,"
            " tokenizer.json and .safetensors",
            "give the folder that it was made of; or make one: pip install gguf; python -c "
            f'"from transformers import *; {again} for c in (AutoModelForCausalLM, AutoTokenizer)]"',
        )
    if root.is_file():
        beside = (root.parent / "config.json").is_file()
        what = "the weights alone" if root.suffix.lower() in _OTHER_FORMATS else "a file"
        hint = f"give its folder: {root.parent}" if beside else "give the folder with config.json and tokenizer.json"
        return DataError(f"{root} is {what}; a model is a folder", hint)
    return DataError(
        f"{root} holds no config.json or adapter_config.json, and no best_model or final_model either",
        "give a Hugging Face folder, or let the run finish (the same command continues it)",
    )
