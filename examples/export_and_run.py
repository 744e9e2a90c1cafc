"""Export a merged pipeline as programs for ONNX Runtime, and generate with them; writes export_and_run.png.

The export takes half a minute with the bundled model, minutes with Stable Diffusion; it is written once, to build/.
"""

from pathlib import Path

import ppdiffusers_tome  # before Paddle
import paddle
from ppdiffusers import StableDiffusionPipeline
from ppdiffusers_tome.inference import export_pipeline, load_pipeline

# The bundled model. Of the hub, after ppdiffusers_tome.prepare_download(MODEL): "runwayml/stable-diffusion-v1-5", for
# instance with sizes=[(512, 512)]
MODEL = str(Path(__file__).parent / "emoji_sd")
FOLDER = "build/exported"

if not Path(FOLDER).exists():
    pipe = StableDiffusionPipeline.from_pretrained(MODEL, paddle_dtype=paddle.float32)
    export_pipeline(pipe, FOLDER, ratios=0.75, sizes=[(128, 128)])
exported = load_pipeline(FOLDER)
paddle.seed(0)
settings = {"height": 128, "width": 128, "num_inference_steps": 20, "guidance_scale": 2.0}
exported("a 3d render of fox", **settings).images[0].save("export_and_run.png")
print("wrote export_and_run.png")
