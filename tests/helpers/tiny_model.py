"""A language model of a few megabytes that calls a tool once and then answers, for servers of local models.

It is a Llama whose attention does nothing: each token has one successor, in a table of weights. The chat template ends
the prompt with one token where a call is due, and with another where the result of the tool stands, and from there the
successors spell the call or the answer. So real servers load, run, parse and stream it as any other model.
"""

from __future__ import annotations

import json
import struct
from array import array
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

__all__ = ["ANSWER", "TEMPLATE", "write_gguf", "write_transformers"]

ANSWER = "It is sunny in Paris."

_CALL_DUE, _ANSWER_DUE, _END = "<|call_due|>", "<|answer_due|>", "<|im_end|>"

_CALL = ("<tool_call>", '\n{"name": "weather", ', '"arguments": ', '{"city": ', '"Paris"}}', "\n</tool_call>")
_WORDS = ("It ", "is ", "sunny ", "in ", "Paris.")

_TEXTS = (_CALL_DUE, *_CALL, _ANSWER_DUE, *_WORDS)

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- "# Tools\\n\\nYou are provided with function signatures within <tools></tools> XML tags:\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools>\\n\\nFor each function call, return a json object with function name and arguments within " }}
    {{- "<tool_call></tool_call> XML tags:\\n<tool_call>\\n{\\"name\\": <function-name>, \\"arguments\\": " }}
    {{- "<args-json-object>}\\n</tool_call><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' + (message.content or '') }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function is defined %}
                {%- set tool_call = tool_call.function %}
            {%- endif %}
            {{- '<tool_call>\\n{"name": "' + tool_call.name + '", "arguments": ' }}
            {{- tool_call.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if messages[-1].role == "tool" %}
        {{- '<|answer_due|>' }}
    {%- else %}
        {{- '<|call_due|>' }}
    {%- endif %}
{%- endif %}
"""
"""That of Qwen 2.5, shortened, with a token at its end that says what is due."""

_WIDTH, _HIDDEN, _HEADS = 512, 32, 4
_STRENGTH = 10.0


class _Vocabulary:
    """Its tokens: special ones, every byte, and the parts of the call and of the answer."""

    def __init__(self) -> None:
        self.tokens = ["<unk>", "<s>", _END, "<|im_start|>", *(f"<0x{n:02X}>" for n in range(256)), *_TEXTS]
        special = {"<unk>": 2, "<s>": 3, _END: 3, "<|im_start|>": 3, _CALL_DUE: 3, _ANSWER_DUE: 3}
        self.types = [special.get(each, 6 if each.startswith("<0x") else 4) for each in self.tokens]

    def successors(self) -> list[int]:
        """The token after each token."""
        end = self.tokens.index(_END)
        following = dict.fromkeys(range(len(self.tokens)), end)
        for chain in ((_CALL_DUE, *_CALL), (_ANSWER_DUE, *_WORDS)):
            for one, next_ in pairwise(chain):
                following[self.tokens.index(one)] = self.tokens.index(next_)
        return list(following.values())


def write_gguf(path: Path) -> None:
    """Write the model as llama.cpp reads it (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""
    vocabulary = _Vocabulary()
    tokens, size = vocabulary.tokens, len(vocabulary.tokens)
    embedding, output = array("f", bytes(4 * size * _WIDTH)), array("f", bytes(4 * size * _WIDTH))
    for token, following in enumerate(vocabulary.successors()):
        embedding[token * _WIDTH + token] = 1.0
        output[following * _WIDTH + token] = _STRENGTH
    ones = array("f", [1.0] * _WIDTH)
    square, up = array("f", bytes(4 * _WIDTH * _WIDTH)), array("f", bytes(4 * _WIDTH * _HIDDEN))
    tensors: list[tuple[str, tuple[int, ...], array[float]]] = [
        ("token_embd.weight", (_WIDTH, size), embedding),
        ("output_norm.weight", (_WIDTH,), ones),
        ("output.weight", (_WIDTH, size), output),
        ("blk.0.attn_norm.weight", (_WIDTH,), ones),
        *((f"blk.0.attn_{name}.weight", (_WIDTH, _WIDTH), square) for name in ("q", "k", "v", "output")),
        ("blk.0.ffn_norm.weight", (_WIDTH,), ones),
        ("blk.0.ffn_gate.weight", (_WIDTH, _HIDDEN), up),
        ("blk.0.ffn_up.weight", (_WIDTH, _HIDDEN), up),
        ("blk.0.ffn_down.weight", (_HIDDEN, _WIDTH), up),
    ]
    facts = [
        _text("general.architecture", "llama"),
        _text("general.name", "tiny"),
        _number("llama.context_length", 8192),
        _number("llama.embedding_length", _WIDTH),
        _number("llama.block_count", 1),
        _number("llama.feed_forward_length", _HIDDEN),
        _number("llama.attention.head_count", _HEADS),
        _number("llama.attention.head_count_kv", _HEADS),
        _number("llama.rope.dimension_count", _WIDTH // _HEADS),
        _number("llama.vocab_size", size),
        _key("llama.attention.layer_norm_rms_epsilon") + struct.pack("<If", 6, 1e-5),
        _text("tokenizer.ggml.model", "llama"),
        _array("tokenizer.ggml.tokens", 8, [_string(each) for each in tokens]),
        _array("tokenizer.ggml.scores", 6, [struct.pack("<f", 0.0)] * size),
        _array("tokenizer.ggml.token_type", 5, [struct.pack("<i", each) for each in vocabulary.types]),
        _number("tokenizer.ggml.unknown_token_id", 0),
        _number("tokenizer.ggml.bos_token_id", 1),
        _number("tokenizer.ggml.eos_token_id", 2),
        _key("tokenizer.ggml.add_bos_token") + struct.pack("<I?", 7, False),
        _key("tokenizer.ggml.add_space_prefix") + struct.pack("<I?", 7, False),
        _text("tokenizer.chat_template", TEMPLATE),
    ]
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts)) + b"".join(facts)
    at = 0
    for name, shape, values in tensors:
        head += _string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, at)
        at += _padded(4 * len(values))
    with path.open("wb") as file:
        file.write(head.ljust(_padded(len(head)), b"\0"))
        for _, _, values in tensors:
            data = values.tobytes()
            file.write(data.ljust(_padded(len(data)), b"\0"))


def write_transformers(folder: Path) -> None:
    """Write the model as transformers reads it, into a folder: as one of Qwen's, whose calls its server parses."""
    vocabulary = _Vocabulary()
    size = len(vocabulary.tokens)
    embedding, output, ones = array("f", bytes(4 * size * _WIDTH)), array("f", bytes(4 * size * _WIDTH)), [1.0] * _WIDTH
    for token, following in enumerate(vocabulary.successors()):
        embedding[token * _WIDTH + token] = 1.0
        output[following * _WIDTH + token] = _STRENGTH
    layer, square, bias = "model.layers.0.", array("f", bytes(4 * _WIDTH * _WIDTH)), array("f", bytes(4 * _WIDTH))
    narrow = array("f", bytes(4 * _WIDTH * _HIDDEN))
    tensors: dict[str, tuple[tuple[int, ...], array[float]]] = {
        "model.embed_tokens.weight": ((size, _WIDTH), embedding),
        "model.norm.weight": ((_WIDTH,), array("f", ones)),
        "lm_head.weight": ((size, _WIDTH), output),
        **{f"{layer}self_attn.{name}_proj.weight": ((_WIDTH, _WIDTH), square) for name in "qkvo"},
        **{f"{layer}self_attn.{name}_proj.bias": ((_WIDTH,), bias) for name in "qkv"},
        **{f"{layer}mlp.{name}_proj.weight": ((_HIDDEN, _WIDTH), narrow) for name in ("gate", "up")},
        f"{layer}mlp.down_proj.weight": ((_WIDTH, _HIDDEN), narrow),
        **{f"{layer}{name}_layernorm.weight": ((_WIDTH,), array("f", ones)) for name in ("input", "post_attention")},
    }
    header: dict[str, Any] = {}
    at = 0
    for name, (shape, values) in tensors.items():
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [at, at := at + 4 * len(values)]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for _, values in tensors.values():
            file.write(values.tobytes())
    config: dict[str, Any] = {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "vocab_size": size, "hidden_size": _WIDTH,
        "intermediate_size": _HIDDEN, "num_hidden_layers": 1, "num_attention_heads": _HEADS,
        "num_key_value_heads": _HEADS, "max_position_embeddings": 8192, "tie_word_embeddings": False,
        "bos_token_id": 1, "eos_token_id": 2, "dtype": "float32",
    }  # fmt: skip
    added = [
        {"id": n, "content": each, "special": kind == 3, "single_word": False, "lstrip": False, "rstrip": False,
         "normalized": False}
        for n, (each, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)) if kind in (3, 4)
    ]  # fmt: skip
    letters = [_byte_letter(n) for n in range(256)]
    vocab = {
        letters[int(each[3:5], 16)] if each.startswith("<0x") else each: n for n, each in enumerate(vocabulary.tokens)
    }
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "unk_token": None, "merges": [], "vocab": vocab},
    }  # fmt: skip
    details = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": _END, "unk_token": "<unk>"}
    for name, value in {
        "config.json": config,
        "generation_config.json": {"eos_token_id": 2, "do_sample": False},
        "tokenizer.json": tokenizer,
        "tokenizer_config.json": {**details, "clean_up_tokenization_spaces": False},
    }.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(TEMPLATE)


def _byte_letter(byte: int) -> str:
    """The letter for a byte in vocabularies like that of GPT-2: itself if it can be printed, else one after U+0100."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    if byte in printable:
        return chr(byte)
    return chr(256 + [n for n in range(256) if n not in printable].index(byte))


def _padded(size: int) -> int:
    return -(-size // 32) * 32


def _string(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


_key = _string


def _text(key: str, value: str) -> bytes:
    return _key(key) + struct.pack("<I", 8) + _string(value)


def _number(key: str, value: int) -> bytes:
    return _key(key) + struct.pack("<II", 4, value)


def _array(key: str, kind: int, items: Sequence[bytes]) -> bytes:
    return _key(key) + struct.pack("<IIQ", 9, kind, len(items)) + b"".join(items)
