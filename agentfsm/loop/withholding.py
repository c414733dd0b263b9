"""Keeps secrets out of what is written of a run, and gives them back to whoever continues it with the host's key.

Values are cleaned one by one where they stand: in texts, arguments and results, never in names, ids or JSON keys. A
secret, and each common encoding of it, is replaced by a *placeholder*: ``[sealed KEY-ID TEXT]``, which holds the value
encrypted under the host's sealing key (AES-SIV, so that equal values stay equal); or, without the package
``cryptography``, ``[secret DIGEST]``, which holds nothing. Opening the sealed values of a text gives back exactly what
was cleaned, even where a text had something that looks like a placeholder.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, cast

from agentfsm.errors import MissingExtraError
from agentfsm.loop.canonical_json import call_signature, decode, encode
from agentfsm.loop.escapes import MIN_ENCODED_LENGTH, Reading, base64_forms, has_escapes, read_plain, text_forms
from agentfsm.loop.keys import KeyPurpose, Keyring, SecretKeys
from agentfsm.loop.secret_pieces import SHORT, PieceFilter, SecretIndex

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESSIV

_PLACEHOLDER = re.compile(r"\[(?:secret [0-9a-f]{32}|sealed [0-9a-f]{8} [A-Za-z0-9_-]+)\]")
_SEALED = re.compile(r"\[sealed ([0-9a-f]{8}) ([A-Za-z0-9_-]+)\]")
_PADDED_TO = 32  # characters, so that a sealed value does not tell its length

SecretPaths = Mapping[str, tuple[frozenset[str], Mapping[str, Any]]]
"""By tool: the names of its secret arguments, and the JSON schema of its arguments, which may mark inner ones."""


def contains_placeholder(text: str) -> bool:
    """Whether a text contains the placeholder of a secret."""
    return "[se" in text and _PLACEHOLDER.search(text) is not None


def lacks_values(value: Any) -> bool:
    """Whether a JSON value contains the placeholder of a secret, so that it is not what it was."""
    return any(isinstance(leaf, str) and contains_placeholder(leaf) for leaf in _leaves(value))


# -- which values are secret --------------------------------------------------------------------------------

_SECRET_NAME = re.compile(
    r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|COOKIE|PRIVATE|BEARER|(?:\A|_)(?:PASS|PWD|PW|PAT|PIN|AUTH)(?:_|\Z)|PGPASS"
)
_PLACE_NAME = re.compile(r"_(?:FILE|PATH|DIR|SOCK|HOME|URL|URI|HOST|PORT|NAME|USER|REGION|ID)\Z")
_URL_PASSWORD = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#:@]*:([^\s/?#]+)@")
_WORDS = re.compile(r"(?:[A-Z]?[a-z]+|[A-Z]+)(?:[_. -]?(?:[A-Z]?[a-z]+|[A-Z]+))*")

MIN_SECRET_LENGTH = 8
"""Characters that the value of a variable needs to count as secret; a shorter one may be a word, or a number."""

_MIN_PHRASE_LENGTH = 24  # of a value that consists of words
_MIN_LINE_LENGTH = 16  # of a line of a longer secret, such as a PEM file


def environment_secrets(environment: Mapping[str, str]) -> list[str]:
    """The secrets among the values of environment variables.

    They are the values of variables that are named like keys, tokens or passwords, the passwords in URLs, and private
    keys in PEM, whatever the variable's name. A value that may as well be a word (``postgres``, ``tool_result``), or
    that is shorter than 8 characters, does not count: words occur in honest texts.
    """
    found: dict[str, None] = {}
    for name, value in environment.items():
        found |= dict.fromkeys(_variable_secrets(name, value))
    return list(found)


@lru_cache(maxsize=256)  # every run asks, and the environment hardly ever changes
def _variable_secrets(name: str, value: str) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for password in _URL_PASSWORD.findall(value):
        found |= dict.fromkeys(filter(_is_no_word, (password, _unquote(password))))
    is_named_so = is_secret_name(name) and name != "PWD"  # in which every shell says where it is
    if ("-----BEGIN" in value and "PRIVATE KEY" in value) or (is_named_so and _is_no_word(value)):
        found |= dict.fromkeys(value for value in _parts(value) if _is_no_word(value))
    return tuple(found)


def header_secrets(headers: Mapping[str, str]) -> list[str]:
    """The secrets among the headers of HTTP requests: credentials, cookies, and headers named like keys or tokens."""
    found: dict[str, None] = {}
    for name, value in headers.items():
        if "AUTHORIZATION" in name.upper() or is_secret_name(name):
            found |= dict.fromkeys(filter(_is_no_word, (value, value.partition(" ")[2])))
    return list(found)


def is_secret_name(name: str) -> bool:
    """Whether a variable, a header or a parameter is named like a key, a token or a password."""
    named = name.upper().replace("-", "_")
    return _SECRET_NAME.search(named) is not None and _PLACE_NAME.search(named) is None


def _is_no_word(value: str) -> bool:
    if len(value) < MIN_SECRET_LENGTH:
        return False
    return len(value) >= _MIN_PHRASE_LENGTH or _WORDS.fullmatch(value) is None


def _parts(value: str) -> Iterator[str]:
    """A secret, and the texts in it if it is JSON (a service account's file)."""
    yield value
    if value.lstrip()[:1] in ("{", "["):
        try:
            inner: Any = json.loads(value)
        except ValueError:
            return
        yield from (leaf for leaf in _leaves(inner) if isinstance(leaf, str))


def secret_values(arguments: Mapping[str, Any], names: frozenset[str], schema: Mapping[str, Any]) -> list[Any]:
    """The secret values in the arguments of a call: all of a secret argument, and what its schema marks inside others.

    Args:
        arguments: The arguments as the model gave them; they need not be valid.
        names: The names of secret arguments.
        schema: The JSON schema of the arguments.
    """
    found = [leaf for name in names & arguments.keys() for leaf in _leaves(arguments[name])]
    _find_marked(arguments, schema, schema, found, 0)
    return found


def marked_values(value: Any, schema: Mapping[str, Any]) -> list[Any]:
    """The values in a JSON value that its schema marks as secret; it need not be valid."""
    found: list[Any] = []
    _find_marked(value, schema, schema, found, 0)
    return found


_MAX_SCHEMA_DEPTH = 64


def marks_secrets(schema: Any) -> bool:
    """Whether a JSON schema, or a part of one, marks a value as secret (``writeOnly``, or the format ``password``)."""
    if isinstance(schema, Mapping):
        each = cast("Mapping[str, Any]", schema)
        return _is_marked(each) or any(map(marks_secrets, each.values()))
    return isinstance(schema, list | tuple) and any(map(marks_secrets, cast("list[Any]", schema)))


def _is_marked(schema: Mapping[str, Any]) -> bool:
    return schema.get("writeOnly") is True or schema.get("format") == "password"


def _find_marked(value: Any, schema: Any, root: Mapping[str, Any], found: list[Any], depth: int) -> None:
    if not isinstance(schema, Mapping) or depth > _MAX_SCHEMA_DEPTH:
        return
    rules = cast("Mapping[str, Any]", schema)
    if _is_marked(rules):
        found.extend(_leaves(value))
        return
    reference = rules.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        target: Any = root
        for name in reference[2:].split("/"):
            target = cast("Mapping[str, Any]", target).get(name) if isinstance(target, Mapping) else None
        _find_marked(value, target, root, found, depth + 1)
    for keyword in ("anyOf", "oneOf", "allOf"):
        for each in rules.get(keyword, ()):
            _find_marked(value, each, root, found, depth + 1)
    if isinstance(value, Mapping):
        properties = rules.get("properties", {})
        for name, item in cast("Mapping[str, Any]", value).items():
            _find_marked(item, properties.get(name, rules.get("additionalProperties")), root, found, depth + 1)
    elif isinstance(value, list | tuple):
        prefix = rules.get("prefixItems", ())
        for index, item in enumerate(cast("list[Any]", value)):
            _find_marked(item, prefix[index] if index < len(prefix) else rules.get("items"), root, found, depth + 1)


def _leaves(value: Any) -> Iterator[Any]:
    """The values in a JSON value that are neither arrays nor objects."""
    if isinstance(value, Mapping):
        for item in cast("Mapping[str, Any]", value).values():
            yield from _leaves(item)
    elif isinstance(value, list | tuple):
        for item in cast("list[Any]", value):
            yield from _leaves(item)
    else:
        yield value


# -- how they are found in texts ----------------------------------------------------------------------------


def _encodings(secret: str) -> set[str]:
    """The forms in which a secret, or a line of a private key, may stand in a text."""
    return {form for each in (secret, *_long_lines(secret)) for form in text_forms(each)}


def _long_lines(secret: str) -> list[str]:
    return [line for line in secret.splitlines() if len(line) >= _MIN_LINE_LENGTH and "-----" not in line]


MASK = "**********"
"""What people are shown in place of a secret, as pydantic does."""


def mask_secrets(text: str, secrets: Iterable[str]) -> str:
    """A text with each secret replaced by asterisks, in whatever form it occurs there."""
    for form in sorted({form for secret in secrets for form in _encodings(secret)}, key=len, reverse=True):
        text = text.replace(form, MASK)
    return text


def _unquote(text: str) -> str:
    data = re.sub(
        rb"%([0-9A-Fa-f]{2})", lambda found: bytes.fromhex(found[1].decode()), text.encode("utf-8", "replace")
    )
    return data.decode("utf-8", "replace")


class Withholder:
    """Replaces the secrets of one run by placeholders in everything that is written of it.

    Args:
        keys: The keys of the host, under which secrets are sealed.
        values: Secrets that are known in advance.
        paths: The secret arguments of tools.

    Attributes:
        placeholders: Those that it has made, in order.
    """

    def __init__(self, keys: SecretKeys, values: Iterable[str] = (), paths: SecretPaths | None = None) -> None:
        self._keys = keys
        self._paths = paths or {}
        self._mask: str | None = None
        self.placeholders: dict[str, None] = {}
        self._numbers: set[str] = set()
        self._forms: dict[str, None] = {}
        self._signs: list[str] = []  # how they look in JSON
        self._readings: set[bytes] = set()  # what is looked for in a text with unusual escapes
        self._indexes: list[SecretIndex] = []  # made when first needed, and shared by copies that know the same
        for value in values:
            self.add(value)

    def copy(self) -> Withholder:
        """Another one that knows the same."""
        made = copy.copy(self)
        made._numbers, made._forms, made._signs = self._numbers.copy(), self._forms.copy(), self._signs.copy()
        made._readings, made.placeholders = self._readings.copy(), self.placeholders.copy()
        return made

    def with_mask(self, mask: str) -> Withholder:
        """The same, but with one text for every secret instead of placeholders. Use one or the other, not both."""
        masking = copy.copy(self)
        masking._mask = mask
        return masking

    @property
    def knows_tools(self) -> bool:
        """Whether any tool has secret arguments."""
        return bool(self._paths)

    def has_secrets(self, tool: str) -> bool:
        """Whether a tool has secret arguments, or such inside others."""
        return tool in self._paths

    def add(self, value: Any) -> None:
        """From now on, withhold a value of JSON's scalar types wherever it occurs."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            value = str(value)
            self._numbers.add(value)
        if not isinstance(value, str) or not value or value in self._forms:
            return
        new = [form for form in _encodings(value) if form not in self._forms]
        self._forms |= dict.fromkeys([value, *new])
        encoded = base64_forms(value) if len(value) >= MIN_ENCODED_LENGTH else ()
        looked_for = (value, *_long_lines(value), *encoded, *(form for form in new if "/" in form))
        self._readings |= {plain for plain in map(read_plain, looked_for) if len(plain) >= MIN_ENCODED_LENGTH}
        self._indexes = []
        self._signs += {json.dumps(form, ensure_ascii=False)[1:-1] for form in new}

    def add_arguments(self, tool: str, arguments: Mapping[str, Any]) -> None:
        """Withhold the secret arguments of a call from now on."""
        if tool in self._paths and (values := secret_values(arguments, *self._paths[tool])):
            for value in values:
                self.add(value)
            with contextlib.suppress(TypeError, ValueError):  # no JSON, or nested too deeply
                self.add(call_signature(tool, arguments))  # a digest, from which a short secret could be guessed

    def has_secret_arguments(self, tool: str) -> bool:
        """Whether a tool has arguments that are secret as a whole."""
        return tool in self._paths and bool(self._paths[tool][0])

    def may_occur(self, text: str) -> bool:
        """Whether a JSON text may contain a secret, or what looks like a placeholder."""
        for sign in self._signs:  # faster than any(), for each text that is written
            if sign in text:
                return True
        if "[se" in text or '"$str"' in text:
            return True
        return has_escapes(text) and bool(self._present_readings(text))

    def clean_text(self, text: str) -> str:
        """A text with every secret replaced."""
        text = self._clean_usual(text)
        if not has_escapes(text):
            return text
        parts = re.split(f"({_PLACEHOLDER.pattern})", text)  # nothing in a placeholder is a secret
        return "".join(part if number % 2 else self._clean_escaped(part) for number, part in enumerate(parts))

    def filter_pieces(self, receive: Callable[[str], None]) -> PieceFilter:
        """What withholds the secrets of a text that comes in pieces; only for what has a mask."""
        if not self._indexes:
            as_text = (reading.decode("latin-1") for reading in self._readings)
            self._indexes += [SecretIndex(self._forms), SecretIndex(as_text)]
        forms, readings = self._indexes
        return PieceFilter(forms, readings, self._mask or MASK, receive)

    def _present_readings(self, text: str) -> list[bytes]:
        plain = read_plain(text)
        return [reading for reading in self._readings if reading in plain]

    def _clean_escaped(self, text: str) -> str:
        present = self._present_readings(text)
        if not present:
            return text
        reading = Reading(text)
        present.sort(key=len, reverse=True)
        cleaned, done = "", 0
        for found in re.finditer(b"|".join(map(re.escape, present)), reading.plain):
            start, end = reading.span(*found.span())
            cleaned += text[done:start] + self.placeholder_for(text[start:end])
            done = end
        return cleaned + text[done:]

    def _clean_usual(self, text: str) -> str:
        present = [form for form in self._forms if form in text]
        if not present and "[se" not in text:
            return text
        present.sort(key=len, reverse=True)
        patterns = [re.escape(form) if len(form) >= SHORT else _alone(form) for form in present]
        return re.sub("|".join([*patterns, _PLACEHOLDER.pattern]), self._placeholder_for_match, text)

    def clean(self, value: Any) -> Any:
        """A JSON value with every secret in its texts and numbers replaced; keys of objects stay as they are."""
        if isinstance(value, str):
            return self.clean_text(value)
        if isinstance(value, Mapping):
            return {name: self.clean(item) for name, item in cast("Mapping[str, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [self.clean(item) for item in cast("list[Any]", value)]
        if value.__class__ in (int, float) and str(value) in self._numbers and len(str(value)) >= SHORT:
            return self.placeholder_for(value)
        return value

    def clean_arguments(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call with every secret replaced; secret arguments are replaced whatever they are."""
        self.add_arguments(tool, arguments)
        names = self._paths[tool][0] if tool in self._paths else ()
        return {n: self._withhold(value) if n in names else self.clean(value) for n, value in arguments.items()}

    def clean_fields(self, data: Any, texts: frozenset[str], kept: frozenset[str] = frozenset()) -> Any:
        """Data of ours with every secret replaced in the fields that hold the user's texts and data.

        Args:
            data: The data, as JSON.
            texts: The names of these fields.
            kept: The names of fields that are left alone with all that is in them.
        """
        if isinstance(data, list | tuple):
            return [self.clean_fields(item, texts, kept) for item in cast("list[Any]", data)]
        if not isinstance(data, Mapping):
            return data
        fields = cast("Mapping[str, Any]", data)
        for secret in fields.get("withheld", ()) if "withheld" in texts else ():
            self.add(secret)
        arguments = fields.get("arguments")
        cleaned: dict[str, Any] = {}
        if isinstance(arguments, Mapping):
            tool = str(fields.get("tool") or fields.get("name") or "")
            cleaned["arguments"] = self.clean_arguments(tool, cast("Mapping[str, Any]", arguments))
        for name, value in fields.items():
            if name in kept:
                cleaned[name] = value
            elif name not in cleaned:
                cleaned[name] = self.clean(value) if name in texts else self.clean_fields(value, texts, kept)
        return {name: cleaned[name] for name in fields}

    def placeholder_for(self, value: Any) -> str:
        """What is written instead of a JSON value."""
        if self._mask is not None:
            return self._mask
        sealed = seal_value(self._keys, value)
        if sealed is None:
            digest = self._keys.seal(KeyPurpose.withholding, encode(value).encode()).removeprefix(self._keys.key_id)
            sealed = f"[secret {digest}]"
        self.placeholders[sealed] = None
        return sealed

    def _withhold(self, value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: self._withhold(item) for name, item in cast("Mapping[str, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [self._withhold(item) for item in cast("list[Any]", value)]
        return value if value is None or value == "" else self.placeholder_for(value)

    def _placeholder_for_match(self, found: re.Match[str]) -> str:
        return self.placeholder_for(found[0])


def _alone(form: str) -> str:
    return rf"(?<![^\W_]){re.escape(form)}(?![^\W_])"


def seal_value(keys: SecretKeys, value: Any) -> str | None:
    """The placeholder that holds a JSON value encrypted; None without the package ``cryptography``."""
    cipher = _cipher(keys)
    if cipher is None:
        return None
    text = encode(value)
    padded = text.ljust(-(-len(text) // _PADDED_TO) * _PADDED_TO).encode()
    sealed = base64.urlsafe_b64encode(cipher.encrypt(padded, None)).decode().rstrip("=")
    return f"[sealed {keys.key_id} {sealed}]"


class SecretOpener:
    """Opens the sealed values in what was written of a run.

    Attributes:
        opened: The values that it has opened: the secrets of the run.
    """

    def __init__(self, keyring: Keyring) -> None:
        self._keyring = keyring
        self.opened: dict[str, Any] = {}

    def open(self, value: Any) -> Any:
        """A JSON value with every sealed value in it opened; one that was sealed under another key stays sealed.

        Raises:
            MissingExtraError: The package ``cryptography`` is not installed.
        """
        if isinstance(value, str):
            return self._open_text(value) if "[sealed " in value else value
        if isinstance(value, Mapping):
            return {name: self.open(item) for name, item in cast("Mapping[str, Any]", value).items()}
        if isinstance(value, list | tuple):
            return [self.open(item) for item in cast("list[Any]", value)]
        return value

    def open_fields(self, data: Any, texts: frozenset[str], kept: frozenset[str] = frozenset()) -> Any:
        """What ``Withholder.clean_fields`` was given; for the arguments see there.

        Raises:
            MissingExtraError: The package ``cryptography`` is not installed.
        """
        if isinstance(data, list | tuple):
            return [self.open_fields(item, texts, kept) for item in cast("list[Any]", data)]
        if not isinstance(data, Mapping):
            return data
        opened: dict[str, Any] = {}
        for name, value in cast("Mapping[str, Any]", data).items():
            if name in kept:
                opened[name] = value
            else:
                opened[name] = self.open(value) if name in texts else self.open_fields(value, texts, kept)
        return opened

    def _open_text(self, text: str) -> Any:
        whole = _SEALED.fullmatch(text)
        if whole is not None:
            return self._open(whole)
        return _SEALED.sub(lambda found: str(self._open(found)), text)

    def _open(self, found: re.Match[str]) -> Any:
        keys = self._keyring.find(found[1])
        if found[0] in self.opened or keys is None:
            return self.opened.get(found[0], found[0])
        cipher = _cipher(keys)
        if cipher is None:
            raise MissingExtraError("opening the sealed values of a run", "sealing")
        from cryptography.exceptions import InvalidTag

        try:
            data = cipher.decrypt(base64.urlsafe_b64decode(found[2] + "=" * (-len(found[2]) % 4)), None)
        except (InvalidTag, ValueError):  # not made by us: text that looks like a placeholder
            return found[0]
        value = self.opened[found[0]] = decode(data.decode())
        return value


def _cipher(keys: SecretKeys) -> AESSIV | None:
    """Encrypts under the sealing key of a secret; None without the package that does."""
    make = _cipher_class()
    return None if make is None else _make_cipher(make, keys.key(KeyPurpose.sealing))


@cache
def _cipher_class() -> Callable[[bytes], AESSIV] | None:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESSIV  # only runs with secrets need it
    except ImportError:
        return None
    return AESSIV


@cache
def _make_cipher(make: Callable[[bytes], AESSIV], key: bytes) -> AESSIV:
    return make(key)
