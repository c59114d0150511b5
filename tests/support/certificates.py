"""Certificates of a test's own authorities, as files that settings can name."""

from __future__ import annotations

from pathlib import Path

import trustme


class Authority:
    """An authority with its files in a folder."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder, self._name, self._count = folder, name, 0
        folder.mkdir(parents=True, exist_ok=True)
        self.ca = trustme.CA()
        self.path = str(folder / f"{name}.pem")
        self.ca.cert_pem.write_to_path(self.path)

    def issue(self, *names: str) -> tuple[str, str]:
        """The paths of a new certificate for these names, and of its key."""
        self._count += 1
        cert, key = (str(self._folder / f"{self._name}-{self._count}.{kind}") for kind in ("crt", "key"))
        self.issue_to(cert, key, *names)
        return cert, key

    def issue_to(self, cert: str, key: str, *names: str) -> None:
        """Write a new certificate and its key over these files."""
        made = self.ca.issue_cert(*(names or ("127.0.0.1", "localhost")))
        Path(cert).write_bytes(b"".join(pem.bytes() for pem in made.cert_chain_pems))
        made.private_key_pem.write_to_path(key)

    def spoil(self, cert: str) -> None:
        """As if somebody were still writing it."""
        Path(cert).write_text("not yet complete")
