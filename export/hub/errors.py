"""Turns the errors of the hub and of huggingface_hub into one line that says what to type."""

from collections.abc import Iterator
from contextlib import contextmanager

import httpx2
from huggingface_hub import constants
from huggingface_hub.errors import (
    DisabledRepoError,
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from eagle3.export.configuration.hub_names import HubName

_OTHER_LENGTH = "Consistency check failed"  # the message of an error of huggingface_hub that has no class but OSError
LOG_IN = "type hf auth login, or set HF_TOKEN"


class Unreachable(OSError):
    """Raised if the hub gives no answer: in offline mode, without a connection, or while the hub is down."""


@contextmanager
def one_line(name: HubName, flag: str) -> Iterator[None]:
    """Replace the errors about ``name``, which the user typed after ``flag``, by one line each.

    Raises:
        FileNotFoundError: a repository, revision or file that does not exist
        PermissionError: a repository that this user may not read
        Unreachable: the hub gives no answer
        OSError: a download that went wrong
    """
    repository, hub = name.repository, constants.ENDPOINT
    try:
        yield
    except GatedRepoError as error:
        raise PermissionError(
            f"{repository} is gated: accept its terms on {hub}/{repository}, then {LOG_IN} to a token of that account"
        ) from error
    except DisabledRepoError as error:
        raise PermissionError(f"{repository} is disabled on {hub}: type {flag} with another repository") from error
    except RepositoryNotFoundError as error:
        advice = "correct the name" if name.named_by is None else f"type {flag} with another"
        raise FileNotFoundError(
            f"{_asked(name, flag)}{hub} has no repository {repository} that this user may see: {advice}; if it is "
            f"private, {LOG_IN}"
        ) from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(
            f"{repository} has no revision {name.revision}: name a branch, a tag or a commit of {hub}/{repository}"
        ) from error
    except OfflineModeIsEnabled as error:
        raise Unreachable(_offline(name, flag)) from error
    except LocalEntryNotFoundError as error:  # it is a subclass of EntryNotFoundError
        line = _offline(name, flag) if constants.HF_HUB_OFFLINE else _silent(name, flag, error)
        raise Unreachable(line) from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(f"{name}: the hub lists a file that it does not have ({_first(error)})") from error
    except HfHubHTTPError as error:
        code = error.response.status_code
        kind = Unreachable if code >= 500 or code == 429 else PermissionError if code in (401, 403) else OSError
        advice = f"{LOG_IN} to a token that may read it" if kind is PermissionError else "try again later"
        raise kind(f"{hub} answered {code} for {repository} ({_first(error)}): {advice}") from error
    except httpx2.TransportError as error:
        raise Unreachable(_silent(name, flag, error)) from error
    except OSError as error:
        if not str(error).startswith(_OTHER_LENGTH):
            raise
        raise OSError(
            f"a downloaded file of {name} has another length than the hub says ({_first(error)}): type the command "
            "again; if that does not help, the upload is damaged: name another revision"
        ) from error


def _asked(name: HubName, flag: str) -> str:
    """Return the beginning of an error: what the user typed, as a path too if it may have been meant as one."""
    return f"{flag} {name}: no such path exists here, and " if name.named_by is None else f"{name.named_by}: "


def _offline(name: HubName, flag: str) -> str:
    advice = "correct the path, or " if name.named_by is None else ""
    return (
        f"{_asked(name, flag)}the cache {constants.HF_HUB_CACHE} does not hold {name} completely, and HF_HUB_OFFLINE "
        f"is set: {advice}unset HF_HUB_OFFLINE to ask the hub"
    )


def _silent(name: HubName, flag: str, error: Exception) -> str:
    advice = "correct the path, or " if name.named_by is None else ""
    return (
        f"{_asked(name, flag)}the cache {constants.HF_HUB_CACHE} does not hold {name} completely, and "
        f"{constants.ENDPOINT} cannot be reached ({_first(error)}): {advice}check the connection and HF_ENDPOINT and "
        "type the command again: complete files are not fetched twice"
    )


def _first(error: Exception) -> str:
    """Return the first line of the error's message."""
    return next(iter(str(error).strip().splitlines()), "") or type(error).__name__
