"""What `compare` does if an option is absent, and its exit status. Nothing here imports Paddle."""

ROUNDS = 9  # steps of each arm that are timed: benchmarks/gain_rule.py has what they show
PROMPT_COUNT = 4  # of a model that has prompts of its own, so that a bad image can be seen
KNOWN_RATIOS = (0.25, 0.5, 0.625, 0.75, 0.875, 0.9375)  # of `interlace`, which a goal tries
STRENGTH = 0.5  # of image-to-image
NOT_REACHED = 1  # exit status: no settings reach the goal
