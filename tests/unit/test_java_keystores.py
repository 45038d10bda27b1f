"""Java's key stores, as keytool of JDK 17 writes them: keystores/ has one key in two stores, and its certificate as
trusted in two more. All passwords are `changeit`, except that of the key in own.jks."""

from __future__ import annotations

import ssl
import sys
from pathlib import Path

import pytest

from fencepost.java_keystores import KeyStoreError, identity, is_key_store, pem_file, trusted_certificates

STORES = Path(__file__).parent / "keystores"
CERTIFICATE = (STORES / "own.crt").read_bytes()
PASSWORD, KEY_PASSWORD = "changeit", "keypass1"


def store(name: str) -> bytes:
    return (STORES / name).read_bytes()


@pytest.mark.parametrize(
    ("name", "password"),
    [
        ("trust.jks", PASSWORD),
        ("trust.jks", None),
        ("trust.p12", PASSWORD),
        ("own.jks", PASSWORD),
        ("own.p12", PASSWORD),
    ],
)
def test_certificates_of_a_store_are_trusted(name: str, password: str | None) -> None:
    assert is_key_store(store(name))
    assert trusted_certificates(store(name), password) == [CERTIFICATE]


@pytest.mark.parametrize(("name", "key_password"), [("own.jks", KEY_PASSWORD), ("own.p12", None)])
def test_key_of_a_store_identifies_the_client(name: str, key_password: str | None) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with pem_file(identity(store(name), PASSWORD, key_password)) as file:
        context.load_cert_chain(file)  # also checks that key and certificate belong together
        assert Path(file).stat().st_mode & 0o077 == 0
    assert not Path(file).exists()


@pytest.mark.parametrize(
    ("data", "password", "why"),
    [
        (store("trust.jks"), "wrong", "damaged, or its password is wrong"),
        (store("trust.jks")[:200] + b"x" + store("trust.jks")[201:], PASSWORD, "damaged, or its password is wrong"),
        (store("trust.jks")[:200], None, "is damaged"),
        (b"\xfe\xed\xfe\xed" + bytes(40), None, "version 0, which is unknown"),
        (store("trust.p12"), "wrong", "cannot be read with this password"),
        (store("trust.p12"), None, "needs its password"),
        (b"\xce\xce\xce\xce", None, "is a JCEKS store .convert it: keytool"),
        (b"secret", None, "neither a JKS nor a PKCS12 store"),
    ],
)
def test_unreadable_store_says_why(data: bytes, password: str | None, why: str) -> None:
    with pytest.raises(KeyStoreError, match=why):
        trusted_certificates(data, password)


@pytest.mark.parametrize(
    ("name", "key_password", "why"),
    [("own.jks", None, "a private key with another password"), ("trust.jks", None, "has 0 private keys")],
)
def test_missing_key_says_why(name: str, key_password: str | None, why: str) -> None:
    with pytest.raises(KeyStoreError, match=why):
        identity(store(name), PASSWORD, key_password)


def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.serialization", None)
    with pytest.raises(KeyStoreError, match=r"pip install .fencepost\[keystores\]"):
        trusted_certificates(store("trust.p12"), PASSWORD)
    assert trusted_certificates(store("trust.jks"), PASSWORD) == [CERTIFICATE]
