"""Images from jobs: the engine, and lists of prompts without a server, in this process or on Ray, resumable."""
