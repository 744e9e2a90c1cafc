"""Models of a hub: which names a model may have, the folders that a download needs, and whose format a model has."""

import json
import re
from pathlib import Path
from typing import Any

from ppdiffusers import ConfigMixin, DiffusionPipeline
from ppdiffusers.utils import FROM_DIFFUSERS, FROM_HF_HUB, PPDIFFUSERS_CACHE

from .errors import ToMeConfigError

# Which hub names are of, chosen when ppdiffusers is imported.
HUB = "Hugging Face's hub" if FROM_HF_HUB else "ppdiffusers' hub (FROM_HF_HUB=1 in the environment: Hugging Face's)"
HUB_NAME = r"\w[\w.-]*/\w[\w.-]*"


def prepare_download(model: str | Path) -> None:
    """Let the next `from_pretrained` download a pipeline by its name; does nothing for a folder.

    PaddleNLP 2.8.1 stores tokenizers, text encoders and image processors in folders of its cache that it does not make
    (PaddleNLP #9023), so without this the first download of a pipeline fails. This downloads `model_index.json`, if it
    is not in the cache, and makes a folder for each component that it lists.

    Args:
        model: name on ppdiffusers' hub (owner/name), or a folder. Models of Hugging Face's hub do not need this.

    Raises:
        ToMeConfigError: it is neither a folder nor such a name.
        OSError: ppdiffusers cannot download the index, or the folders cannot be made.

    Example:
        ppdiffusers_tome.prepare_download("runwayml/stable-diffusion-v1-5")
        pipe = StableDiffusionPipeline.from_pretrained("runwayml/stable-diffusion-v1-5")
    """
    if not Path(model).is_dir():
        check_hub_name(str(model))
        download_index(str(model))


def download_index(model: str) -> dict[str, Any]:
    """What the `model_index.json` of a hub's model contains; makes the folders as `prepare_download` describes."""
    index = dict(DiffusionPipeline.load_config(model))
    for name, part in index.items():
        if isinstance(part, list):
            Path(PPDIFFUSERS_CACHE, model, name).mkdir(parents=True, exist_ok=True)
    return index


def has_diffusers_format(cls: type[ConfigMixin], model: str) -> bool:
    """Whether a model has the configs of diffusers and the weights of PyTorch, as on Hugging Face's hub.

    ppdiffusers loads such a model with from_diffusers=True. A folder with weights of Paddle is none, whatever its
    configs say. Those of ppdiffusers' hub are not asked: its models have Paddle's weights, unless FROM_DIFFUSERS=1 in
    the environment tells ppdiffusers otherwise.

    Args:
        cls: DiffusionPipeline, or ControlNetModel for a ControlNet alone.
        model: folder, or hub name, whose config is downloaded.

    Raises:
        OSError: there is no config.
    """
    if not Path(model).is_dir() and not FROM_HF_HUB:
        return FROM_DIFFUSERS
    _, file = cls.load_config(model, return_config_file=True)  # what it returns first has no version of diffusers
    config = json.loads(Path(file).read_text(encoding="utf-8"))
    if "_diffusers_version" not in config or "_ppdiffusers_version" in config:
        return False
    folders = (Path(model), *(Path(model, component) for component in config))
    return not any(any(folder.glob("diffusion_paddle_model*")) for folder in folders)


def check_hub_name(model: str) -> None:
    """Raise ToMeConfigError unless a model that is not a folder may be one of a hub."""
    if not re.fullmatch(HUB_NAME, model):
        raise ToMeConfigError(f"{model} is neither a folder nor a hub name (owner/name).")
    owner = Path(model).parent
    if owner.is_dir():
        raise ToMeConfigError(
            f"{model} does not exist. It is not taken for a hub name (owner/name), because {owner} is a folder here: "
            "for a model of a hub, run this in another folder."
        )
