"""SIGHUP and SIGTERM to `dualform serve` from the first line on, before a server can take them.

SIGHUP waits until then: what it does by default is to kill, and supervisors send it to read a
configuration again, also while Python still imports. SIGTERM ends the process at once, as its
default does but for the first process of a container, which the system spares it. Imported before
everything else.
"""

from __future__ import annotations

import os
import signal
import sys

# What Python calls the program: the script, `python -m dualform.cli` before and after it is found.
_OURS = ("dualform", "-m", "__main__.py")

if sys.argv[1:2] == ["serve"] and os.path.basename(sys.argv[0]) in _OURS:
    if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGHUP])
