"""Flopwatch's version, also in a checkout that is not installed. Standard library only."""

from importlib import metadata

from flopwatch.packages import FOLDER, OURS


def own_version() -> str:
    """Return the version of the installed Flopwatch or, where none is installed, of the checkout."""
    try:
        return metadata.version(OURS)
    except metadata.PackageNotFoundError:
        import tomllib
        from pathlib import Path

        project = tomllib.loads((Path(FOLDER) / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        return str(project["version"])
