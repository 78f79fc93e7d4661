"""The tokenizer of a job: loaded, identified, and never trusted further than its own backend.

`AutoTokenizer(...).backend_tokenizer` is the truth for ids, not the files: transformers rebuilds some tokenizers
from vocabulary and merges and leaves parts of `tokenizer.json` out. Whatever else makes ids is made from the
backend's own `to_str()`. A hub id is resolved to a commit once, and read from that snapshot.

Price: seconds and some hundred MB for a large vocabulary, once for each process. Nothing here renders or encodes.
"""

from __future__ import annotations

import fnmatch
import hashlib
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import orjson

from packsvc.config import PackJob
from packsvc.errors import EncodeError
from packsvc.types import TokenizerFacts

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
"""What shapes ids and renders. Weights are never among them."""

_PROBES = (
    "",
    "a",
    " ",
    "\n\n",
    "Hello, world!",
    " leading and trailing ",
    "The year 2024, 3.14159, 1,234,567 and 0x7f.",
    "don't we'll I'M",
    "tabs\tand\r\nlines\n\n\n  indented",
    "naïve façade, Ĳsselmeer, straße",
    "e\u0301 A\u030a \u1100\u1161 \ufb01 \u2126",
    "日本語のテキスト。中文，한국어 ไทย हिन्दी العربية עברית",
    "👩\u200d👩\u200d👧 🇩🇪 👍🏽",
    "def f(x):\n    return {'a': [1, 2, 3]}\n",
    "\u0000\u0007\u00ad\ufeff\u200b\u2581\ufffd",
    "<s></s><unk><pad><|endoftext|><|im_start|>user\nhi<|im_end|>\n<think>\n</think>",
)

# A reasoning tag, special or not, is something an assistant says, and so is a tag in a pair (<tool_call>).
_REASONING_TAG = re.compile(r"[<\[]/?\w*(?:think|thought|reason)\w*[>\]]", re.IGNORECASE)
_PLAIN_TAG = re.compile(r"<(/?)([\w:-]+)>")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedTokenizer:
    """A tokenizer that can give exact ids, and what identifies it."""

    tokenizer: Any
    """transformers' tokenizer; its `chat_template` is the job's."""
    backend: Any
    """`tokenizers.Tokenizer`, the truth for ids; without padding or truncation."""
    definition: str
    """`backend.to_str()`, from which other libraries, and twins of the backend, are made."""
    template: str | None
    """Jinja source; None when neither the job nor the tokenizer has one."""
    control_tokens: tuple[str, ...]
    """Special tokens and turn markers that the template writes; sorted."""
    facts: TokenizerFacts
    """`stop_ids` empty and `backend` the truth's, until the audit and the backend probe have run."""


def load_tokenizer(job: PackJob, *, revision: str | None = None) -> LoadedTokenizer:
    """Load the tokenizer that a job names.

    Args:
        job: Gives `tokenizer`, `revision` and `chat_template`.
        revision: A commit that stands in for `job.revision`, so that workers read what the driver read.

    Raises:
        EncodeError: It cannot be read, is not a fast tokenizer, or its template is not one template.
    """
    folder, commit = _folder(job, revision)
    tokenizer = _read(job.tokenizer, folder)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise EncodeError(
            f"tokenizer {job.tokenizer!r} ({type(tokenizer).__name__}) is a slow tokenizer without a `tokenizers` "
            "backend, so exact token offsets cannot be had. Use a folder with a tokenizer.json."
        )
    if getattr(backend.model, "dropout", None):
        raise EncodeError(
            f"tokenizer {job.tokenizer!r} cuts at random (BPE dropout {backend.model.dropout:g}), so equal rows would "
            "get other tokens each time. Set model.dropout to null in its tokenizer.json."
        )
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = bool(getattr(tokenizer, "split_special_tokens", False))
    files = _file_hashes(folder)
    template = _own_template(tokenizer, job.tokenizer)
    if job.chat_template is not None:
        data = _read_template(job)
        template = data.decode("utf-8")
        tokenizer.chat_template = template
        files[job.chat_template] = hashlib.sha256(data).hexdigest()
    facts = TokenizerFacts(
        id=job.tokenizer,
        revision=commit,
        fingerprint=fingerprint(tokenizer),
        files_sha256=files,
        template_sha256=hashlib.sha256((template or "").encode("utf-8", "surrogatepass")).hexdigest(),
        vocab_size=1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1),
        pad_id=_pad_id(tokenizer),
        stop_ids=[],
        backend=f"tokenizers {version('tokenizers')}",
    )
    return LoadedTokenizer(
        tokenizer=tokenizer,
        backend=backend,
        definition=backend.to_str(),
        template=template,
        control_tokens=control_tokens(backend, template or "", getattr(tokenizer, "chat_control_tokens", None) or ()),
        facts=facts,
    )


