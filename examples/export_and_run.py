"""Export a pipeline with token merging, and run the programs in ONNX Runtime: two minutes on two cores."""

from pathlib import Path

import ppdiffusers_tome  # adds apply_tome to pipelines
import paddle
from ppdiffusers import StableDiffusionPipeline
from ppdiffusers_tome.inference import export_pipeline, load_pipeline

MODEL = Path(__file__).parent / "emoji_sd"  # or "stable-diffusion-v1-5/stable-diffusion-v1-5"
DTYPE = paddle.float32  # float16 on a GPU

pipe = StableDiffusionPipeline.from_pretrained(str(MODEL), paddle_dtype=DTYPE)
export_pipeline(pipe, "emoji_export", ratios=(0.5, 0), overwrite=True)  # 0: without merging

exported = load_pipeline("emoji_export", ratio=0.5)
paddle.seed(0)
image = exported("a 3d render of fox", num_inference_steps=20, guidance_scale=2.0).images[0]
image.save("export_and_run.png")
