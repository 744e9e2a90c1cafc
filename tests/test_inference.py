import numpy as np, paddle
from ppdiffusers_tome.inference import load_pipeline, read_manifest
def test_a(exported_folder):
    m=read_manifest(exported_folder)
    for p in m.programs: print(p)
