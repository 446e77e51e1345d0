"""The long description; everything else is in pyproject.toml.

A package index shows the README without the repository around it, whose address is not known here:
the figure is left out, and links to files of the repository become plain text.
"""

import re
from pathlib import Path

from setuptools import setup

README = Path(__file__).with_name("README.md").read_text(encoding="utf-8")


def long_description(readme: str) -> str:
    """`readme` without images and without relative links."""
    without_images = re.sub(r"^!\[.*\n\n", "", readme, flags=re.MULTILINE)
    return re.sub(r"\[([^\]]+)\]\((?!https://)[^)]+\)", r"\1", without_images)


setup(long_description=long_description(README), long_description_content_type="text/markdown")
