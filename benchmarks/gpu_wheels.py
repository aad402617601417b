"""What `benchmarks.gpu` needs on a machine without a network, as wheels in a folder.

    python -m benchmarks.gpu_wheels FOLDER

For Python 3.12 on x86-64 with PyTorch 2.11 or later for CUDA 13, transformers and accelerate there. They are
gym_serve, and what `wheels.txt` in `benchmarks/gpu_parts` names, vLLM and the weights of SmolLM2 among it:
360 MB. vLLM is packed again without what this model on a Hopper GPU does not use: kernels for other models
and GPUs, and headers.
On that machine, `make gpu GYM_WHEELS=FOLDER` takes them.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import zipfile
from pathlib import Path

from benchmarks.harness.work import ROOT

LEFT_OUT = (
    "third_party/deep_gemm/",
    "third_party/fmha_sm100/",
    "vllm/vllm-rs",
    "_flashkda_C.",
    "_deepselect_C.",
    "_flashmla_C.",
    "_flashmla_extension_C.",
    "_qutlass_C.",
    "_vllm_fa2_C.",
)
"""Parts of names of vLLM's files: Hopper runs `_vllm_fa3_C`."""

_LIST = Path(__file__).parent / "gpu_parts" / "wheels.txt"
_GLIBC = (17, 24, 26, 27, 28, 31, 34, 35)  # pip matches these numbers exactly


def download(folder: Path) -> None:
    """Download the wheels."""
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    words += ["--python-version", "3.12", "--implementation", "cp", "--dest", str(folder)]
    for number in _GLIBC:
        words += ["--platform", f"manylinux_2_{number}_x86_64"]
    words += ["--platform", "manylinux2014_x86_64", "--platform", "manylinux1_x86_64"]
    subprocess.run([*words, "--requirement", str(_LIST)], check=True)
    own = ["wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)]  # for its entry points
    subprocess.run([sys.executable, "-m", "pip", *own], check=True)


def slimmed(wheel: Path) -> None:
    """Pack a wheel again without `LEFT_OUT`, and smaller."""
    slim = wheel.with_suffix(".slim")
    with zipfile.ZipFile(wheel) as given, zipfile.ZipFile(slim, "w", zipfile.ZIP_LZMA) as kept:
        for name in given.namelist():
            if not any(part in name for part in LEFT_OUT):
                kept.writestr(name, given.read(name))
    slim.replace(wheel)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("folder", type=Path, help="created if it is not there")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    download(folder)
    for wheel in folder.glob("vllm-*.whl"):
        slimmed(wheel)
    wheels = list(folder.glob("*.whl"))
    print(f"{len(wheels)} wheels, {sum(wheel.stat().st_size for wheel in wheels) / 1e6:.0f} MB, in {folder}")


if __name__ == "__main__":
    main()
