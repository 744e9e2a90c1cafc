"""Replacements for UNet, ControlNet, text encoder and VAE in an ordinary pipeline, which run exported programs."""

import logging
import threading
import time
from types import SimpleNamespace
from typing import Any

import paddle
from paddlenlp.transformers.clip.modeling import CLIPTextModelOutput
from paddlenlp.transformers.model_outputs import BaseModelOutputWithPooling
from ppdiffusers import AutoencoderKL, ControlNetModel, UNet2DConditionModel
from ppdiffusers.models.autoencoder_kl import AutoencoderKLOutput
from ppdiffusers.models.unet_2d_condition import UNet2DConditionOutput
from ppdiffusers.models.vae import DecoderOutput, DiagonalGaussianDistribution
from ppdiffusers.transformers import CLIPTextModel

from ..errors import ToMeConfigError
from .manifest import Manifest, ProgramFile
from .ratios import ratio_name
from .runtime import Load, Program, return_memory
from .sizes import Size
from .stand_in import StandIn

logger = logging.getLogger(__name__)


class ExportedModel(StandIn):
    """Base class: a model that runs programs, which are loaded when they first run, whatever thread runs them.

    Args:
        max_programs: largest number of them in memory: before a further program is loaded, the least recently used is
            unloaded. None: they stay loaded.
    """

    loads = 0  # number of programs that were loaded so far
    loading_seconds = 0.0  # the time that it took

    def __init__(
        self, config: dict[str, Any], manifest: Manifest, load: Load, name: str, max_programs: int | None = None
    ) -> None:
        super().__init__(config)
        self._programs = manifest.programs_of(name)
        self._manifest = manifest
        self._load = load
        self._max_programs = max_programs
        self._loaded: dict[ProgramFile, Program] = {}  # in the order of use: the program that ran last is last
        self._loading = threading.Lock()  # guards `_loaded`, so that no program is loaded twice

    def __getstate__(self) -> dict[str, Any]:
        """Copies have none of its programs, and load their own."""
        return {**vars(self), "_loaded": {}, "_loading": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _loading=threading.Lock())

    def _loaded_program(self, file: ProgramFile) -> Program:
        with self._loading:
            program = self._loaded.pop(file, None)
            if program is None:
                while self._max_programs is not None and len(self._loaded) >= self._max_programs:
                    # Before loading, so that memory never holds a further program.
                    del self._loaded[next(iter(self._loaded))]
                program = self._load_program(file)
            self._loaded[file] = program
            return program

    def _load_program(self, file: ProgramFile) -> Program:
        return_memory()  # free the memory of unloaded programs
        start = time.perf_counter()
        program = self._load(file)
        return_memory()  # free what only loading needed
        seconds = time.perf_counter() - start
        self.loads, self.loading_seconds = self.loads + 1, self.loading_seconds + seconds
        if self._max_programs is not None:
            logger.info("loaded %s for %s at ratio %s in %.1f s", file.model, file.size, file.ratio, seconds)
        return program


class ExportedTextEncoder(ExportedModel, CLIPTextModel):
    """A text encoder of Stable Diffusion or SDXL. Called like the original."""

    def forward(
        self,
        input_ids: paddle.Tensor,  # [B, T] int64
        attention_mask: paddle.Tensor | None = None,
        output_hidden_states: bool | None = None,
        **further: Any,
    ) -> Any:
        _refuse("text encoder", attention_mask=attention_mask, **further)
        is_xl = bool(self._manifest.programs_of("text_encoder_2"))
        if output_hidden_states and not is_xl:
            raise ToMeConfigError(
                "clip_skip is not supported by an exported text encoder, which only returns its last layer: "
                "leave it out."
            )
        first, second = self._loaded_program(self._programs[0])(input_ids=input_ids)
        if is_xl:
            return CLIPTextModelOutput(text_embeds=second, hidden_states=_PenultimateOnly({-2: first}))
        return BaseModelOutputWithPooling(last_hidden_state=first, pooler_output=second)


class _PenultimateOnly(dict[int, paddle.Tensor]):
    """The hidden states of a text encoder of SDXL. Its program returns only the penultimate state."""

    def __missing__(self, index: int) -> paddle.Tensor:
        raise ToMeConfigError(
            "clip_skip is not supported by an exported text encoder, which only returns its penultimate layer: "
            "leave it out."
        )


class ExportedVAE(ExportedModel, AutoencoderKL):
    """A VAE: its decoder, and its encoder if that was exported."""

    def encode(self, x: paddle.Tensor, return_dict: bool = True) -> Any:
        """The distribution of latents [B, 4, h, w] of images [B, 3, H, W] from -1 to 1."""
        programs = self._manifest.programs_of("vae_encoder")
        if not programs:
            raise ToMeConfigError("the VAE's encoder was not exported: export with --img2img (image_to_image=True).")
        mean, log_variance = self._loaded_program(programs[0])(sample=x)
        distribution = DiagonalGaussianDistribution(paddle.concat([mean, log_variance], axis=1))
        return AutoencoderKLOutput(latent_dist=distribution) if return_dict else (distribution,)

    def decode(self, z: paddle.Tensor, return_dict: bool = True, generator: Any = None) -> Any:
        """Images [B, 3, H, W] from -1 to 1 of latents [B, 4, h, w]; `generator` is ignored, as in the original."""
        (image,) = self._loaded_program(self._programs[0])(latent_sample=z)
        return DecoderOutput(sample=image) if return_dict else (image,)