def fingerprint(tokenizer: Any) -> str:
    """Identify what a tokenizer does: sha256 of its vocabulary, its added tokens and its ids of fixed strings.

    The same before and after `save_pretrained`, which rewrites the files. Takes a transformers tokenizer with a
    `tokenizers` backend, or that backend.
    """
    backend = getattr(tokenizer, "backend_tokenizer", tokenizer)
    digest = hashlib.sha256()
    vocabulary = backend.get_vocab(with_added_tokens=True)
    digest.update(orjson.dumps([(text, vocabulary[text]) for text in sorted(vocabulary)]))
    added = backend.get_added_tokens_decoder()
    digest.update(orjson.dumps([[i, added[i].content, added[i].special] for i in sorted(added)]))
    ids = [backend.encode(probe, add_special_tokens=False).ids for probe in _PROBES]
    digest.update(orjson.dumps(ids))
    return digest.hexdigest()


def read_fingerprint(name: str) -> str:
    """The fingerprint of the tokenizer in a folder or on the hub. Raises EncodeError when it cannot be read."""
    return fingerprint(_read(name, name))


def control_tokens(backend: Any, template: str, declared: Iterable[str] = ()) -> tuple[str, ...]:
    """The tokens that mean something to the chat format when they are typed, sorted.

    Special tokens, and added tokens that the template writes though they are not marked special (DeepSeek's role
    tokens); not white space (Gemma's newlines), and not what assistants write themselves: reasoning tags, and
    plain tags in pairs that are not special (Qwen's <tool_call>).
    """
    added = list(backend.get_added_tokens_decoder().values())
    names = {token.content for token in added}
    return tuple(
        sorted(
            {
                token.content
                for token in added
                if token.content.strip()
                and not _REASONING_TAG.fullmatch(token.content)
                and (
                    token.special
                    or token.content in declared
                    or (token.content in template and not _is_paired_tag(token.content, names, template))
                )
            }
        )
    )


def _is_paired_tag(text: str, names: set[str], template: str) -> bool:
    tag = _PLAIN_TAG.fullmatch(text)
    if tag is None:
        return False
    other = f"<{'' if tag[1] else '/'}{tag[2]}>"
    return other in names or other in template


def _folder(job: PackJob, revision: str | None) -> tuple[str, str | None]:
    """The folder to read, and the commit it stands for if it came from a hub."""
    path = job.tokenizer_path
    if os.path.isdir(path):
        return path, None
    if os.path.isabs(path) or path.startswith((".", "~")):
        raise EncodeError(f"tokenizer {job.tokenizer!r}: there is no folder {job.resolve(job.tokenizer)}.")
    from huggingface_hub import snapshot_download

    wanted = revision or job.revision
    try:
        folder = snapshot_download(path, revision=wanted, allow_patterns=[*TOKENIZER_FILES, "config.json"])
    except Exception as error:  # the hub client raises of many families: validation, HTTP, cache, offline
        raise EncodeError(
            f"tokenizer {job.tokenizer!r} is neither a folder ({job.resolve(job.tokenizer)}) nor readable from the "
            f"hub{f' at revision {wanted!r}' if wanted else ''}: {_first_line(error)}"
        ) from error
    return folder, os.path.basename(folder)


def _read(name: str, folder: str) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers and tokenizers raise anything, bare Exception too, on a damaged file
        raise EncodeError(
            f"tokenizer {name!r} in {folder} cannot be read: {_first_line(error)} The folder needs a tokenizer.json "
            "and a tokenizer_config.json that transformers' AutoTokenizer can load."
        ) from error


def _own_template(tokenizer: Any, name: str) -> str | None:
    template = tokenizer.chat_template
    if isinstance(template, dict):
        if set(template) == {"default"}:
            return str(template["default"])
        raise EncodeError(
            f"tokenizer {name!r} has several chat templates ({', '.join(sorted(template))}), and which one is used "
            "would depend on the row. Write the one to use into a file and name it under `chat_template`."
        )
    return template if template is None else str(template)


def _read_template(job: PackJob) -> bytes:
    path = job.resolve(str(job.chat_template))
    try:
        with open(path, "rb") as file:
            data = file.read()
        data.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise EncodeError(f"chat_template {path} cannot be read: {_first_line(error)}") from error
    return data


def _file_hashes(folder: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for root, folders, names in os.walk(folder, followlinks=True):
        inside = os.path.relpath(root, folder).replace(os.sep, "/")
        folders[:] = [f for f in folders if inside == "." and f == "additional_chat_templates"]
        for name in names:
            relative = name if inside == "." else f"{inside}/{name}"
            if any(fnmatch.fnmatchcase(relative, pattern) for pattern in TOKENIZER_FILES):
                with open(os.path.join(root, name), "rb") as file:
                    found[relative] = hashlib.file_digest(file, "sha256").hexdigest()
    return dict(sorted(found.items()))


def _pad_id(tokenizer: Any) -> int:
    for candidate in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if candidate is not None:
            return int(candidate)
    return 0


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if text.endswith(".") else text + "."
