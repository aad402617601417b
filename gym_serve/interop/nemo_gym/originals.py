"""The code of NeMo Gym's resources servers: those without a counterpart here are hosted (``type: nemo_gym``).

Whether there is such a server is seen from its code, ``resources_servers/{implementation}/{entrypoint}``: in
a folder above one of the configs, as in a checkout, or in the NeMo Gym that is installed here. A name without
code is a mistake, and stays one. Nothing is imported: NeMo Gym need not be installed where configs are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path

from gym_serve.interop.nemo_gym.instances import Instance

__all__ = ["code_of", "file_of", "import_path_of", "requirements_of"]

_OWN = ("-e", "nemo-gym", "nemo_gym")  # NeMo Gym itself, as its own servers name it


def code_of(instance: Instance, configs: Iterable[Path]) -> Path | None:
    """The file of a resources server's class; None if there is none, or it is no resources server.

    Args:
        instance: the server.
        configs: the configs that name it.
    """
    if instance.kind != "resources" or not instance.implementation.isidentifier():
        return None
    file = Path(instance.section, instance.implementation, _entrypoint(instance))
    folders = [folder for config in configs for folder in config.resolve().parents]
    found = (folder / file for folder in (*folders, *_installed(instance.section)))
    return next((path for path in found if path.is_file()), None)


def file_of(instance: Instance, configs: Iterable[Path], name: str) -> Path | None:
    """A file that a setting of a server names; None if it is not there.

    NeMo Gym runs a server in the folder of its code. Without the code, the file is looked for in the folders
    of the configs and those above them.
    """
    code = code_of(instance, configs)
    folders = [code.parent] if code is not None else []
    folders += [folder for config in configs for folder in config.resolve().parents]
    return next((file for folder in folders if (file := folder / name).is_file()), None)


def import_path_of(instance: Instance) -> str:
    """The module of the server's class."""
    return f"{instance.section}.{instance.implementation}.{Path(_entrypoint(instance)).stem}"


def requirements_of(code: Path) -> list[str]:
    """The packages that the server needs beside NeMo Gym, as its ``requirements.txt`` has them."""
    file = code.with_name("requirements.txt")
    if not file.is_file():
        return []
    lines = (line.partition(" #")[0].strip() for line in file.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line and line[0] != "#" and not line.startswith(_OWN)]


def _entrypoint(instance: Instance) -> str:
    entrypoint = instance.settings.get("entrypoint")
    name = Path(entrypoint).name if isinstance(entrypoint, str) else ""
    return name if Path(name).stem.isidentifier() else "app.py"


def _installed(package: str) -> Iterator[Path]:
    """Folders in which a package of NeMo Gym's wheel lies."""
    spec = find_spec(package)
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        yield Path(place).parent
