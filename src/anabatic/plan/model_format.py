"""The error for a path that is not a model folder: which format it has, and how to get a model folder."""

from __future__ import annotations

from pathlib import Path

from anabatic.core.errors import DataError

_OTHER_FORMATS = (".safetensors", ".bin", ".pt", ".pth")


def describe_wrong_model(root: Path) -> DataError:
    """Return the error for a path that exists and is not a model folder."""
    files = [root] if root.is_file() else sorted(root.glob("*.gguf"))[:1]
    gguf = next((file for file in files if file.suffix.lower() == ".gguf"), None)
    if gguf is not None:
        load_call = f"[c.from_pretrained({str(gguf.parent)!r}, gguf_file={gguf.name!r}).save_pretrained('FOLDER')"
        return DataError(
            f"{gguf} is a GGUF file, which is written and not read here: models are folders with config.json,"
            " tokenizer.json and .safetensors",
            "give the folder that it was made of; or make one: pip install gguf; python -c "
            f'"from transformers import *; {load_call} for c in (AutoModelForCausalLM, AutoTokenizer)]"',
        )
    if root.is_file():
        has_config = (root.parent / "config.json").is_file()
        description = "the weights alone" if root.suffix.lower() in _OTHER_FORMATS else "a file"
        hint = (
            f"give its folder: {root.parent}" if has_config else "give the folder with config.json and tokenizer.json"
        )
        return DataError(f"{root} is {description}; a model is a folder", hint)
    return DataError(
        f"{root} holds no config.json or adapter_config.json, and no best_model or final_model either",
        "give a Hugging Face folder, or let the run finish (the same command continues it)",
    )
