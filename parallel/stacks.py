"""The signal at which a process writes its threads' stacks (faulthandler.register).

It is no SIGUSR1, at which users' training code may save a checkpoint or ask a cluster to run it again.
"""

import signal

SIGNAL = signal.SIGRTMIN + 10
