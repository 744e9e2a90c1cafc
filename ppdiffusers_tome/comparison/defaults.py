"""What `compare` does if an option is absent, and its exit status. Nothing here imports Paddle."""

ROUNDS = 5  # steps of each arm that are timed
STRENGTH = 0.5  # of image-to-image
NOT_REACHED = 1  # exit status: no settings reach the goal
