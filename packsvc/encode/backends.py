"""What turns texts into ids: the tokenizer's own backend, or a faster one that was seen to give equal ids.

The truth is `AutoTokenizer(...).backend_tokenizer`. fastokens and gigatoken (optional extra `fast`) are some 40 times
as fast and are made from the truth's own `to_str()`, never from the file, since transformers may have changed what
the file says. The first of them that gives the truth's ids on every probe is used; where each differs on a probe, or
cannot read the tokenizer, the truth is. A call that one refuses is answered by the truth, since the ids are the same.

All give two flat buffers; no list of ids outlives the row it belongs to.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatIds:
    """Ids of S texts back to back."""

    ids: NDArray[np.int32]
    """(N,)"""
    offsets: NDArray[np.int64]
    """(S + 1,), the last is N."""


class Backend(Protocol):
    """Texts to ids, exactly as the tokenizer's own backend does."""

    @property
    def name(self) -> str:
        """Name and version of the library."""

    def encode(self, texts: Sequence[str], *, special: bool = False) -> FlatIds:
        """Encode each text; `special` adds the special tokens that the tokenizer adds to plain text."""


class TruthBackend:
    """`tokenizers`, the library that defines the ids."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    @property
    def name(self) -> str:
        return f"tokenizers {version('tokenizers')}"

    def encode(self, texts: Sequence[str], *, special: bool = False) -> FlatIds:
        flat, ends = array("i"), array("q", [0])
        for encoding in self._backend.encode_batch_fast(list(texts), add_special_tokens=special):
            flat.extend(encoding.ids)
            ends.append(len(flat))
        return FlatIds(ids=np.frombuffer(flat, np.int32), offsets=np.frombuffer(ends, np.int64))


class FastokensBackend:
    """fastokens: byte-level BPE and its kin in Rust, two buffers for a whole batch."""

    def __init__(self, definition: str, *, truth: TruthBackend) -> None:
        self._truth = truth
        self._tokenizer = import_module("fastokens").Tokenizer.from_json_str(definition)

    @property
    def name(self) -> str:
        return f"fastokens {version('fastokens')}"

    def encode(self, texts: Sequence[str], *, special: bool = False) -> FlatIds:
        try:
            ids, offsets = self._tokenizer.encode_batch_flat(list(texts), add_special_tokens=special)
        except Exception:  # match limits of its regex engine, texts it cannot take: the truth has the same ids
            return self._truth.encode(texts, special=special)
        return FlatIds(ids=np.frombuffer(ids, np.int32), offsets=np.frombuffer(offsets, np.int64))


class GigatokenBackend:
    """gigatoken: BPE in Rust with a cache of words; it reads fewer kinds of tokenizers than fastokens."""

    def __init__(self, definition: str, *, truth: TruthBackend) -> None:
        self._truth = truth
        self._tokenizer = import_module("gigatoken").Tokenizer.from_json(definition)

    @property
    def name(self) -> str:
        return f"gigatoken {version('gigatoken')}"

    def encode(self, texts: Sequence[str], *, special: bool = False) -> FlatIds:
        if special or not texts:  # it adds no special tokens
            return self._truth.encode(texts, special=special)
        try:
            layout = self._tokenizer.encode_batch(list(texts), parallel=False).layout
            ids, offsets = np.asarray(layout.content), np.asarray(layout.offsets, np.int64)
        except Exception:
            return self._truth.encode(texts, special=special)
        return FlatIds(ids=ids[offsets[0] : offsets[-1]].astype(np.int32), offsets=offsets - offsets[0])


FAST: tuple[type[FastokensBackend | GigatokenBackend], ...] = (FastokensBackend, GigatokenBackend)
"""In the order in which they are tried."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BackendChoice:
    """The backend of a job and, for people, why it is this one."""

    backend: Backend
    why: str


def choose_backend(truth: Any, *, definition: str, probes: Sequence[str]) -> BackendChoice:
    """The fastest backend whose ids equal the truth's on every probe, with and without special tokens.

    Args:
        truth: The tokenizer's own backend.
        definition: Its `to_str()`.
        probes: Strings to compare on.
    """
    own = TruthBackend(truth)
    why = []
    for kind in FAST:
        library = kind.__name__.removesuffix("Backend").lower()
        try:
            fast = kind(definition, truth=own)
        except ImportError:
            why.append(f"{library} is not installed (pip install packsvc[fast])")
            continue
        except BaseException as error:  # a tokenizer it cannot read; its Rust panics are no Exception
            if isinstance(error, (KeyboardInterrupt, SystemExit, GeneratorExit)):
                raise
            why.append(f"{library} cannot read this tokenizer: {str(error).splitlines()[0] if str(error) else kind}")
            continue
        other = first_difference(own, fast, probes)
        if other is None:
            found = f"{fast.name}, ids equal to {own.name} on {len(probes)} probes"
            return BackendChoice(backend=fast, why="; ".join([found, *why]))
        why.append(f"{fast.name} gives other ids for {other!r:.80}")
    return BackendChoice(backend=own, why="; ".join([own.name, *why]))


def first_difference(one: Backend, other: Backend, probes: Sequence[str]) -> str | None:
    """The first probe for which two backends give different ids; None when there is none."""
    for special in (False, True):
        a, b = one.encode(probes, special=special), other.encode(probes, special=special)
        for i, probe in enumerate(probes):
            if not np.array_equal(a.ids[a.offsets[i] : a.offsets[i + 1]], b.ids[b.offsets[i] : b.offsets[i + 1]]):
                return probe
    return None


PROBES = (
    "",
    " ",
    "a",
    "\n",
    "\n\n\n   \n\t x",
    "Hello, world! It's 10:45 p.m., isn't it? I'LL say so.",
    "   three spaces, then   three more   ",
    "1234567890 3.14159 1,000,000 ½ ² ٣٤٥ ४५",
    "e\u0301 n\u0303o A\u030a \u1100\u1161\u11a8 \u212b \ufb01 \u1e9b\u0323 q\u0307\u0323",
    "日本語のテキスト。中文，한국어 ไทยภาษา हिन्दी العربية עברית Ελληνικά Русский",
    "👩\u200d👩\u200d👧\u200d👦 🇩🇪 👍🏽 \u2764\ufe0f",
    "\u0000\u0001\u0007\u001b[0m\u007f\u0080\u00a0\u00ad\u2028\u2029\ufeff\ufffd\ufffe\U0010ffff",
    "\u2581\u2581 literal \u2581 marks",
    "def f(x: int) -> str:\r\n\treturn f'{x!r:>10}'  # ünï\r\n\r\n",
    '{"name": "f", "arguments": {"a": [1, 2.5, null], "b": "\\u00e9\\n"}}',
    "<think>\nso\n</think>\n\n<tool_call>\n{}\n</tool_call><|im_end|>\n<|endoftext|></s><s>[INST] <unk><pad>",
    "https://example.org/a_b-c?d=e&f=%20g#h ~/x/y.z C:\\w\\",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "________________================----------------################" + " " * 70 + "." * 70,
    "x" + "\u0300" * 40 + " \u0041\u0300\u0301\u0302",
)
"""Strings of many kinds on which a fast backend must agree before it is used."""
