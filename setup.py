"""Package metadata. The exact, tested versions are in requirements.txt and constraints.txt; here are the bounds."""

import os
import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent


def read_version() -> str:
    namespace: dict[str, str] = {}
    exec((ROOT / "ppdiffusers_tome" / "_version.py").read_text(encoding="utf-8"), namespace)
    return namespace["__version__"]


REPOSITORY = os.environ.get("REPOSITORY", "").rstrip("/")  # the address of the repository: https://…


def long_description() -> str:
    """README.md for a package index, which has none of the files that it links to.

    Links and images get absolute addresses in REPOSITORY. Without it links become plain text, and images go.
    """

    def absolute(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        if target.startswith(("https:", "http:", "#")):
            return link[0]
        if not REPOSITORY:
            return "" if image else text
        return f"{image}[{text}]({REPOSITORY}/{'raw' if image else 'blob'}/main/{target})"

    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"(!?)\[([^]]*)\]\(([^)\s]+)\)", absolute, text)


SERVE = ["fastapi", "uvicorn", "prometheus_client", "python-multipart>=0.0.18"]
# Paddle 2.6's programs need paddle2onnx 1.2, those of Paddle 3 need 2.1.
ONNX = ["paddle2onnx>=1.2.11,<2.2", "onnx>=1.16.1,<1.18", "onnxruntime>=1.23,<1.33"]
OPENVINO = ["openvino>=2026.4,<2027"]

setup(
    name="ppdiffusers_tome",
    version=read_version(),
    description="Token merging (ToMe) for PaddlePaddle's ppdiffusers: faster diffusion pipelines without training",
    long_description=long_description(),
    long_description_content_type="text/markdown",
    project_urls={"Source": REPOSITORY} if REPOSITORY else {},
    author="The ppdiffusers_tome authors",
    license_expression="Apache-2.0",  # setuptools 77; earlier ones, which only make editable installs here, ignore it
    license_files=["LICENSE", "NOTICE"],
    keywords="paddlepaddle ppdiffusers stable-diffusion token-merging tome inference",
    classifiers=[
        "Development Status :: 4 - Beta",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.10",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Typing :: Typed",
    ],
    packages=find_packages(include=["ppdiffusers_tome", "ppdiffusers_tome.*"]),
    package_data={
        "ppdiffusers_tome": [
            "py.typed",
            "requirements/*.txt",
            "serving/page/*.*",
            "serving/page/vendor/*/*",
            "serving/*.txt",
            "export/*.md",
        ]
    },
    zip_safe=False,
    python_requires=">=3.10,<3.13",
    # Paddle itself is an extra: paddlepaddle and paddlepaddle-gpu are one module, and installing both breaks it.
    # ppdiffusers has no lower bound because its nightly builds are 0.0.0; the import rejects those before 0.29.
    # The last four are bounds that ppdiffusers and paddlenlp lack: above them, they do not import, or need NumPy 2.
    # Others drift too, so the tested way has versions as constraints: pip install -c constraints.txt ".[cpu]"
    # Paddle and paddlenlp import pip and setuptools and do not declare them; not every environment has them.
    install_requires=[
        "ppdiffusers<0.31",
        "paddlenlp>=2.8.1",
        "numpy<2",
        "packaging",
        "pillow",
        "pip",
        "pydantic>=2.9,<3",
        "setuptools",
        "tqdm",
        "typing_extensions>=4.6",
        "huggingface_hub<0.26",
        "aistudio-sdk<0.3",
        "datasets<4",
        "pyarrow<19",
    ],
    # Each adds to the locked set and replaces nothing of it. The test tools are no extra: their newest versions would.
    extras_require={
        "cpu": ["paddlepaddle>=2.6.2", *ONNX],  # the default runtime on a CPU is ONNX Runtime
        "gpu": ["paddlepaddle-gpu>=2.6.2"],
        "serve": SERVE,
        "onnx": ONNX,
        "openvino": OPENVINO,
        "ray": [*SERVE, "ray>=2.52,<2.53"],
    },
)
