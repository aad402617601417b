"""NVIDIA NeMo Gym's configs, as graph files.

    imported = import_config(["benchmarks/aime24/config.yaml"])
    print(imported.yaml())

A NeMo Gym config is nested (instance: server type: implementation: settings), pulls others in
(``config_paths``), derives instances from others (``_inherit_from``, ``_copy``, ``_delete_key``) and refers
to values (``${...}``, OmegaConf's). All of that is worked out here, without NeMo Gym or OmegaConf; what
has to come from outside becomes an environment variable. A resources server that has no counterpart here is
hosted as it is, with the settings that it has there.
"""

from gym_serve.interop.nemo_gym.importing import Imported, import_config

__all__ = ["Imported", "import_config"]
