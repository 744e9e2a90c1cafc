"""The server of fuzz_http.py with an engine that returns blank images at once."""

import os

from PIL import Image

from ppdiffusers_tome.run.sizes import Size
from ppdiffusers_tome.serving.app import create_app
from ppdiffusers_tome.serving.app_config import KEY_VARIABLE, AppConfig
from ppdiffusers_tome.serving.image_engine import ServedModel
from ppdiffusers_tome.serving.limits import Limits
from ppdiffusers_tome.serving.pool import EnginePool
from ppdiffusers_tome.serving.prometheus import Metrics
from ppdiffusers_tome.serving.queue import JobQueue
from ppdiffusers_tome.serving.server import serve


class BlankEngine:
    name, sampler, methods, can_batch, program_loads = "blank", "DDIM", {}, False, 0

    def count_tokens(self, prompt):
        return len(prompt), 77, prompt[77:]

    def load_next(self):
        return False

    def generate(self, jobs, should_stop=None):
        return [Image.new("RGB", (job.size.width, job.size.height)) for job in jobs]


if __name__ == "__main__":
    limits = Limits(sizes=(Size(64, 64),), ratios=(0.5, 0.0), image_to_image=True, images=2, steps=2)
    metrics = Metrics()
    pool = EnginePool(lambda is_unwanted: BlankEngine(), JobQueue(metrics, capacity=1000), metrics)
    config = AppConfig(api_key=os.environ.get(KEY_VARIABLE), steps=1, any_model=True)
    model = ServedModel(BlankEngine.name, BlankEngine.sampler, BlankEngine.methods, limits)
    serve(pool, create_app(model, pool, metrics, config), port=0)
