"""`gym-serve dataset push`: files of rollouts, or of anything else, to where data sets are kept."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gym_serve.cli.options import JsonOption
from gym_serve.cli.printing import echo, print_json
from gym_serve.types.errors import InvalidRequest, Unavailable

_EXTRA = "pip install 'gym-serve[data]'"


def push(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Files that collect, eval or export wrote.")
    ],
    *,
    to: Annotated[
        str,
        typer.Option(
            metavar="PLACE",
            help="ORGANISATION/NAME on the Hugging Face hub, or a URL such as s3://BUCKET/FOLDER.",
        ),
    ],
    public: Annotated[
        bool, typer.Option("--public", help="Make a new data set of the hub public; else it is private.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Push files to a data set of the hub in one commit, or to a store of objects.

    The hub's token is HF_TOKEN, or that of hf auth login. A store's client is that of
    fsspec (s3fs, gcsfs), with its own credentials. A file of the same name is replaced.

    Exit status: 0; 1 if a file is missing, or the place refuses them.

    Example: gym-serve dataset push out.jsonl out_run.json --to ada/rollouts
    """
    if missing := [str(file) for file in files if not file.is_file()]:
        raise InvalidRequest(f"{', '.join(missing)}: no such file")
    names = [file.name for file in files]
    if doubled := {name for name in names if names.count(name) > 1}:
        raise InvalidRequest(f"two files are called {', '.join(sorted(doubled))}: push them to two places")
    place = _to_url(files, to) if "://" in to else _to_hub(files, to, public=public)
    if as_json:
        print_json({"ok": True, "place": place, "files": names})
    else:
        echo(f"{', '.join(names)}: {place}")


def _to_hub(files: Sequence[Path], name: str, *, public: bool) -> str:
    try:
        from huggingface_hub import CommitOperationAdd, HfApi
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    except ImportError:
        raise InvalidRequest(f"the hub needs its client: {_EXTRA}") from None
    hub = HfApi()
    try:
        url = hub.create_repo(name, repo_type="dataset", private=not public, exist_ok=True)
        hub.create_commit(
            name,
            [CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=file) for file in files],
            commit_message=f"{', '.join(file.name for file in files)}, by gym-serve",
            repo_type="dataset",
        )
    except HFValidationError as error:
        raise InvalidRequest(f"--to must be ORGANISATION/NAME or a URL, got {name!r}: {error}") from None
    except HfHubHTTPError as error:
        status = error.response.status_code
        advice = "; HF_TOKEN must be a token that may write there" if status in (401, 403, 404) else ""
        raise Unavailable(f"the hub refused {name}: {status} {error.server_message or ''}{advice}") from None
    # What its HTTP client raises has the classes of that client, which its versions choose.
    except Exception as error:
        raise Unavailable(f"the hub cannot be reached: {error}") from None
    return str(url)


def _to_url(files: Sequence[Path], url: str) -> str:
    try:
        import fsspec
    except ImportError:
        raise InvalidRequest(f"{url} needs fsspec: {_EXTRA}") from None
    try:
        store, folder = fsspec.core.url_to_fs(url)
        store.makedirs(folder, exist_ok=True)
        for file in files:
            with file.open("rb") as source, store.open(f"{folder.rstrip('/')}/{file.name}", "wb") as target:
                shutil.copyfileobj(source, target)
    except (ImportError, ValueError) as error:  # it names the store's package, or a scheme that there is not
        raise InvalidRequest(f"{url}: {error}") from None
    except OSError as error:
        raise Unavailable(f"{url} cannot be written: {error}") from None
    return url
