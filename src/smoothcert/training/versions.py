"""The versions of the software and the hardware that a result is computed with."""

import os
import platform
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import scipy
import torch

from smoothcert import __version__

CHECKOUT = Path(__file__).parents[3]
"""The root of the repository, if this file is in its `src` folder."""


@cache
def source_commit(root: Path = CHECKOUT) -> dict[str, str]:
    """{"commit": ...} if `root` is a git checkout, with `-dirty` if it has changes; otherwise {}."""
    if not (root / ".git").exists():
        return {}
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    # Variables that git sets for its hooks would point to another repository.
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GIT_")}
    try:
        commit = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True, env=clean).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return {"commit": commit.strip()} if commit.strip() else {}


def versions(device: torch.device) -> dict[str, str]:
    """Versions of the software, and the hardware, that a result is computed with."""
    hardware = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    packages = {
        "smoothcert": __version__,
        **source_commit(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
    }
    return {**packages, "python": platform.python_version(), "device": f"{device.type} ({hardware})"}
