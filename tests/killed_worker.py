"""Takes the place of a worker of `bench`. Its process imports this module, which imports nothing that takes time."""

import os
import signal


def killed(connection, *_):
    connection.send(("an arm", "a step"))
    os.kill(os.getpid(), signal.SIGKILL)
