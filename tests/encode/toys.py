"""Small tokenizers and chat templates made here, one for each kind that the cases speak of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from packsvc.config import PackJob
from packsvc.types import Example, ExampleKind, RawRow

IM_START, IM_END = "<|im_start|>", "<|im_end|>"

CML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""ChatML: the turn end is the EOS."""

BOS_CML = "{{ bos_token }}" + CML
"""ChatML that writes the BOS itself."""

GEM = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role'])"
    " + '\n' + m['content'] + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""The turn end is not the EOS."""

GLM = (
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)
"""No turn end: the next role marker is the stop."""

THINK = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{% set c = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{{ '<|im_start|>assistant\n' }}"
    "{% if loop.last %}{{ '<think>\n' + (m.reasoning_content or '').strip('\n') + '\n</think>\n\n' }}{% endif %}"
    "{{ c + '<|im_end|>\n' }}"
    "{% else %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Reasoning of the last answer only; an empty block where it has none."""

ALT = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""Refuses anything but user and assistant in turn."""

_MARKERS = ("<pad>", "<s>", "</s>", IM_START, IM_END, "<start_of_turn>", "<end_of_turn>")


def byte_level(
    *,
    merges: Sequence[tuple[str, str]] = (),
    special: Sequence[str] = _MARKERS,
    added: Sequence[AddedToken] = (),
    normalizer: Any = None,
    cut: bool = True,
    bos: bool = False,
    unused: int = 0,
) -> Tokenizer:
    """Byte-level BPE with 256 bytes, a few merges (written in the byte alphabet) and ids that no text has."""
    vocabulary = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for a, b in merges:
        vocabulary.setdefault(a + b, len(vocabulary))
    vocabulary |= {f"unused{i}": len(vocabulary) + i for i in range(unused)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut)
    tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    _add(tokenizer, special, added)
    if bos:
        _prepend_bos(tokenizer)
    return tokenizer


ENGLISH = [
    ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w"), ("Ġw", "o"), ("r", "l"), ("Ġ", "t"), ("Ġt", "h"),
    ("Ġth", "e"), ("Ċ", "Ċ"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("Ã", "©"), ("æ", "Ĺ"), ("æĹ", "¥"),
    ("u", "s"), ("e", "r"), (".", "m"),
]  # fmt: skip


def english(**options: Any) -> Tokenizer:
    """Byte-level BPE that merges some English, a newline with a newline, and whole characters of two or three bytes."""
    return byte_level(merges=ENGLISH, **options)


def merging() -> Tokenizer:
    """MERGE: newline + newline and "." + "m" become one token across any join."""
    return byte_level(merges=[("Ċ", "Ċ"), (".", "m")], cut=False)


def words(*, vocabulary: Sequence[str] = (), bos: bool = False, pad_is_eos: bool = False) -> Tokenizer:
    """TOY: one id a word from 10 up, BOS 1, EOS 2, PAD 0; `bos` prepends BOS in the post-processor."""
    names = ["<pad>", "<s>", "</s>", IM_START, IM_END, "<unk>", "user", "assistant", "system", "-"]
    if pad_is_eos:
        names[0] = "<unused>"
    table = {name: i for i, name in enumerate([*names, *vocabulary])}
    tokenizer = Tokenizer(models.WordLevel(vocab=table, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    _add(tokenizer, [n for n in ("<pad>", "<s>", "</s>", IM_START, IM_END) if n in table], ())
    if bos:
        _prepend_bos(tokenizer)
    return tokenizer


def gemma_like() -> Tokenizer:
    """BPE over characters with U+2581 for spaces, byte fallback, and runs of spaces as added tokens."""
    letters = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,!?\n0123456789", "\u2581", "é", "日", "\u2581t"]
    names = [*_MARKERS, "<unk>", *(f"<0x{b:02X}>" for b in range(256)), *letters, "\u2581\u2581", "th", "\u2581th"]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={name: i for i, name in enumerate(names)},
            merges=[("\u2581", "t"), ("t", "h"), ("\u2581", "th"), ("\u2581", "\u2581")],
            unk_token="<unk>",
            byte_fallback=True,
            fuse_unk=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    _add(tokenizer, _MARKERS, [AddedToken("\u2581\u2581", normalized=False)])
    return tokenizer


def llama2_like() -> Tokenizer:
    """The same alphabet with a space put before every piece of text: no byte lengths, offsets only."""
    tokenizer = gemma_like()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = None
    return tokenizer


def lower_casing() -> Tokenizer:
    """Byte-level, but the text is put in lower case first: its byte lengths are nobody's."""
    return english(normalizer=normalizers.Lowercase())


def digits_apart() -> Tokenizer:
    """Byte-level behind a pattern of its own, as most recent models have it."""
    tokenizer = english(cut=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\p{N}|[^\p{N}\s]+|\s+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    return tokenizer


def save(
    tokenizer: Tokenizer,
    folder: Path,
    *,
    template: str | None = CML,
    bos: str | None = "<s>",
    eos: str | None = IM_END,
    pad: str | None = "<pad>",
    **options: Any,
) -> str:
    """Write a tokenizer as a folder that AutoTokenizer loads; returns the folder."""
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=bos, eos_token=eos, pad_token=pad, **options
    )
    if template is not None:
        wrapped.chat_template = template
    wrapped.save_pretrained(str(folder))
    return str(folder)


def job(folder: str, **options: Any) -> PackJob:
    """A job with one source, `chat`, and no audit unless asked for."""
    options.setdefault("audit_fraction", 0)
    sources = options.pop("sources", [{"path": "data.jsonl", "name": "chat"}])
    return PackJob(tokenizer=folder, sources=sources, **options)


def chat(
    *turns: str | tuple[str, str] | Mapping[str, Any],
    row: int = 0,
    weights: Sequence[float | None] | None = None,
    tools: list[Any] | None = None,
) -> Example:
    """A conversation of user and assistant in turn; a turn may be (role, content) or a whole message."""
    messages: list[dict[str, Any]] = []
    for i, turn in enumerate(turns):
        if isinstance(turn, str):
            messages.append({"role": ("user", "assistant")[i % 2], "content": turn})
        elif isinstance(turn, tuple):
            messages.append({"role": turn[0], "content": turn[1]})
        else:
            messages.append(dict(turn))
    return Example(
        file=0,
        row=row,
        kind=ExampleKind.CHAT,
        messages=messages,
        tools=tools,
        weights=tuple(weights) if weights is not None else (None,) * len(messages),
        part_weights=(None,) * len(messages),
        raw=RawRow(file=0, row=row, record={"messages": messages}),
    )


def raw_text(text: str, *, row: int = 0) -> Example:
    """A row of raw text."""
    return Example(
        file=0, row=row, kind=ExampleKind.TEXT, text=text, raw=RawRow(file=0, row=row, record={"text": text})
    )


def _add(tokenizer: Tokenizer, special: Sequence[str], added: Sequence[AddedToken]) -> None:
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in special])
    tokenizer.add_tokens(list(added))


def _prepend_bos(tokenizer: Tokenizer) -> None:
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
