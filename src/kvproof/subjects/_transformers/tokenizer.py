"""A model's own tokenizer, loaded on first use, because loading one from a GGUF file takes many seconds."""

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any

from kvproof.errors import UsageError
from kvproof.subjects._transformers.quiet import as_usage_errors, quiet


class Tokenizer:
    """Loads the tokenizer once, on first use. After a failure it does not try again."""

    def __init__(self, name: str, load: Callable[[], Any]) -> None:
        self._name = name
        self._load = load
        self._loaded: Any = None
        self._refusal: UsageError | None = None
        self._texts: dict[int, str | None] = {}
        self._digest: str | None = None

    def encode(self, text: str) -> list[int]:
        """Return the ids of ``text`` with the special tokens that the tokenizer adds by itself.

        Raises `UsageError` if the tokenizer cannot be loaded or cannot encode the text.
        """
        tokenizer = self._tokenizer()
        with as_usage_errors(f"{self._name}: its tokenizer cannot take the prompt"):
            return list(tokenizer(text).input_ids)

    def chats(self) -> bool:
        """Return whether there is a chat template; False if the tokenizer cannot be loaded."""
        try:
            return bool(getattr(self._tokenizer(), "chat_template", None))
        except UsageError:
            return False

    def encode_chat(self, text: str) -> list[int]:
        """Return the ids of the prompt that the chat template creates from a user message.

        The library renders templates in a sandbox. Raises `UsageError` as `encode` does.
        """
        tokenizer = self._tokenizer()
        said = [{"role": "user", "content": text}]
        with as_usage_errors(f"{self._name}: its chat template cannot take the prompt"):
            prompt = tokenizer.apply_chat_template(said, add_generation_prompt=True, tokenize=False)
            return list(tokenizer(prompt, add_special_tokens=False).input_ids)

    def decode(self, ids: Sequence[int]) -> str | None:
        """Return the text of several tokens together, or None if the tokenizer cannot be loaded."""
        try:
            tokenizer = self._tokenizer()
        except UsageError:
            return None
        text: str = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
        return text

    def digest(self) -> str | None:
        """Return the SHA-256, in hexadecimal, of vocabulary, rules and chat template, or None if unavailable."""
        if self._digest is None:
            try:
                tokenizer = self._tokenizer()
            except UsageError:
                return None
            backend = getattr(tokenizer, "backend_tokenizer", None)
            rules = backend.to_str() if backend is not None else sorted(tokenizer.get_vocab().items())
            whole = [type(tokenizer).__name__ if backend is None else "", rules, tokenizer.chat_template]
            self._digest = hashlib.sha256(json.dumps(whole, sort_keys=True).encode()).hexdigest()
        return self._digest

    def text(self, token_id: int) -> str | None:
        """Return the text of a token, or None if it has none."""
        if token_id not in self._texts:  # reports request the same few tokens for every row
            self._texts[token_id] = self._text(token_id)
        return self._texts[token_id]

    def _text(self, token_id: int) -> str | None:
        try:
            tokenizer = self._tokenizer()
        except UsageError:
            return None
        with quiet():
            text: str = tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
            if text and "\ufffd" not in text:
                return text
            # A token can be part of a character; its name in the vocabulary still identifies it.
            name: str | None = tokenizer.convert_ids_to_tokens(token_id)
            return name

    def _tokenizer(self) -> Any:
        if self._refusal is not None:
            raise self._refusal
        if self._loaded is None:
            try:
                with as_usage_errors(f"{self._name}: its tokenizer cannot be loaded"):
                    self._loaded = self._load()
            except UsageError as refusal:
                self._refusal = refusal
                raise
        return self._loaded
