"""Upload a folder as a model: Hugging Face by huggingface_hub, ModelScope by modelscope_hub, its own client."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anabatic.core import extras
from anabatic.core.errors import ConfigError, DataError
from anabatic.hub import huggingface, modelscope_api
from anabatic.hub.model_download import Hub

_WEIGHT_PATTERNS = ["*.safetensors", "*.gguf"]


@dataclass(frozen=True)
class UploadTarget:
    """Destination of a model.

    Attributes:
        name: `OWNER/NAME`; it is created if it does not exist.
        private: of a repository that is created: only its owner sees it.
        revision: branch, created if it does not exist; empty: the hub's default.
        license: identifier of SPDX, of a repository that is created on ModelScope.
    """

    hub: Hub
    name: str
    private: bool = True
    revision: str = ""
    license: str = ""

    @property
    def page_url(self) -> str:
        """The page of the model."""
        endpoint = huggingface.get_endpoint() if self.hub == "huggingface" else modelscope_api.get_endpoint()
        return f"{endpoint}/{'models/' if self.hub == 'modelscope' else ''}{self.name}"


def upload_model(target: UploadTarget, folder: Path, message: str) -> None:
    """Create the repository where it does not exist, and upload all files of a folder as one commit; on
    ModelScope as two or more, the weights first.

    Files of the repository that are not in the folder stay. What was uploaded before an error is not sent again.

    Raises:
        ConfigError: there is no token, or the hub's client is not installed.
        DataError: the hub refuses or cannot be reached.
    """
    _UPLOADERS[target.hub](target, folder, message)


def _upload_to_huggingface(target: UploadTarget, folder: Path, message: str) -> None:
    from huggingface_hub import HfApi

    if huggingface.is_offline():
        raise ConfigError("HF_HUB_OFFLINE is set, which forbids uploads", "unset HF_HUB_OFFLINE")
    api = HfApi(endpoint=huggingface.get_endpoint())
    with _translate_huggingface_errors(target):
        api.create_repo(target.name, private=target.private, exist_ok=True)
        if target.revision:
            api.create_branch(target.name, branch=target.revision, exist_ok=True)
        api.upload_folder(
            repo_id=target.name, folder_path=folder, commit_message=message, revision=target.revision or None
        )


@contextmanager
def _translate_huggingface_errors(target: UploadTarget) -> Iterator[None]:
    import huggingface_hub
    from huggingface_hub import errors

    token_hint = "set HF_TOKEN to a token that may write, or run `hf auth login`"
    if not sys.stderr.isatty():
        huggingface_hub.utils.disable_progress_bars()
    try:
        yield
    except errors.LocalTokenNotFoundError as error:
        raise ConfigError(f"{target.page_url}: there is no token", token_hint) from error
    except errors.HFValidationError as error:
        raise ConfigError(f"{target.name} is not a name: {huggingface.first_line(error)}", "use OWNER/NAME") from error
    except errors.HfHubHTTPError as error:
        raise _make_refusal(target, error.response.status_code, huggingface.first_line(error), token_hint) from error
    except (RuntimeError, ValueError) as error:  # of files that go to its storage
        if isinstance(error.__cause__, errors.HfHubHTTPError):
            status = error.__cause__.response.status_code
            raise _make_refusal(target, status, huggingface.first_line(error), token_hint) from error
        raise _make_transfer_error(target, error) from error
    except Exception as error:  # the HTTP library depends on the version of huggingface_hub
        if not huggingface.is_transfer_error(error):
            raise
        raise _make_transfer_error(target, error) from error


def _upload_to_modelscope(target: UploadTarget, folder: Path, message: str) -> None:
    client = extras.import_optional("modelscope_hub", "the upload to ModelScope")
    token_hint = "set MODELSCOPE_API_TOKEN to an access token of https://modelscope.cn/my/myaccesstoken"
    if not modelscope_api.get_token():
        raise ConfigError(f"{target.page_url}: there is no token", token_hint)
    # Read by the client when it is made: no folder ~/.modelscope, no files beside ours.
    api = client.HubApi(endpoint=modelscope_api.get_endpoint(), token=modelscope_api.get_token())
    logging.getLogger("modelscope_hub").setLevel(logging.CRITICAL)  # the error says it
    try:
        _create_modelscope_repo(api, target)
        # Weights first: where one of them fails, its client would still commit the other files.
        for patterns in ({"allow_patterns": _WEIGHT_PATTERNS}, {"ignore_patterns": _WEIGHT_PATTERNS}):
            with redirect_stdout(io.StringIO()):  # it prints a report
                api.upload_folder(
                    target.name,
                    "model",
                    folder,
                    commit_message=message,
                    revision=target.revision or None,
                    use_cache=False,
                    disable_tqdm=not sys.stderr.isatty(),
                    **patterns,
                )
    except client.errors.APIError as error:
        status = error.status_code or 0
        raise _make_refusal(target, status, huggingface.first_line(error), token_hint) from error
    except (client.errors.HubError, OSError) as error:
        raise _make_transfer_error(target, error) from error


def _create_modelscope_repo(api: Any, target: UploadTarget) -> None:
    if api.repo_exists(target.name, "model"):
        return
    if not target.license:
        raise ConfigError(
            f"{target.page_url} does not exist yet, and ModelScope creates no model without a license",
            "say under which license you publish it, for example --license apache-2.0",
        )
    api.create_repo(target.name, "model", visibility="private" if target.private else "public", license=target.license)


def _make_refusal(target: UploadTarget, status: int, reason: str, token_hint: str) -> DataError | ConfigError:
    if status in (401, 403):
        return ConfigError(f"{target.page_url}: the token may not write there ({status}: {reason})", token_hint)
    retry = "try again later: what was uploaded is not sent again"
    if status == 429 or status >= 500:
        return DataError(f"{target.page_url} answers {status}: {reason}", retry)
    return DataError(f"{target.page_url} answers {status}: {reason}", "look at the name, the branch and the license")


def _make_transfer_error(target: UploadTarget, error: Exception) -> DataError:
    mirror = "HF_ENDPOINT" if target.hub == "huggingface" else "MODELSCOPE_ENDPOINT"
    return DataError(
        f"{target.page_url}: the upload broke off: {huggingface.first_line(error)}",
        f"try again: what was uploaded is not sent again; {mirror} names another address",
    )


_UPLOADERS = {"huggingface": _upload_to_huggingface, "modelscope": _upload_to_modelscope}
