"""python lower_bounds.py GROUP…: print the lowest versions that pyproject.toml allows.

One per line. GROUP is `dependencies` or an extra.
"""

import sys
from pathlib import Path

from pip._vendor.packaging.requirements import Requirement

if sys.version_info >= (3, 11):
    import tomllib
else:
    from pip._vendor import tomli as tomllib

text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
project = tomllib.loads(text)["project"]
groups = {"dependencies": project["dependencies"], **project["optional-dependencies"]}
for requirement in (Requirement(line) for group in sys.argv[1:] for line in groups[group]):
    print(str(requirement).replace(">=", "=="))
