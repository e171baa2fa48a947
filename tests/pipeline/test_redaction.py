"""What a person may see: no secret of a URI, whole or in part, and nothing that a terminal obeys."""

from __future__ import annotations

import pytest
from longscan.pipeline.storage.redaction import printable, redact, remember_secrets

SECRETS = {
    "s3://AKIA:s3cr3t@bucket/a/b": "s3://***@bucket/a/b",
    "ftp://me:p@ss@host/x": "ftp://***@host/x",
    "https://host/a.parquet?sig=s3cr3t&se=1": "https://host/a.parquet?***",
    "Cannot open 'https://me:s3cr3t@host/a?key=s3cr3t', giving up": "Cannot open 'https://***@host/a?***', giving up",
    "simplecache::s3://k:s3cr3t@b/x?v=s3cr3t": "simplecache::s3://***@b/x?***",
    "s3://bucket/who@where/x": "s3://bucket/who@where/x",
    "/data/what?/a@b:c.parquet": "/data/what?/a@b:c.parquet",
    "plain words": "plain words",
}


@pytest.mark.parametrize("text", SECRETS)
def test_redact(text: str) -> None:
    assert redact(text) == SECRETS[text]
    assert "s3cr3t" not in redact(text)


def test_parts_of_a_uri_that_is_known_are_masked_alone() -> None:
    remember_secrets("input: 's3://KEY:s3cr3t%2Bive@b/x' and https://host/x?sig=s1gnature&v=12, az://container@account/x")
    assert redact("Invalid bucket name KEY:s3cr3t%2Bive, or s3cr3t+ive; s1gnature of 12 in container") == (
        "Invalid bucket name ***, or ***; *** of 12 in container"
    )


def test_what_is_no_secret_is_not_masked() -> None:
    """A question mark in a URI may be a glob's; and a value may end with an equals sign, as base64 does."""
    remember_secrets("s3://bucket/2020-0?.parquet and s3://bucket/data?/year=2020/train.parquet, https://host/x?sig=c2lnbmF0dXJl==")
    assert redact("2020-01.parquet, data1/year=2020/train.parquet: c2lnbmF0dXJl==") == "2020-01.parquet, data1/year=2020/train.parquet: ***"


def test_what_is_shown_to_a_terminal_is_obeyed_by_none() -> None:
    shown = printable("a\x1b[2Jb\x07\r\n\tc\x9b31m\u202e and s3://k:s3cr3t@b/x, häßlich 文")
    assert shown == "a\\x1b[2Jb\\x07\\r\n\tc\\x9b31m\\u202e and s3://***@b/x, häßlich 文"
