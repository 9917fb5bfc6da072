"""Documents to tokens. An Encoder lives in each worker process; encode() is a function of its batch alone, so
the number of processes cannot change the result."""

import dataclasses
import json
import pathlib

import numpy as np

from packing.errors import PackError


@dataclasses.dataclass
class Tokenizer:
    """What the parent process finds out once and hands to its workers."""
    name: str
    backend: str              # tokenizer.json as text.
    vocabulary_size: int
    separator: int | None     # Id that ends a document.
    special: list
    folder: str | None        # Where the chat template is, if it is needed.


def load_hugging_face(path):
    """AutoTokenizer of a folder, or of a bare tokenizer.json. Never runs code that comes with it."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    path = pathlib.Path(path)
    if path.name == "tokenizer.json" and (path.parent / "tokenizer_config.json").exists():
        path = path.parent
    try:
        if path.is_file():
            return transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        if not (path / "tokenizer.json").exists():
            raise PackError(f"{path}: holds no tokenizer.json")
        return transformers.AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except PackError:
        raise
    except Exception as error:  # transformers raises anything, from OSError to a bare Exception.
        raise PackError(f"{path}: no tokenizer can be loaded: {error}") from error


def load_tokenizer(path, separator, chat):
    """`separator`: a token's text, "" for none, None for the tokenizer's end of text."""
    loaded = load_hugging_face(path)
    if chat and not loaded.chat_template:
        raise PackError(f"{path}: has no chat template, which --messages-field needs")
    separator_id = loaded.eos_token_id
    if separator is not None:
        separator_id = loaded.backend_tokenizer.token_to_id(separator) if separator else None
        if separator and separator_id is None:
            raise PackError(f"{path}: has no token '{separator}'")
    ids = loaded.get_vocab().values()
    return Tokenizer(str(path), loaded.backend_tokenizer.to_str(), max(ids) + 1, separator_id,
                     list(loaded.all_special_tokens), str(path) if chat else None)


@dataclasses.dataclass
class Encoded:
    tokens: np.ndarray
    lengths: list
    mask: np.ndarray | None
    skipped: int              # Documents without text, or conversations without an assistant's turn.
    input_bytes: int


class Encoder:
    def __init__(self, tokenizer, text_field, messages_field):
        import tokenizers

        self._tokenizer = tokenizer
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.backend)
        self._backend.no_truncation()
        self._backend.no_padding()
        self._text_field = text_field
        self._messages_field = messages_field
        self._chat = load_hugging_face(tokenizer.folder) if messages_field else None

    def encode(self, batch):
        documents, masks, skipped = [], [], 0
        encode = self._conversation if self._messages_field else self._text
        for where, value in self._values(batch):
            try:
                parts = encode(value)
            except PackError as error:
                raise PackError(f"{where}: {error}") from error
            skipped += not parts
            for ids, mask in parts:
                documents.append(ids)
                masks.append(mask)
        tokens = np.concatenate(documents) if documents else np.empty(0, np.uint32)
        mask = None
        if self._messages_field:
            mask = np.concatenate(masks) if masks else np.empty(0, np.uint8)
        return Encoded(tokens, [len(ids) for ids in documents], mask, skipped, batch.input_bytes)

    def _values(self, batch):
        """Yields (where, text or messages)."""
        field = self._messages_field or self._text_field
        if batch.kind == "file":
            yield batch.path, _read_text(batch.path)
        elif batch.kind == "rows":
            for number, value in enumerate(batch.items, batch.first):
                yield f"{batch.path}: row {number}: '{field}'", value
        else:
            for number, line in enumerate(batch.items, batch.first):
                if line.strip():
                    yield f"{batch.path}:{number}: '{field}'", _json_field(line, field, f"{batch.path}:{number}")

    def _text(self, text):
        if not isinstance(text, str):
            raise PackError(f"is {type(text).__name__}, not text")
        if not text:
            return []
        ids = self._backend.encode(text).ids  # With what the tokenizer puts before a text, such as a BOS.
        separator = self._tokenizer.separator
        if separator is not None and (not ids or ids[-1] != separator):
            ids.append(separator)
        return [(np.array(ids, np.uint32), None)] if ids else []

    def _conversation(self, messages):
        if not isinstance(messages, list) or not messages:
            raise PackError("is no list of messages")
        for index, message in enumerate(messages):
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise PackError(f"message {index} has no 'role'")
        # Parquet gives every message every column; a null one is an absent one.
        messages = [{key: value for key, value in m.items() if value is not None} for m in messages]
        return [self._mask_spans(text, spans) for text, spans in self._render(messages)]

    def _render(self, messages):
        """Documents of one conversation: [(text, [(start, end) of what the assistant wrote])].

        A turn's span is what rendering it adds to the prompt that the model would see at that point. A template that
        rewrites history (dropping earlier reasoning, say) makes a turn's prompt differ from the turns before it: the
        conversation is then cut into documents, each with the history exactly as its last turn saw it."""
        documents = []
        text, spans = "", []
        for index, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            prompt = self._template(messages[:index], True, index)
            whole = self._template(messages[:index + 1], False, index)
            start = _common_prefix(prompt, whole)
            if start < len(prompt) and not whole.startswith(self._template(messages[:index], False, index)):
                raise PackError(f"message {index}: the chat template's text for it does not go on from its prompt")
            if text and not prompt[:start].startswith(text):
                documents.append((text, spans))
                spans = []
            text = whole
            spans = spans + [(start, self._turn_end(whole))]
        if spans:
            documents.append((text, spans))
        return documents

    def _template(self, messages, prompt, index):
        if not messages:
            return ""
        try:
            return self._chat.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        except Exception as error:  # Jinja errors, and what templates raise themselves.
            raise PackError(f"message {index}: the chat template fails: {error}") from error

    def _turn_end(self, text):
        """The end of a turn, without the white space that a template puts after its closing token."""
        stripped = text.rstrip()
        return len(stripped) if any(stripped.endswith(token) for token in self._tokenizer.special) else len(text)

    def _mask_spans(self, text, spans):
        encoding = self._backend.encode(text, add_special_tokens=False)
        starts = np.array([offset[0] for offset in encoding.offsets], np.int64)
        mask = np.zeros(len(encoding.ids), np.uint8)
        for start, end in spans:
            mask[(starts >= start) & (starts < end)] = 1
        return np.array(encoding.ids, np.uint32), mask


def _common_prefix(a, b):
    if b.startswith(a):
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _read_text(path):
    try:
        data = pathlib.Path(path).read_bytes()
    except OSError as error:
        raise PackError(f"{path}: {error.strerror}") from error
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PackError(f"{path}:{line}: is not UTF-8 (byte {error.start})") from error


def _json_field(line, field, where):
    try:
        value = json.loads(line)
    except ValueError as error:
        raise PackError(f"{where}: is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise PackError(f"{where}: is {type(value).__name__}, not an object")
    if field not in value:
        raise PackError(f"{where}: has no field '{field}'; its fields: {', '.join(value) or 'none'}")
    return value[field]
