"""Certificates for tests, made by openssl: authorities, servers', clients' and invalid ones."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

#: Elliptic curves: an RSA key would take a second on a busy machine instead of a millisecond.
_NEW_KEY = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
HERE = "IP:127.0.0.1,DNS:localhost"


@dataclass(frozen=True)
class Certificate:
    """`both` – key and certificate in one file, as Java's PEM key stores require."""

    certificate: Path
    key: Path
    both: Path


class Authority:
    """A certificate authority. `file` – its certificate, for trust stores."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self.file = directory / f"{name}.pem"
        self._key = directory / f"{name}.key"
        _openssl(
            *("req", "-x509", "-nodes", "-days", "30", *_NEW_KEY, "-config", self._config(name)),
            *("-keyout", self._key, "-out", self.file),
        )

    def authority(self, name: str) -> Authority:
        """An intermediate one."""
        made = Authority(self._directory / name, name)
        request = self._directory / f"{name}.csr"
        _openssl("req", "-new", "-key", made._key, "-config", self._config(name), "-out", request)
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self._key, "-CAcreateserial", "-days", "20"),
            *("-extfile", self._config(name), "-extensions", "authority", "-out", made.file),
        )
        return made

    def _config(self, name: str) -> Path:
        """A complete config, independent of the machine's openssl config."""
        (file := self._directory / f"{name}.cnf").write_text(
            f"""[req]
distinguished_name = subject
x509_extensions = authority
prompt = no
[subject]
CN = {name}
[authority]
basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign,cRLSign
subjectKeyIdentifier = hash
"""
        )
        return file

    def sign(self, name: str, *, names: str = HERE, days: int = 20, password: str | None = None) -> Certificate:
        """`names` – the subject alternative names. `days` – the validity; negative for an expired certificate."""
        made = Certificate(*(self._directory / f"{name}.{end}" for end in ("pem", "key", "both.pem")))
        request, extensions = self._directory / f"{name}.csr", self._directory / f"{name}.ext"
        encrypted = ["-nodes"] if password is None else ["-passout", f"pass:{password}"]
        _openssl("req", *encrypted, *_NEW_KEY, "-config", self._config(name), "-keyout", made.key, "-out", request)
        extensions.write_text(f"subjectAltName={names}\nauthorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n")
        _openssl(
            *("x509", "-req", "-in", request, "-CA", self.file, "-CAkey", self._key, "-CAcreateserial"),
            *("-days", str(days), "-extfile", extensions, "-out", made.certificate),
        )
        made.both.write_text(made.key.read_text() + made.certificate.read_text())
        return made


def self_signed(directory: Path, *, names: str = HERE) -> Certificate:
    """As `openssl req -x509` makes it: an authority's certificate, which a server uses itself."""
    made = Certificate(*(directory / f"self-signed.{end}" for end in ("pem", "key", "both.pem")))
    (config := directory / "self-signed.cnf").write_text(
        f"[req]\ndistinguished_name = subject\nx509_extensions = all\nprompt = no\n[subject]\nCN = self-signed\n"
        f"[all]\nbasicConstraints = CA:TRUE\nsubjectAltName = {names}\n"
    )
    _openssl(
        *("req", "-x509", "-nodes", "-days", "30", *_NEW_KEY, "-config", config),
        *("-keyout", made.key, "-out", made.certificate),
    )
    made.both.write_text(made.key.read_text() + made.certificate.read_text())
    return made


def _openssl(*arguments: str | Path) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, text=True)
