"""A cache that replaces the whole `forward` of a layer, as those of ppdiffusers after 0.29.0 do."""

from types import MethodType


class ForwardCache:
    """Every second pass returns what the one before has computed, by the code of the layer's class.

    SortBlock and TeaBlockCacheTaylor of ppdiffusers do so: their `forward` is a changed copy of the transformer's, and
    calls the layers inside it, but nothing that was around it. They keep what `layer.forward` was, and put it back.
    """

    def __init__(self, layer):
        self.layer, self.computed, self._passes, self._output = layer, 0, 0, None
        self._original = layer.forward

        def forward(layer, *args, **kwargs):
            self._passes += 1
            if self._passes % 2:
                self.computed += 1
                self._output = type(layer).forward(layer, *args, **kwargs)
            return self._output

        layer.forward = MethodType(forward, layer)

    def remove(self):
        self.layer.forward = self._original


def check_with_caches(model, layers, passes):
    """Merging and caches of some layers, whichever comes first, and whichever goes first.

    Args:
        model: it does not merge, and is left so.
        layers: those whose `forward` caches replace.
        passes: functions that make a pass and return its output. Grids that follow each other may have as many tokens
            and other sides.
    """

    def outputs(times=1):
        return [make().tolist() for make in passes for _ in range(times)]

    def of_caches(expected):
        return [output for output in expected for _ in range(2)]

    plain, forwards = outputs(), [layer.forward for layer in layers]
    model.apply_tome()
    merged = outputs()
    model.remove_tome()
    assert all(x != y for x, y in zip(plain, merged, strict=True))
    for caches_come_first in (True, False):
        for caches_go_first in (True, False):
            if not caches_come_first:
                model.apply_tome()
            caches = [ForwardCache(layer) for layer in layers]
            if caches_come_first:
                model.apply_tome()
            assert outputs(times=2) == of_caches(merged)
            assert {cache.computed for cache in caches} == {len(passes)}
            if caches_go_first:
                for cache in caches:
                    cache.remove()
                assert outputs() == merged
                model.remove_tome()
            else:
                model.remove_tome()
                assert outputs(times=2) == of_caches(plain)
                for cache in caches:
                    cache.remove()  # which puts back our `forward`; without merging it does nothing
                assert outputs() == plain
                model.remove_tome()
            assert outputs() == plain
            assert [layer.forward for layer in layers] == forwards
            assert not any("_tome" in vars(layer) for layer in model.sublayers(include_self=True))
