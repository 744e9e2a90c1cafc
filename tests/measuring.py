"""Measurements in this process, for the tests of benchmarks."""

import copy

from lab.speed.worker import measure_case


def messages_of_this_process(*arguments):
    """Measure in this process, in place of a worker process, which takes seconds to start."""
    messages = []
    measure_case(lambda message: messages.append(copy.deepcopy(message)), *arguments)
    return messages
