"""Names of models, and the texts of their configs.

The shipped ones lie in the folder beside this module: the contents of the ``config.json`` that was
published with each model, so dimensions without weights. Nothing here asks the network, and nothing
imports torch or transformers: a wrong name is refused at once.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from ds_finepage.config import did_you_mean
from ds_finepage.errors import ConfigError
from ds_finepage.files import cause_of

_FOLDER = resources.files("ds_finepage.capture") / "models"
_SUFFIX = ".json"
CONFIG_FILE = "config.json"


def model_names() -> tuple[str, ...]:
    """Return the names of the shipped models, sorted."""
    files = (entry.name for entry in _FOLDER.iterdir())
    return tuple(sorted(name.removesuffix(_SUFFIX) for name in files if name.endswith(_SUFFIX)))


def config_text(name_or_path: str) -> tuple[str, str]:
    """Return the text of a model's config, and words for where it is from.

    Args:
        name_or_path: The name of a shipped model, a directory that holds a ``config.json``, or the
            path of such a file.

    Raises:
        ConfigError: There is no such model, or its config cannot be read.
    """
    if name_or_path in model_names():
        text = (_FOLDER / (name_or_path + _SUFFIX)).read_text(encoding="utf-8")
        return text, f"model {name_or_path!r}"
    path = Path(name_or_path)
    if path.is_dir():
        path = path / CONFIG_FILE
    elif not path.is_file() and len(path.parts) == 1 and path.suffix != _SUFFIX:
        raise ConfigError(
            f"unknown model {name_or_path!r}. {did_you_mean(name_or_path, model_names())} "
            f"Or give a directory with a {CONFIG_FILE}, or the path of such a file."
        )
    try:
        return path.read_text(encoding="utf-8"), f"model config {path}"
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read model config {path}: {cause_of(error)}. Give a directory with a "
            f"{CONFIG_FILE}, the path of such a file, or a shipped name: "
            f"{', '.join(model_names())}."
        ) from error
