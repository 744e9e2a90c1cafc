"""Takes the place of parts of a worker of `bench`. Its process imports this module, which must import quickly."""

import ctypes
import os
import signal
from pathlib import Path


def killed(connection, *_):
    connection.send(("an arm", "a step"))
    os.kill(os.getpid(), signal.SIGKILL)


def end_with_the_number_of_threads(*arguments):
    """A worker whose model cannot be opened: the error has the number of threads with which Paddle would compute."""
    from lab.speed import worker

    worker.Workload = lambda case: fail()
    worker.run(*arguments)


def fail():
    import paddle

    library = ctypes.CDLL(str(Path(paddle.__file__).with_name("libs") / "libiomp5.so"))
    raise AssertionError(f"OMP_NUM_THREADS={os.environ['OMP_NUM_THREADS']}, Paddle: {library.omp_get_max_threads()}")
