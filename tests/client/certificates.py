"""Real certificates for tests: an authority, a server on this machine, a client."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Signed:
    """A certificate and its key, PEM files."""

    certificate: Path
    key: Path


@dataclass(frozen=True)
class Authority:
    """Signs; `certificate` is what to trust."""

    folder: Path
    name: str

    @property
    def certificate(self) -> Path:
        return self.folder / f"{self.name}.pem"

    @property
    def key(self) -> Path:
        return self.folder / f"{self.name}.key"

    def sign(self, name: str, hosts: str) -> Signed:
        """A certificate for `hosts`, such as "DNS:localhost,IP:127.0.0.1"."""
        signed = Signed(self.folder / f"{name}.pem", self.folder / f"{name}.key")
        _openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
            *("-CA", self.certificate, "-CAkey", self.key, "-subj", f"/CN={name}", "-days", "2"),
            *("-addext", f"subjectAltName={hosts}", "-addext", "basicConstraints=CA:FALSE"),
            *("-keyout", signed.key, "-out", signed.certificate),
        )
        return signed

    def sign_for(self, name: str, hosts: str, start: str, end: str) -> Signed:
        """The same from and to dates such as "20200101000000Z"."""
        signed, asked = self.sign(name, hosts), self.folder / f"{name}.csr"
        _openssl("req", "-new", "-key", signed.key, "-subj", f"/CN={name}", "-out", asked)
        config, names = self.folder / f"{name}.cnf", self.folder / f"{name}.ext"
        config.write_text(
            f"[ca]\ndefault_ca=a\n[a]\nnew_certs_dir={self.folder}\ndatabase={self.folder}/db\nserial={self.folder}/next\n"
            "default_md=sha256\npolicy=p\n[p]\ncommonName=supplied\n"
        )
        (self.folder / "db").write_text("")
        names.write_text(f"subjectAltName={hosts}\nbasicConstraints=CA:FALSE\n")
        _openssl(
            *("ca", "-batch", "-notext", "-rand_serial", "-config", config, "-extfile", names),
            *("-cert", self.certificate, "-keyfile", self.key, "-startdate", start),
            *("-enddate", end, "-in", asked, "-out", signed.certificate),
        )
        return signed


def authority(folder: Path, name: str = "ca") -> Authority:
    """A new one."""
    made = Authority(folder, name)
    _openssl(
        *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"),
        *("-subj", f"/CN={name}", "-days", "2", "-keyout", made.key, "-out", made.certificate),
    )
    return made


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=60)
