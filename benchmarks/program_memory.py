"""The memory of a UNet's programs over their number, in each runtime, and the time to load them: a table and a plot.

    python benchmarks/program_memory.py measure --model examples/emoji_sd --size 128 192 --output benchmarks/results
    python benchmarks/program_memory.py measure --architecture sd15 --size 256 320 --output benchmarks/results
    python benchmarks/program_memory.py report --output benchmarks/results

Each figure is that of a process of its own, which loads so many programs of one export as `load_pipeline` does and
runs each once. Its memory is PSS, in which memory that is mapped several times counts once, minus that of the same
process before it loads the first program. `max_programs` N means that at most N stay loaded.
"""