class ExportedControlNet(StandIn, ControlNetModel):
    """A ControlNet that is part of the UNet's program: it only passes its inputs on to the UNet."""

    def forward(
        self,
        sample: paddle.Tensor,
        timestep: paddle.Tensor,
        encoder_hidden_states: paddle.Tensor,
        controlnet_cond: paddle.Tensor,
        conditioning_scale: float = 1.0,
        guess_mode: bool = False,
        return_dict: bool = False,
        **further: Any,
    ) -> Any:
        if guess_mode:
            raise ToMeConfigError(
                "guess_mode=True is not supported: this ControlNet is fused with the UNet. Leave it out."
            )
        _refuse("ControlNet", **{name: value for name, value in further.items() if name != "added_cond_kwargs"})
        return (controlnet_cond, conditioning_scale), None


class ExportedUNet(ExportedModel, UNet2DConditionModel):
    """A UNet, with or without a fused ControlNet: one program for each exported size and ratio."""

    def __init__(
        self, config: dict[str, Any], manifest: Manifest, load: Load, ratio: float, max_programs: int | None = None
    ) -> None:
        super().__init__(config, manifest, load, "unet", max_programs)
        self._files_by_ratio = {exported: manifest.programs_by_size("unet", exported) for exported in manifest.ratios}
        self.ratio = ratio
        # SDXL's pipelines read the width of this layer.
        width = SimpleNamespace(in_features=config.get("projection_class_embeddings_input_dim"))
        self.add_embedding = SimpleNamespace(linear_1=width)

    @property
    def manifest(self) -> Manifest:
        """The folder's manifest when it was loaded."""
        return self._manifest

    @property
    def loaded(self) -> list[tuple[Size, float]]:
        """Size and ratio of the programs in memory; the program that ran last is last."""
        return [(file.size, file.ratio) for file in self._loaded if file.size is not None and file.ratio is not None]

    def load(self, size: Size, ratio: float) -> None:
        """Load a program before it first runs, unless a loaded program would have to be unloaded.

        Raises:
            ToMeConfigError: it was not exported.
        """
        file = self._manifest.programs_by_size("unet", self._manifest.find_ratio(ratio)).get(size)
        if file is None:
            raise self._manifest.size_error(size)
        with self._loading:
            if file not in self._loaded and (self._max_programs is None or len(self._loaded) < self._max_programs):
                # It has not run, so it is the next to be unloaded.
                self._loaded = {file: self._load_program(file), **self._loaded}

    def exported_merging(self) -> tuple[str, ...]:
        """What was exported, for `tome_summary`: a line with sizes and the current ratio, then one for each ratio."""
        manifest = self._manifest
        sizes = ", ".join(map(str, manifest.sizes))
        line = f"exported for {sizes} (width x height), at ratio {ratio_name(self._ratio)} now (pipe.unet.ratio)"
        of_ratios = [f"ratio {ratio_name(merging.ratio)}: {merging.words or 'plain'}" for merging in manifest.merging]
        return (line, *of_ratios)

    @property
    def ratio(self) -> float:
        """The merge ratio, one of the exported ones; 0 is the plain program."""
        return self._ratio

    @ratio.setter
    def ratio(self, ratio: float) -> None:
        self.select(self._manifest.find_ratio(ratio))

    def select(self, ratio: float) -> None:
        """Run the programs of this ratio from now on: one of the manifest's, which `ratio` finds by six digits."""
        self._ratio, self._program_files = ratio, self._files_by_ratio[ratio]

    def forward(
        self,
        sample: paddle.Tensor,  # [B, C, h, w]
        timestep: Any,
        encoder_hidden_states: paddle.Tensor,  # [B, T, D]
        added_cond_kwargs: dict[str, paddle.Tensor] | None = None,
        down_block_additional_residuals: Any = None,
        mid_block_additional_residual: Any = None,
        return_dict: bool = True,
        **further: Any,
    ) -> Any:
        _refuse("UNet", **further)
        if not paddle.is_tensor(timestep):
            timestep = paddle.to_tensor([timestep])
        if timestep.size != 1:
            raise ToMeConfigError(f"timestep has {timestep.size} values: an exported UNet takes one for the batch.")
        inputs = {
            "sample": sample,
            "timestep": timestep.reshape([1]).cast("float32"),
            "encoder_hidden_states": encoder_hidden_states,
            **(added_cond_kwargs or {}),
            **self._control(down_block_additional_residuals),
        }
        file = self._program_files.get(self._size(sample))
        if file is None:
            raise self._manifest.size_error(self._size(sample))
        program = self._loaded_program(file)
        if unknown := set(inputs) - set(program.inputs):
            raise ToMeConfigError(f"the exported UNet has no input {', '.join(sorted(unknown))}: leave it out.")
        (prediction,) = program(**inputs)
        return UNet2DConditionOutput(sample=prediction) if return_dict else (prediction,)

    def _size(self, sample: paddle.Tensor) -> Size:
        return Size(*(side * self._manifest.vae_factor for side in sample.shape[2:]))

    def _control(self, condition: Any) -> dict[str, paddle.Tensor]:
        if not self._manifest.controlnet:
            if condition is not None:
                raise ToMeConfigError(
                    "this UNet was exported without a ControlNet and takes no residuals: export with --controlnet DIR."
                )
            return {}
        if condition is None:
            raise ToMeConfigError(
                "this UNet was exported with a ControlNet: load it as a ControlNet pipeline, such as "
                f"{self._manifest.pipeline}."
            )
        image, scale = condition
        return {
            "controlnet_cond": image,
            "controlnet_conditioning_scale": paddle.full([self._manifest.residuals], float(scale)),
        }


def _refuse(model: str, **arguments: Any) -> None:
    """Raise ToMeConfigError for inputs that exported programs do not have."""
    names = [
        name for name, value in arguments.items() if value is not None and value is not True and value is not False
    ]
    if names:
        raise ToMeConfigError(f"the exported {model} has no input {', '.join(names)}: leave it out.")
