"""The methods by name: what the command line shows of them without importing Paddle, which their modules need."""

DEFAULT_METHOD = "interlace"
DESCRIPTIONS = {  # what remains, in a line
    "interlace": "keys and values are those of a part of the tokens, and of another part in each step",
    "todo": "keys and values are those of one token of each cell, or at ratio 0.5 of a checkerboard",
    "tomesd": "the results of tomesd, also with its random dst in each step",
}
