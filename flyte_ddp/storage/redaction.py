"""Removal of passwords, signatures and keys from text that leaves a run.

Records, such as events, cards, manifests and checkpoints, pass through `redact_values`. Messages,
such as errors and lines that ranks print, pass through `redact_url` or `redact_errors`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "..."
# Schemes in which a name before the @ is part of the place, as in abfs://container@account. In
# other schemes a name there is a token.
_SCHEMES_WITH_USERS = re.compile(
    r"abfss?|adl|az|dask|git|(git\+)?ssh|hdfs|s?ftp|smb|wasbs?|webhdfs"
)
# The ends of secret values' names, as in api_key, X-Api-Key, AWS_SECRET_ACCESS_KEY.
_SECRET = (
    r"(?:passw(?:or)?d|passphrase|secret|(?:access|account|api|private|secret|shared)[_-]?key(?:[_-]?id)?|"
    r"googleaccessid|sharedaccesssignature|x-(?:amz|goog)-(?:credential|signature)|"
    r"(?:access|api|auth|bearer|github|hf|id|refresh|sas|security|session|tracking)[_-]?token)"
)
# Words with other meanings. Only a value as in `_LONG` after them is a secret.
_AMBIGUOUS = r"(?<![a-z])(?:token|signature|sig|credential|pwd)"
_VALUE = r"(?!none\b|null\b|true\b|false\b|\.\.\.)(?:[^\s\"'&,;()\[\]{}<>]+)"
# A long value that is no word in a sentence.
_LONG = r"(?=[^\s\"'&,;]*[a-z])(?=[^\s\"'&,;]*\d)[^\s\"'&,;()\[\]{}<>]{6,}|[\w+/=-]{32,}"
_QUOTED = r"\"(?!\.\.\.\")[^\"\n]+\"|'(?!\.\.\.')[^'\n]+'"
_URL = re.compile(r"\b[a-zA-Z][\w+.-]{0,30}://[^\s'\"<>]+")
_SECRET_NAME = re.compile(rf".*{_SECRET}|token|pwd|(?:proxy-)?authorization", re.I | re.S)
_SIGNED = re.compile(r"\b(?:x-(?:amz|goog)-\w+|sig|signature|awsaccesskeyid|googleaccessid)=", re.I)
# Parts of a signed URL's query, for S3, Google Cloud Storage, CloudFront and Azure.
_SIGNATURE_PART = re.compile(
    r"x-(?:amz|goog)-[\w-]+|sig|signature|awsaccesskeyid|googleaccessid|expires|key-pair-id|policy|"
    r"s[ersvi]|s[ps]|spr|sip|srt|ses|sks|skt|ske|skv|skoid|sktid|sdd|st|scid|rsc[cdelt]",
    re.I,
)
_SECRET_IN_QUERY = re.compile(
    rf".*{_SECRET}|auth|code|jwt|key|pass|sas|session_?id|ticket|(?:.*[_.-])?(?:token|sig|signature|credentials?|pwd)",
    re.I | re.S,
)
# A random value in a query.
_RANDOM = re.compile(r"(?=.*[a-z])(?=.*\d)[a-z\d+/=%]{24,}", re.I)
_QUERY = re.compile(r"(?<=\?)[^\s'\"<>?#]+")
_RULES = [  # the first group of a match stays in the text
    re.compile(r"(private key-----)(?!\.\.\.).+?(?=-----END|\Z)", re.I | re.S),
    re.compile(
        r"(authorization[\"']?\s*[:=,]\s*b?[\"']?)(?:(?:basic|bearer|digest|token|apikey|sharedkey\w*|aws|goog4)\S*\s+"
        r"(?!\.\.\.)[^\"'\n]+|[\w.~+/=-]{20,})",
        re.I,
    ),
    re.compile(
        r"(\bbearer\s+)(?:(?=[\w.~+/=-]*[\d.][\w.~+/=-])[\w.~+/=-]{8,}|[\w~+/=-]{20,})", re.I
    ),
    re.compile(
        r"(\blogin\s+\S+\s+password\s+|\bwandb login\s+(?:--\S+\s+)*)(?!-|\.\.\.)\S{8,}", re.I
    ),  # the rule matches .netrc too
    re.compile(rf"({_SECRET}[\"']?\s*(?:=|(?<=[\"'])\s*[:,])\s*b?)(?:{_QUOTED})", re.I),
    re.compile(rf"({_SECRET}\s*=\s*){_VALUE}", re.I),
    re.compile(rf"((?:{_SECRET}|{_AMBIGUOUS})[\"']?\s*[:=]\s*b?[\"']?)(?:{_LONG})", re.I),
    re.compile(rf"(--[\w-]*{_SECRET}\s+)(?!-|\.\.\.)\S+", re.I),
    re.compile(
        r"((?:key|password)\W{1,3})[0-9a-f]{40}\b|\b(?:(?:AKIA|ASIA)[A-Z0-9]{16}|gh[opsur]_\w{20,}|github_pat_\w{20,}|"
        r"glpat-[\w-]{20,}|hf_[A-Za-z0-9]{20,}|wandb_v\d_\w{10,}|local-[0-9a-f]{40}|xox[abeprs]-[\w-]{10,}|"
        r"sk-[\w-]{20,}|AIza[\w-]{35}|ya29\.[\w-]{10,}|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*)"
    ),
]
_HINT_WORDS = (
    *("://", "key", "secret", "passw", "passphrase", "token", "sig", "pwd", "credential"),
    *("googleaccessid", "authoriz", "bearer", "login"),
)
_HINT_PREFIXES = (
    *("akia", "asia", "ghp_", "gho_", "ghs_", "ghu_", "ghr_", "github", "glpat-", "hf_", "wandb"),
    *("local-", "xox", "sk-", "aiza", "ya29.", "eyj"),
)
_HINTS = _HINT_WORDS + _HINT_PREFIXES  # every text that a rule changes contains a hint


def redact_url(text: str) -> str:
    """Return a URL or a message without its passwords, signatures, tokens and keys. Other text
    stays as it is.
    """
    lowered = text.lower()
    # Most of the many lines that ranks print have no hint.
    if not any(hint in lowered for hint in _HINTS):
        return text
    if "://" in text:
        text = _redact_urls(text)
    if "?" in text:
        text = re.sub(r"(?<=\?)[^\s'\"<>?]+", lambda match: _hide_if_signed(match[0]), text)
    for rule in _RULES:
        text = rule.sub(lambda match: f"{match[1] or ''}{HIDDEN}", text)
    return text


def redact_values(value: Any) -> Any:
    """Return plain values, or a dataclass of plain values, with every string redacted. Strings with
    a secret's name are hidden as a whole.
    """
    if isinstance(value, str):
        return redact_url(value)
    if isinstance(value, Mapping):
        shown = {}
        for key, each in value.items():
            if isinstance(each, str) and each and _SECRET_NAME.fullmatch(str(key)):
                shown[key] = HIDDEN
            else:
                shown[key] = redact_values(each)
        return shown
    if isinstance(value, list):
        return [redact_values(each) for each in value]
    if isinstance(value, tuple):
        return tuple(redact_values(each) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{name: redact_values(each) for name, each in vars(value).items()}
        )
    return value


@contextlib.contextmanager
def redact_errors() -> Iterator[None]:
    """Redact, in place, the text of an exception that the block raises, and the text of its
    causes.
    """
    try:
        yield
    except BaseException as error:
        _redact_error(error)
        raise


def _redact_error(error: BaseException | None) -> None:
    while error is not None:
        arguments = []
        for each in error.args:
            if isinstance(each, str):
                each = redact_url(each)
            arguments.append(each)
        error.args = tuple(arguments)
        # Some classes keep a message beside the arguments, and an error may have notes.
        vars(error).update(
            {
                name: redact_values(each)
                for name, each in vars(error).items()
                if type(each) in (str, list)
            }
        )
        if isinstance(error, OSError) and isinstance(error.filename, str):
            error.filename = redact_url(error.filename)
        error = error.__cause__ or error.__context__


def _redact_urls(text: str) -> str:
    return _URL.sub(lambda match: _redact(match[0]), text)


def _redact(url: str) -> str:
    scheme, _, rest = url.partition("://")
    # A chain of URLs, such as zip://inner.csv::https://host/outer.zip.
    chain = re.search(r"::(?=[\w+.-]+(://|::))", rest)
    if chain:
        inner = _redact(f"{scheme}://{rest[: chain.start()]}")
        return f"{inner}::{_redact_urls(rest[chain.end() :])}"
    authority = re.split("[/?#]", rest)[0]
    if ":" in authority:
        # A password may contain an unquoted / ? # or @. It ends at the last @.
        user, at, place = rest.rpartition("@")
    else:
        user, at, _ = authority.rpartition("@")
        place = rest[len(user) + len(at) :]
    if at and (":" in user or not _SCHEMES_WITH_USERS.fullmatch(scheme.lower())):
        user = HIDDEN
    is_in_query = "?" in rest[: len(rest) - len(place)] and "?" not in place
    place, sharp, fragment = place.partition("#")
    separator = "?"
    if is_in_query:
        separator = "&"
    address, mark, query = place.partition(separator)
    if mark:
        mark = "?"
    return f"{scheme}://{user}{at}{address}{mark}{_hide(query)}{sharp}{_hide(fragment)}"


def _hide_if_signed(query: str) -> str:
    if _SIGNED.search(query):
        return _hide(query)
    return query


def _hide(query: str) -> str:
    """Return a query, or a fragment in the same form, with its secrets and signature hidden."""
    if "=" not in query:
        return query
    is_signed = bool(_SIGNED.search(query))
    shown = []
    for pair in query.split("&"):
        name, _, value = pair.partition("=")
        is_secret = _SECRET_IN_QUERY.fullmatch(name) or _RANDOM.fullmatch(value)
        if value and (is_secret or (is_signed and _SIGNATURE_PART.fullmatch(name))):
            pair = f"{name}={HIDDEN}"
        shown.append(pair)
    return "&".join(shown)


def drop_signatures(value: Any) -> Any:
    """Return plain values without the signatures in their URLs. A store signs the same URL anew
    each time.
    """
    if isinstance(value, str):
        return _QUERY.sub(lambda match: _drop_signature(match[0]), value)
    if isinstance(value, Mapping):
        return {key: drop_signatures(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [drop_signatures(each) for each in value]
    return value


def _drop_signature(query: str) -> str:
    if not _SIGNED.search(query):
        return query
    pairs = query.split("&")
    return "&".join(pair for pair in pairs if not _SIGNATURE_PART.fullmatch(pair.partition("=")[0]))


def has_password(url: str) -> bool:
    """Return whether `url` has a password or a token before its host."""
    return "@" in urllib.parse.urlsplit(url).netloc and redact_url(url) != url
