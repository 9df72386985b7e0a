"""The known drafters: folders by name, those of this machine before those that come with the project."""

from __future__ import annotations

from pathlib import Path

from drafter.settings import read_settings

WITH_THE_PROJECT = Path(__file__).resolve().parent.parent / "deploy" / "drafters"


def known() -> dict[str, Path]:
    """Every drafter folder by its name: `EYAS_HOME/drafters`, then `deploy/drafters` where there is a checkout."""
    found: dict[str, Path] = {}
    for place in (read_settings().drafters, WITH_THE_PROJECT):
        if place.is_dir():
            for folder in sorted(place.iterdir()):
                if (folder / "config.json").is_file():
                    found.setdefault(folder.name, folder)
    return found
