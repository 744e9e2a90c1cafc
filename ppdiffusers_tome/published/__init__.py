"""Published models by their layout: their blocks and sizes, and which of ppdiffusers' pipelines merge."""
