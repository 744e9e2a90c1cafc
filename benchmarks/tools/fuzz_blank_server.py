"""The server of fuzz_http.py with an engine that returns blank images at once."""

import os

from PIL import Image

from ppdiffusers_tome.run.manifest import Size
from ppdiffusers_tome.serving.app import create_app
from ppdiffusers_tome.serving.app_config import KEY_VARIABLE, AppConfig
from ppdiffusers_tome.serving.jobs import Limits
from ppdiffusers_tome.serving.queue import ImageQueue
from ppdiffusers_tome.serving.server import serve


class BlankEngine:
    name, sampler, methods, can_batch = "blank", "DDIM", {}, False

    def count_tokens(self, prompt):
        return len(prompt), 77, prompt[77:]

    def load_next(self):
        return False

    def generate(self, jobs, should_stop=None):
        return [Image.new("RGB", (job.width, job.height)) for job in jobs]


if __name__ == "__main__":
    limits = Limits(sizes=(Size(64, 64),), ratios=(0.5, 0.0), image_to_image=True, images=2, steps=2)
    queue = ImageQueue(BlankEngine, "blank", limits, capacity=1000)
    config = AppConfig(api_key=os.environ.get(KEY_VARIABLE), steps=1, any_model=True)
    serve(queue, create_app(queue, config), port=0)
