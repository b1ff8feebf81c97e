"""Parses names on the Hugging Face hub: ``org/name``, ``org/name@revision``, ``org/name:file.gguf``."""

import re
from dataclasses import dataclass, field

_ADDRESS = re.compile(
    r"https?:/+[\w.:-]+/(?P<repository>[\w.-]+/[\w.-]+)"
    r"(?:/(?:tree|blob|resolve)/(?P<revision>[^/?]+)(?:/(?P<file>[^?]+\.gguf))?)?/?(?:\?.*)?",
    re.ASCII,
)
"""The address of a repository in a browser, of a revision, or of a GGUF file in it. ``pathlib`` makes one of two
slashes."""
_WRITTEN = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:@(?P<revision>[^:@]+))?(?::(?P<file>[^:@]+))?", re.ASCII)


@dataclass(frozen=True)
class HubName:
    """The name of a repository on the hub. A ``revision`` of None means its main branch, a ``file`` of None the whole
    model. ``named_by`` is the flag that stands for the repository, such as ``--target-model NAME``; None if the user
    typed the name itself."""

    repository: str
    revision: str | None = None
    file: str | None = None
    named_by: str | None = field(default=None, compare=False)

    def __str__(self) -> str:
        revision, file = self.revision and f"@{self.revision}", self.file and f":{self.file}"
        return self.repository + (revision or "") + (file or "")


def of_address(text: str) -> HubName | None:
    """Return the name of the repository whose address in a browser is ``text``; None if it is no such address."""
    found = _ADDRESS.fullmatch(text)
    if found is None:
        return None
    revision = None if found["revision"] == "main" else found["revision"]
    return HubName(found["repository"], revision, found["file"])


def hub_name(text: str) -> HubName | None:
    """Return ``text`` as a name on the hub, or None if it is not of that form. The caller must check first that no such
    path exists."""
    written = _WRITTEN.fullmatch(text)
    if written is None or written["repository"].lower().endswith(".gguf"):  # a path to a GGUF file
        return None
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(written["repository"])
    except HFValidationError:
        return None
    return HubName(written["repository"], written["revision"], written["file"])
