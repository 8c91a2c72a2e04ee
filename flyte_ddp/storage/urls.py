"""Text without passwords, signatures and keys, in the form in which it may leave a run.

There are two doors. Records, such as events, cards, manifests and checkpoints, pass
`redact_values`. Messages, such as lines of ranks and errors, pass `redact_url` or `redact_errors`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import urllib.parse
from collections.abc import Iterator, Mapping
from typing import Any

HIDDEN = "..."
# Before their @, a name alone is part of the place, as in abfs://container@account. Elsewhere it is
# a token.
_SCHEMES_WITH_USERS = re.compile(
    r"abfss?|adl|az|dask|git|(git\+)?ssh|hdfs|s?ftp|smb|wasbs?|webhdfs"
)
# The ends of names whose values are secrets, as in api_key, X-Api-Key, AWS_SECRET_ACCESS_KEY.
_SECRET = (
    r"(?:passw(?:or)?d|passphrase|secret|(?:access|account|api|private|secret|shared)[_-]?key(?:[_-]?id)?|"
    r"googleaccessid|sharedaccesssignature|x-(?:amz|goog)-(?:credential|signature)|"
    r"(?:access|api|auth|bearer|github|hf|id|refresh|sas|security|session|tracking)[_-]?token)"
)
# words with other meanings: see `_LONG`
_AMBIGUOUS = r"(?<![a-z])(?:token|signature|sig|credential|pwd)"
_VALUE = r"(?!none\b|null\b|true\b|false\b|\.\.\.)(?:[^\s\"'&,;()\[\]{}<>]+)"
# no word of a sentence
_LONG = r"(?=[^\s\"'&,;]*[a-z])(?=[^\s\"'&,;]*\d)[^\s\"'&,;()\[\]{}<>]{6,}|[\w+/=-]{32,}"
_QUOTED = r"\"(?!\.\.\.\")[^\"\n]+\"|'(?!\.\.\.')[^'\n]+'"
_URL = re.compile(r"\b[a-zA-Z][\w+.-]{0,30}://[^\s'\"<>]+")
_SECRET_NAME = re.compile(rf".*{_SECRET}|token|pwd|(?:proxy-)?authorization", re.I | re.S)
_SIGNED = re.compile(r"\b(?:x-(?:amz|goog)-\w+|sig|signature|awsaccesskeyid|googleaccessid)=", re.I)
# The parts of a query that a store has signed, of S3, Google Cloud Storage, CloudFront and Azure.
_SIGNATURE_PART = re.compile(
    r"x-(?:amz|goog)-[\w-]+|sig|signature|awsaccesskeyid|googleaccessid|expires|key-pair-id|policy|"
    r"s[ersvi]|s[ps]|spr|sip|srt|ses|sks|skt|ske|skv|skoid|sktid|sdd|st|scid|rsc[cdelt]",
    re.I,
)
_SECRET_IN_QUERY = re.compile(
    rf".*{_SECRET}|auth|code|jwt|key|pass|sas|session_?id|ticket|(?:.*[_.-])?(?:token|sig|signature|credentials?|pwd)",
    re.I | re.S,
)
# a value of a query that no person writes
_RANDOM = re.compile(r"(?=.*[a-z])(?=.*\d)[a-z\d+/=%]{24,}", re.I)
_QUERY = re.compile(r"(?<=\?)[^\s'\"<>?#]+")
_RULES = [  # the first group stays
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
    ),  # also of .netrc
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
_HINTS = (  # one of these is in every text that a rule changes
    *(
        "://",
        "key",
        "secret",
        "passw",
        "passphrase",
        "token",
        "sig",
        "pwd",
        "credential",
        "googleaccessid",
        "authoriz",
    ),
    *(
        "bearer",
        "login",
        "akia",
        "asia",
        "ghp_",
        "gho_",
        "ghs_",
        "ghu_",
        "ghr_",
        "github",
        "glpat-",
        "hf_",
        "wandb",
    ),
    *("local-", "xox", "sk-", "aiza", "ya29.", "eyj"),
)


def redact_url(text: str) -> str:
    """Return `text`, a URL or a message, without passwords, signatures, tokens and keys; any other
    text unchanged.
    """
    lowered = text.lower()
    if not any(hint in lowered for hint in _HINTS):  # as in most of the many lines that ranks print
        return text
    if "://" in text:
        text = _redact_urls(text)
    if "?" in text:
        text = re.sub(
            r"(?<=\?)[^\s'\"<>?]+",
            lambda match: _hide(match[0]) if _SIGNED.search(match[0]) else match[0],
            text,
        )
    for rule in _RULES:
        text = rule.sub(lambda match: f"{match[1] or ''}{HIDDEN}", text)
    return text


def redact_values(value: Any) -> Any:
    """Return plain values, or a dataclass of such, with every string in them redacted, and what
    secret names have.
    """
    if isinstance(value, str):
        return redact_url(value)
    if isinstance(value, Mapping):
        return {
            key: HIDDEN
            if isinstance(each, str) and each and _SECRET_NAME.fullmatch(str(key))
            else redact_values(each)
            for key, each in value.items()
        }
    if isinstance(value, (list, tuple)):
        return (list if isinstance(value, list) else tuple)(map(redact_values, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{name: redact_values(each) for name, each in vars(value).items()}
        )
    return value


@contextlib.contextmanager
def redact_errors() -> Iterator[None]:
    """Redact, in place, the text of an exception that the block raises, and of those that led to
    it.
    """
    try:
        yield
    except BaseException as error:
        _redact_error(error)
        raise


def _redact_error(error: BaseException | None) -> None:
    while error is not None:
        error.args = tuple(
            redact_url(each) if isinstance(each, str) else each for each in error.args
        )
        # Such as the message that a class keeps beside the arguments, and notes.
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
    # such as zip://inner.csv::https://host/outer.zip
    if chain := re.search(r"::(?=[\w+.-]+(://|::))", rest):
        return (
            f"{_redact(f'{scheme}://{rest[: chain.start()]}')}::{_redact_urls(rest[chain.end() :])}"
        )
    authority = re.split("[/?#]", rest)[0]
    # A password may have an unquoted / ? # or @ in it: it ends at the last @.
    user, at, place = rest.rpartition("@") if ":" in authority else authority.rpartition("@")
    if ":" not in authority:
        place = rest[len(user) + len(at) :]
    if at and (":" in user or not _SCHEMES_WITH_USERS.fullmatch(scheme.lower())):
        user = HIDDEN
    is_in_query = "?" in rest[: len(rest) - len(place)] and "?" not in place
    place, sharp, fragment = place.partition("#")
    address, mark, query = place.partition("&" if is_in_query else "?")
    if mark:
        mark = "?"
    return f"{scheme}://{user}{at}{address}{mark}{_hide(query)}{sharp}{_hide(fragment)}"


def _hide(query: str) -> str:
    """Return a query, or a fragment of its form, with its secrets and its signature hidden."""
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
    """Return plain values without the signatures in their URLs: a store signs a URL anew each time,
    and it is the same URL.
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
