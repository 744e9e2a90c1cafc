"""Models as Hugging Face's hub has them: configs of diffusers and transformers, and weights of PyTorch."""

import io
import json
import pickle
import zipfile
from collections import OrderedDict

import numpy as np
from paddle import nn
from ppdiffusers import ModelMixin
from safetensors.numpy import save_file

OF_PPDIFFUSERS = ("_ppdiffusers_version", "_name_or_path", "data_format", "paddlenlp_version")  # entries of configs
STORAGES = {"float32": "FloatStorage", "int64": "LongStorage"}  # PyTorch's, by data type


def write_diffusers_folder(pipe, folder, *, pickles=False):
    """Write a pipeline as diffusers does, with weights as safetensors, or as PyTorch's pickles (`.bin`)."""
    pipe.save_pretrained(str(folder))
    for name, component in vars(pipe).items():
        if isinstance(component, nn.Layer):
            write_diffusers_model(component, folder / name, pickles=pickles)
    index = _read_json(folder / "model_index.json")
    parts = [part for part in index.values() if isinstance(part, list) and part[0] is not None]
    for part in parts:
        part[0] = {"ppdiffusers": "diffusers", "ppdiffusers.transformers": "transformers"}.get(part[0], part[0])
    _write_json(folder / "model_index.json", _as_diffusers(index))
    path = folder / "scheduler" / "scheduler_config.json"
    _write_json(path, _as_diffusers(_read_json(path)))
    for path in folder.glob("tokenizer*/tokenizer_config.json"):
        _write_json(path, _tokenizer_config(_read_json(path)))


def write_diffusers_model(model, folder, *, pickles=False):
    """Write one model as diffusers or transformers do."""
    model.save_pretrained(str(folder))
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.pdparams")):
        path.unlink()
    is_diffusers = isinstance(model, ModelMixin)
    linear = {f"{path}.weight" for path, layer in model.named_sublayers() if isinstance(layer, nn.Linear)}
    weights = {
        name: np.ascontiguousarray(tensor.numpy().T if name in linear else tensor.numpy())
        for name, tensor in model.state_dict().items()
    }
    config = _as_diffusers(_read_json(folder / "config.json"))
    if not is_diffusers:
        del config["_diffusers_version"]
        config |= {"torch_dtype": "float32", "transformers_version": "4.41.2"}
        weights["text_model.embeddings.position_ids"] = np.arange(24)[None]  # as older releases of transformers do
    _write_json(folder / "config.json", config)
    if pickles:
        name = "diffusion_pytorch_model.bin" if is_diffusers else "pytorch_model.bin"
        (folder / name).write_bytes(_pickled(weights))
    else:
        name = "diffusion_pytorch_model.safetensors" if is_diffusers else "model.safetensors"
        save_file(weights, folder / name, metadata={"format": "pt"})


def _as_diffusers(config):
    return {name: value for name, value in config.items() if name not in OF_PPDIFFUSERS} | {
        "_diffusers_version": "0.29.0"
    }


def _tokenizer_config(config):
    """What transformers writes of a CLIPTokenizer."""
    token = {"__type": "AddedToken", "lstrip": False, "normalized": True, "rstrip": False, "single_word": False}
    special = {name: {**token, "content": config[name]} for name in ("bos_token", "eos_token", "unk_token")}
    return special | {
        "add_prefix_space": False,
        "do_lower_case": True,
        "errors": "replace",
        "model_max_length": config["model_max_length"],
        "pad_token": config["pad_token"],
        "special_tokens_map_file": "./special_tokens_map.json",
        "tokenizer_class": "CLIPTokenizer",
    }


def _read_json(path):
    return json.loads(path.read_text(encoding="utf-8"))


def _write_json(path, data):
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


# Pickles of PyTorch, without PyTorch


def _pickled(weights):
    """A state_dict of arrays in the format of `torch.save`."""
    tensors, content = OrderedDict(), io.BytesIO()
    for key, (name, array) in enumerate(weights.items()):
        storage = _Storage(("storage", _Global("torch", STORAGES[array.dtype.name]), str(key), "cpu", array.size))
        strides = tuple(stride // array.itemsize for stride in array.strides)
        tensors[name] = _Tensor((storage, 0, array.shape, strides, False, OrderedDict()))
    pickled = io.BytesIO()
    _Pickler(pickled, protocol=2).dump(tensors)
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr("archive/data.pkl", pickled.getvalue())
        for key, array in enumerate(weights.values()):
            archive.writestr(f"archive/data/{key}", array.tobytes())
    return content.getvalue()


class _Storage(tuple):
    """What identifies the storage of a tensor."""


class _Tensor(tuple):
    """The arguments that a tensor is rebuilt with."""


class _Global:
    """A name in a module that need not be installed."""

    def __init__(self, module, name):
        self.module, self.name = module, name

    def __call__(self):
        raise NotImplementedError


class _Pickler(pickle._Pickler):
    def save(self, value, save_persistent_id=True):
        if isinstance(value, _Global):
            self.write(pickle.GLOBAL + f"{value.module}\n{value.name}\n".encode())
        elif isinstance(value, _Tensor):
            self.save_reduce(_Global("torch._utils", "_rebuild_tensor_v2"), tuple(value), obj=value)
        else:
            super().save(value, save_persistent_id)

    def persistent_id(self, value):
        return tuple(value) if isinstance(value, _Storage) else None
