"""Takes the place of parts of a worker of `bench`. Its process imports this module, which must import quickly."""

import os
import signal


def killed(connection, *_):
    connection.send(("an arm", "a step"))
    os.kill(os.getpid(), signal.SIGKILL)
