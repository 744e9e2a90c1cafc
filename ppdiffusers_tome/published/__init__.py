"""Published models: their layouts and architectures, and which of ppdiffusers' pipelines merge."""
